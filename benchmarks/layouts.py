"""Which small networks round otherwise by a plan, because oneDNN meets other memory layouts?

    .venv/bin/python benchmarks/layouts.py [--channels 16] [--realisations packed explicit mirror]
        [--strategies chen_sqrt chen_greedy]

An operator stands right before a BatchNorm, or behind it and behind the convolution that follows,
in plain and in residual networks. Each trains two steps by MXNet's Module and by plans of each
strategy: outputs, parameters and statistics are compared bit for bit. MXNet itself is run twice.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import mxnet as mx
import numpy as np

import memplan
from memplan.errors import MemplanError
from memplan.mxnet import Module

Symbol: TypeAlias = Any  # MXNet has no types
Operator = Callable[[Symbol, int], Symbol]
Values = dict[str, Any]
BATCH, SIDE, CLASSES, STEPS = 4, 14, 5, 2


def operators(channels: int) -> dict[str, Operator]:
    """By name; the second argument tells those with parameters apart."""
    S = mx.sym  # noqa: N806

    def parameter(name: str, shape: tuple[int, ...], value: float) -> Symbol:
        return S.Variable(name, shape=shape, init=mx.init.Constant(value))

    def gates(x: Symbol, _: int) -> Symbol:
        means = S.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1))
        excitation = S.Convolution(means, num_filter=channels, kernel=(1, 1))
        return S.broadcast_mul(x, S.sigmoid(excitation))

    def instance_norm(x: Symbol, k: int) -> Symbol:
        scale, shift = (parameter(f"{n}{k}", (channels,), v) for n, v in (("scale", 1), ("s", 0)))
        return S.InstanceNorm(x, scale, shift)

    def shift(x: Symbol, k: int) -> Symbol:
        return S.broadcast_add(x * 0.7, parameter(f"shift{k}", (1, channels, 1, 1), 1))

    return {
        "swish": lambda x, _: x * S.sigmoid(x),
        "hard swish": lambda x, _: x * S.clip(x + 3, a_min=0, a_max=6) / 6,
        "PReLU": lambda x, k: S.LeakyReLU(x, act_type="prelu", name=f"prelu{k}"),
        "Dropout": lambda x, _: S.Dropout(x, p=0.3),
        "product with a number": lambda x, _: x * 1.5,
        "tanh": lambda x, _: S.tanh(x),
        "gates": gates,
        "L2Normalization": lambda x, _: S.L2Normalization(x, mode="channel"),
        "InstanceNorm": instance_norm,
        "LeakyReLU": lambda x, _: S.LeakyReLU(x, slope=0.1),
        "abs, added": lambda x, _: S.abs(x) + x,
        "product and sum": shift,
        "where": lambda x, _: S.where(x > 0, x, x * 0.2),
    }


def network(operator: Operator, channels: int, *, is_before: bool, is_residual: bool) -> Symbol:
    """Five units of the operator, a BatchNorm and a convolution."""

    def convolution(x: Symbol, name: str) -> Symbol:
        return mx.sym.Convolution(x, num_filter=channels, kernel=(3, 3), pad=(1, 1), name=name)

    body = convolution(mx.sym.Variable("data"), "first")
    for k in range(5):
        branch = operator(body, k) if is_before else body
        branch = mx.sym.BatchNorm(branch, fix_gamma=False, name=f"norm{k}")
        branch = convolution(branch if is_before else operator(branch, k), f"conv{k}")
        branch = branch if is_before else operator(branch, 10 + k)
        body = body + branch if is_residual else branch
    body = mx.sym.Activation(body, act_type="relu")
    pooled = mx.sym.Pooling(body, global_pool=True, pool_type="avg", kernel=(1, 1))
    scores = mx.sym.FullyConnected(pooled, num_hidden=CLASSES, name="scores")
    return mx.sym.SoftmaxOutput(scores, name="softmax")


def networks(channels: int) -> Iterator[tuple[str, Symbol]]:
    for name, operator in operators(channels).items():
        for is_before in (True, False):
            for is_residual in (False, True):
                place = "before" if is_before else "behind"
                label = f"{name} {place}{', residual' if is_residual else ''}"
                options = {"is_before": is_before, "is_residual": is_residual}
                with mx.name.NameManager():
                    yield label, network(operator, channels, **options)


def trained(module: Any, init: tuple[Values, Values] | None) -> tuple[Values, Any]:
    """What a module leaves after some steps, and its parameters before them."""
    rng = np.random.default_rng(0)
    data = mx.nd.array(rng.standard_normal((BATCH, 3, SIDE, SIDE)))
    batch = mx.io.DataBatch([data], [mx.nd.arange(BATCH)])
    module.bind([("data", data.shape)], [("softmax_label", (BATCH,))])
    mx.random.seed(0)
    if init is None:
        module.init_params(mx.init.Xavier())
    else:
        module.set_params(*init)
    module.init_optimizer(optimizer_params={"learning_rate": 0.01, "momentum": 0.9})
    begin = tuple({n: a.copy() for n, a in part.items()} for part in module.get_params())
    mx.random.seed(1)
    mx.nd.waitall()  # BatchNorm writes its statistics behind the engine's back
    result = {}
    for step in range(STEPS):
        module.forward(batch, is_train=True)
        module.backward()
        result[f"output {step}"] = module.get_outputs()[0].asnumpy()
        module.update()
    mx.nd.waitall()
    for part in module.get_params():
        result |= {name: array.asnumpy() for name, array in part.items()}
    return result, begin


def planned(symbol: Symbol, realisation: str, strategy: str) -> Any:
    options: dict[str, Any] = {"strategy": strategy, "time_limit": 600}
    if realisation != "mirror":
        return Module(symbol, realisation=realisation, **options)
    shape = (BATCH, 3, SIDE, SIDE)
    return mx.mod.Module(memplan.plan(symbol, data=shape, **options).symbol)


def largest_difference(one: Values, other: Values) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def measure(channels: int, realisations: Sequence[str], strategies: Sequence[str]) -> None:
    """A line for each realisation."""
    differences: dict[str, dict[str, float]] = {name: {} for name in ("MXNet again", *realisations)}
    count = 0
    for label, symbol in networks(channels):
        count += 1
        stock, init = trained(mx.mod.Module(symbol), None)
        again, _ = trained(mx.mod.Module(symbol), init)
        differences["MXNet again"][label] = largest_difference(stock, again)
        for realisation in realisations:
            for strategy in strategies:
                try:
                    values, _ = trained(planned(symbol, realisation, strategy), init)
                except MemplanError as error:
                    print(f"{label}, {realisation}, {strategy}: {error}")
                    continue
                gap = largest_difference(stock, values)
                so_far = differences[realisation].get(label, 0.0)
                differences[realisation][label] = max(so_far, gap)
    print("| steps | networks that differ | by at most | which |\n|---|---|---|---|")
    for name, gaps in differences.items():
        unlike = {label: gap for label, gap in gaps.items() if gap}
        most = f"{max(unlike.values()):.1e}" if unlike else ""
        print(f"| {name} | {len(unlike)} of {count} | {most} | {'; '.join(unlike)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--realisations", nargs="+", default=["packed", "explicit", "mirror"])
    parser.add_argument("--strategies", nargs="+", default=["chen_sqrt", "chen_greedy"])
    options = parser.parse_args()
    measure(options.channels, options.realisations, options.strategies)


if __name__ == "__main__":
    main()
