"""Trains a small network by MXNet's executor and by each realisation; head gradients are random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from helpers.amounts import is_whole
from helpers.training_runs import bound
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.realise.mirror import annotate
from memplan.mxnet.trace.build import Trace
from memplan.step.mirroring import flaggable
from memplan.step.schedule import Schedule

Symbol = mx.sym.Symbol
Flags = frozenset[int]
SEED = 7
STEPS = 2


def arrays(traced: Trace, names: Sequence[str]) -> dict[str, mx.nd.NDArray]:
    """Random numbers; small indices for a label, positive ones where the name says so."""
    result = {}
    for name in names:
        draw = np.random.default_rng(sum(map(ord, name)))
        shape = traced.shapes[name]
        if name.endswith("label"):
            numbers = draw.integers(0, 2, shape)
        elif name.endswith(("positive", "var")):
            numbers = draw.uniform(0.5, 1.5, shape)
        else:
            numbers = draw.normal(0.0, 0.5, shape)
        result[name] = mx.nd.array(numbers, dtype=traced.dtypes[name])
    return result


def training_run(symbol: Symbol, traced: Trace) -> dict[str, bytes]:
    """Every output, gradient and auxiliary state of a few steps of gradient descent by MXNet."""
    weights = arrays(traced, symbol.list_arguments())
    gradients = {
        name: mx.nd.zeros(traced.shapes[name], dtype=traced.dtypes[name])
        for name in weights
        if traced.grad_req[name] != "null"
    }
    executor = symbol.bind(
        mx.cpu(),
        weights,
        gradients,
        grad_req=dict(traced.grad_req),
        aux_states=arrays(traced, symbol.list_auxiliary_states()),
    )
    return _run(executor)


def scheduled_run(traced: Trace, schedule: Schedule) -> dict[str, bytes]:
    """The same by ``schedule``, which is explicit or packed, as ``traced`` is."""
    values = {n: array.asnumpy() for n, array in arrays(traced, list(traced.shapes)).items()}
    return _run(bound(traced, schedule, values))


def _run(executor: Any) -> dict[str, bytes]:
    mx.random.seed(SEED)
    np.random.seed(SEED)
    result = {}
    for step in range(STEPS):
        draw = np.random.default_rng(step)
        head_grads = [
            mx.nd.array(draw.normal(size=o.shape), dtype=o.dtype) for o in executor.outputs
        ]
        if isinstance(executor, TrainExecutor):
            for name, array in executor.head_grads.items():
                head_grads[int(name.rpartition("_")[2])].copyto(array)
            head_grads = []
        outputs = executor.forward(is_train=True)
        executor.backward(head_grads)
        mx.nd.waitall()  # asnumpy() does not wait for auxiliary states
        gradients = {n: grad for n, grad in executor.grad_dict.items() if grad is not None}
        named = {
            "output": dict(enumerate(outputs)),
            "gradient": gradients,
            "state": executor.aux_dict,
        }
        for kind, values in named.items():
            for name, value in values.items():
                result[f"{kind} {name} of step {step}"] = value.asnumpy().tobytes()
        for name, gradient in gradients.items():
            executor.arg_dict[name][:] -= 0.01 * gradient
    return result


def assert_mirrored_is(
    expected: dict[str, bytes], traced: Trace, sets_of_flags: Iterator[Flags]
) -> None:
    """With each of the sets of flags, training leaves what is ``expected``, bit for bit."""
    for flags in sets_of_flags:
        actual = training_run(annotate(traced, flags), traced)
        names = [traced.graph.ops[op].name for op in sorted(flags)]
        assert differing(expected, actual) == [], f"flagged {names}"


def differing(expected: dict[str, bytes], actual: dict[str, bytes]) -> list[str]:
    """The names of what is not the same in both."""
    assert expected.keys() == actual.keys()
    return [name for name in expected if actual[name] != expected[name]]


def by_name(traced: Trace, *names: str) -> Flags:
    """The ops of these names."""
    found = frozenset(i for i, op in enumerate(traced.graph.ops) if op.name in names)
    assert len(found) == len(names)
    return found


def random_flags(traced: Trace, draw: random.Random) -> Flags:
    """Each op with the same chance, which is itself drawn."""
    share = draw.choice((0.2, 0.5, 0.8))
    return frozenset(op for op in flaggable(traced.graph) if draw.random() < share)


def some_flags(traced: Trace) -> Iterator[Flags]:
    """All that may be flagged and a random set; in make test-all each op alone, and more sets."""
    candidates = flaggable(traced.graph)
    yield frozenset(candidates)
    for op in candidates if is_whole() else []:
        yield frozenset({op})
    draw = random.Random(SEED)
    for _ in range(3 if is_whole() else 1):
        yield random_flags(traced, draw)
