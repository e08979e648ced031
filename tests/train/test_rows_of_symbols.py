"""What arrays have of rows, and Symbols of outputs: refused, or as with arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest
from mxnet.gluon import nn

from helpers.blocks import CPU, SOFTMAX, Computing, trained, vectors
from memplan.errors import TraceError
from memplan.mxnet.gluon import TrainStep, planned

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


def length(F: Any, x: Any) -> Any:  # noqa: N803
    return x / len(x)


def guessed_length(F: Any, x: Any) -> Any:  # noqa: N803
    try:
        return x / len(x)
    except Exception:
        return x


ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "x[0]": lambda f, x: f.broadcast_sub(x, f.expand_dims(x[0], axis=0)),
    "x[-1]": lambda f, x: f.broadcast_sub(x, f.expand_dims(x[-1], axis=0)),
    "x[:1]": lambda f, x: f.broadcast_sub(x, x[:1]),
    "for": lambda f, x: f.stack(*[f.softmax(row, axis=0) for row in x]),
    "zip": lambda f, x: f.stack(*[a * b for a, b in zip(x, 2 * x, strict=True)]),
    "*": lambda f, x: f.stack(*x),
}


@pytest.mark.parametrize("of", [length, guessed_length, *ROWS.values()])
def test_what_an_array_has_of_rows_is_refused(of: Any) -> None:
    """A Symbol has it of its one output: another network would be trained."""
    methods = [getattr(mx.sym.Symbol, name) for name in ("__len__", "__iter__", "__getitem__")]
    net = Computing(of)
    net.initialize(ctx=CPU)
    trained(net, *vectors())
    what = r"the len\(\)" if of in (length, guessed_length) else "rows"
    place = rf"{of.__code__.co_name} \({__file__}:\d+\)"
    with pytest.raises(TraceError, match=f"{place} asks for {what} of 'net_dense0_fwd'"):
        trained(planned(net, **OPTIONS), *vectors())
    assert [getattr(mx.sym.Symbol, m.__name__) for m in methods] == methods


def test_rows_are_refused_to_a_loss_in_the_plan() -> None:
    net = nn.Dense(10)
    net.initialize(ctx=CPU)
    net.hybridize()
    step = TrainStep(net, lambda scores, y: SOFTMAX(scores, y) / len(y), **OPTIONS)
    with pytest.raises(TraceError, match=r"asks for the len\(\) of 'memplan_label0'"):
        step(*vectors())


class ByForward(Computing):
    """MXNet calls its graph with what ``forward`` makes of arrays."""

    def forward(self, x: Any) -> Any:
        return super().forward(x * len(x))


def test_rows_are_refused_to_a_forward_of_the_scripts() -> None:
    net = ByForward(lambda f, x: x)
    net.initialize(ctx=CPU)
    net.hybridize()
    with pytest.raises(TraceError, match=r"forward \(.*\) asks for the len\(\)"):
        trained(planned(net, **OPTIONS), *vectors())


@pytest.mark.parametrize("which", ["the block", "a child"])
@pytest.mark.parametrize("before", [True, False])
def test_a_hybridized_block_has_outputs_without_a_plan_too(which: str, before: bool) -> None:
    def of(F: Any, x: Any) -> Any:  # noqa: N803
        return F.concat(*x, dim=1) / len(x) + x[0]

    gradients = []
    for plan in (False, True):
        mx.random.seed(1)
        net = part = Computing(of, "part_")
        if which == "a child":
            net = Computing(lambda f, x, part=part: part(x) * 2)
            net.part = part
        net.initialize(ctx=CPU)
        part.hybridize()
        x, y = vectors()
        if before:
            net(x)
        if plan:
            planned(net, **OPTIONS)
        trained(net, x, y)
        gradients.append([p.grad() for p in net.collect_params().values()])
    assert all((a == b).asnumpy().all() for a, b in zip(*gradients, strict=True))


def of_several(F: Any, x: Any) -> Any:  # noqa: N803
    parts = F.split(x, num_outputs=2)
    first, second = parts
    return F.concat(*parts, *[part * len(parts) for part in parts], parts[0] * first - second)


def of_all(F: Any, x: Any) -> Any:  # noqa: N803
    return x[:] + x[:] * 2


def of_list(way: Callable[[Any], list[Any]]) -> Callable[[Any, Any], Any]:
    """Computes of what an operator of two outputs returns, called as a function and as a method."""

    def of(F: Any, x: Any) -> Any:  # noqa: N803
        pairs = F.split(x, num_outputs=2), x.split(num_outputs=2, axis=1)
        return F.concat(x, *(part * part for parts in pairs for part in way(parts)))

    return of


LISTS: dict[str, Callable[[Any], list[Any]]] = {
    "[-1]": lambda parts: [parts[-1]],
    "[:-1]": lambda parts: parts[:-1],
    "[::-1]": lambda parts: parts[::-1],
    "[1:2]": lambda parts: [parts[1:2][0]],
    "+": lambda parts: parts + list(parts),
    "pop": lambda parts: [parts.pop()],
    "isinstance": lambda parts: parts if isinstance(parts, list) else [],
}


@pytest.mark.parametrize("of", [of_several, of_all, *map(of_list, LISTS.values())])
def test_what_arrays_have_alike_is_not_refused(of: Any) -> None:
    gradients = []
    for plan in (False, True):
        mx.random.seed(1)
        net = Computing(of)
        net.initialize(ctx=CPU)
        trained(planned(net, **OPTIONS) if plan else net, *vectors())
        gradients.append(net.body.weight.grad())
    assert (gradients[0] == gradients[1]).asnumpy().all()


def test_a_loss_gets_lists_of_operators() -> None:
    def loss(scores: Any, y: Any) -> Any:
        return SOFTMAX(scores, y) + scores.split(num_outputs=2, axis=1)[-1].mean(axis=1)

    x, y = vectors()
    net = nn.Dense(10)
    net.initialize(ctx=CPU)
    step, expected = TrainStep(net, loss, **OPTIONS), loss(net(x), y)
    for _ in range(2):  # the second time it is called apart from the block
        assert (step(x, y) == expected).asnumpy().all()


def test_rows_are_what_a_script_makes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(symbol: Any, index: int) -> Any:
        return mx.sym.take(symbol, mx.sym.full((1,), index), 0)

    monkeypatch.setattr(mx.sym.Symbol, "__getitem__", row)
    net = Computing(lambda f, x: f.broadcast_mul(x, f.expand_dims(f.reshape(x[0], (-1,)), 0)))
    net.initialize(ctx=CPU)
    trained(planned(net, **OPTIONS), *vectors())
    assert mx.sym.Symbol.__getitem__ is row


def test_symbols_of_another_thread_are_not_refused() -> None:
    found = []

    def of(F: Any, x: Any) -> Any:  # noqa: N803
        thread = threading.Thread(target=lambda: found.append(len(mx.sym.Variable("z"))))
        thread.start()
        thread.join()
        return x

    net = Computing(of)
    net.initialize(ctx=CPU)
    planned(net, **OPTIONS).planned_step.plan((4, 6))
    assert found == [1]


def test_symbols_are_left_as_they_were_by_ctrl_c() -> None:
    method = mx.sym.Symbol.__len__

    def of(F: Any, x: Any) -> Any:  # noqa: N803
        assert mx.sym.Symbol.__len__ is not method
        raise KeyboardInterrupt

    net = Computing(of)
    net.initialize(ctx=CPU)
    with pytest.raises(KeyboardInterrupt):
        TrainStep(net, **OPTIONS).plan((4, 6))
    assert mx.sym.Symbol.__len__ is method
