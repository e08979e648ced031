"""Gradients that a script holds while MXNet gives the parameters others between two steps."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import chain_net
from memplan.mxnet.gluon import TrainStep, planned
from memplan.mxnet.train.arrays.array_memory import chunk_of, memories_in_python
from memplan.mxnet.train.pool import Pool

Arrays = list[Any]
REQUESTS = ("add", "write")


def pictures(step: int, batch: int = 2) -> Any:
    return mx.nd.arange(300 * batch).reshape((batch, 3, 10, 10)) / (600 + step)


def squares(outputs: Any, _: Any = None) -> Any:
    return (outputs * outputs).sum()


class Loop:
    """Steps of a network by MXNet, by its ``planned`` block or by a TrainStep."""

    def __init__(self, how: str, realisation: str = "packed") -> None:
        self.net = chain_net(pictures(0))
        options: Any = {"strategy": "chen_sqrt", "realisation": realisation}
        self.step = TrainStep(self.net, squares, **options) if how == "step" else None
        if how == "planned":
            planned(self.net, **options)
        self.trained = [p for p in self.net.collect_params().values() if p.grad_req != "null"]

    def run(self, number: int, batch: int = 2) -> None:
        if self.step is not None:
            self.step(pictures(number, batch))
        else:
            with autograd.record():
                loss = squares(self.net(pictures(number, batch)))
            loss.backward()
        for p in self.trained:
            p.set_data(p.data() - 0.01 * p.grad())

    def ask_anew(self, *, of_all: bool) -> None:
        for p in self.trained if of_all else self.trained[-1:]:
            for request in REQUESTS:
                p.grad_req = request


def numbers_of_held(loop: Loop, of_all: bool, batches: tuple[int, ...]) -> Arrays:
    """Of all gradients before the change, of those of now, and of the parameters, in the end."""
    loop.run(0)
    loop.run(1, batches[0])
    held = [p.grad() for p in loop.trained]
    loop.ask_anew(of_all=of_all)
    for number, batch in enumerate(batches):
        loop.run(2 + number, batch)
    arrays = held + [p.grad() for p in loop.trained] + [p.data() for p in loop.trained]
    return [array.asnumpy() for array in arrays]


@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize("realisation", ["packed", "explicit"])
@pytest.mark.parametrize("how", ["planned", "step"])
def test_a_gradient_that_is_held_keeps_its_numbers(
    how: str, realisation: str, of_all: bool
) -> None:
    """The parameter has got another array, as MXNet makes one wherever grad_req is set anew."""
    for batches in ((2, 2), (3, 2)):
        expected = numbers_of_held(Loop(""), of_all, batches)
        found = numbers_of_held(Loop(how, realisation), of_all, batches)
        assert all(map(np.array_equal, expected, found))


def test_a_gradient_of_a_second_step_keeps_its_numbers_behind_the_first() -> None:
    """Each has memory of its own, and the first one's arrays are in the parameters by then."""
    found = []
    for how in ("", "step"):
        loop = Loop(how)
        other = TrainStep(loop.net, squares, strategy="chen_sqrt", realisation="packed")
        first, second = loop.step, other if how else None
        arrays = []
        for number, step in enumerate((first, second, "ask anew", first, second)):
            if step == "ask anew":
                arrays = [p.grad() for p in loop.trained]
                loop.ask_anew(of_all=True)
            else:
                loop.step = step
                loop.run(number)
        found.append([array.asnumpy() for array in arrays])
    assert all(map(np.array_equal, *found))


class Gated(gluon.HybridBlock):
    """Of one input it reads fewer parameters than of two."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.first, self.gate, self.last = (nn.Dense(6, in_units=6) for _ in range(3))

    def hybrid_forward(self, F: Any, x: Any, gate: Any = None) -> Any:  # noqa: N803
        x = self.first(x)
        return self.last(x if gate is None else x * self.gate(gate))


@pytest.mark.parametrize("requests", [("null",), ("add",), ("add", "write"), ("null", "write")])
def test_a_gradient_keeps_its_numbers_in_a_step_that_does_not_read_its_parameter(
    requests: tuple[str, ...],
) -> None:
    """It runs in the same memory."""
    net, x = Gated(), mx.nd.arange(24).reshape((4, 6)) / 24
    net.initialize(mx.init.Xavier())
    step = TrainStep(net, squares, strategy="store_all", realisation="packed")
    for inputs in ((x, x), x, (x, x)):
        step(inputs)
    held = [p.grad() for p in net.gate.collect_params().values()]
    before = [array.asnumpy() for array in held]
    for request in requests:
        net.gate.collect_params().setattr("grad_req", request)
    for _ in range(2):
        step(x * 2)
    assert all(map(np.array_equal, before, [array.asnumpy() for array in held]))


def nbinds(monkeypatch: pytest.MonkeyPatch, run: Callable[[], None]) -> int:
    """How often something is bound in a pool meanwhile."""
    calls: list[None] = []
    add = Pool.add

    def counted(*arguments: Any) -> None:
        calls.append(None)
        add(*arguments)

    monkeypatch.setattr(Pool, "add", counted)
    run()
    return len(calls)


def test_steps_are_bound_anew_once_where_gradients_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not where they are held, set to zero, or are those of another step in the same memory."""
    loop = Loop("step")
    for batch in (3, 2):
        loop.run(0, batch)

    def go_on() -> None:
        held = []
        for number, batch in enumerate((3, 2, 2, 3, 3)):
            held += [p.grad() for p in loop.trained]
            loop.net.collect_params().zero_grad()
            loop.run(number, batch)

    assert nbinds(monkeypatch, go_on) == 0
    loop.ask_anew(of_all=False)
    assert nbinds(monkeypatch, go_on) == 2


@pytest.mark.parametrize("are_held", [False, True])
@pytest.mark.parametrize("how", ["planned", "step"])
def test_the_memory_of_before_goes_whoever_holds_a_gradient(
    how: str, are_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the step is bound anew; a gradient that is held gets memory of its own."""
    loop, memories, left, held = Loop(how), dict[int, tuple[int, int]](), [], []
    add = Pool.add

    def place_of(chunk: int) -> tuple[int, int]:
        begin, nbytes = (ctypes.c_uint64 * 2).from_address(chunk)
        return begin, nbytes

    def noted(pool: Pool, need: Any, executor: Any, memory: Any) -> None:
        memories.update((chunk, place_of(chunk)) for chunk in map(chunk_of, memory._segments))
        assert all(begin and nbytes for begin, nbytes in memories.values())
        add(pool, need, executor, memory)

    def look(_: Any) -> None:
        mx.nd.waitall()  # as release() does: until then the engine holds what it reads
        gc.collect()
        there = memories_in_python(())  # another memory may stand where one stood that is gone
        left.append({c for c, place in memories.items() if c in there and place_of(c) == place})
        memories.clear()

    monkeypatch.setattr(Pool, "add", noted)
    monkeypatch.setattr("memplan.mxnet.train.pool.release", look)
    for number in range(3):
        loop.run(number)
        held += [p.grad() for p in loop.trained] if are_held else []
        loop.ask_anew(of_all=True)
    assert left == [set()] * 3  # before the first step, of what others have left, too


def test_a_gradient_that_moved_out_of_the_step_is_let_go_when_it_is_replaced() -> None:
    net, x = Gated(), mx.nd.arange(24).reshape((4, 6)) / 24
    net.initialize(mx.init.Xavier())
    step = TrainStep(net, squares, strategy="store_all", realisation="packed")
    for inputs in ((x, x), x, (x, x), x):
        step(inputs)
    moved = [p.grad() for p in net.gate.collect_params().values()]
    net.gate.collect_params().setattr("grad_req", "add")
    step(x)
    assert all(gc.get_referrers(gradient) == [moved] for gradient in moved)


def test_gradients_that_nobody_holds_are_not_copied_when_they_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, copied = Loop("step"), list[Any]()
    loop.run(0)
    loop.ask_anew(of_all=True)
    copy = mx.nd.NDArray.copy
    monkeypatch.setattr(mx.nd.NDArray, "copy", lambda array: copied.append(array) or copy(array))
    loop.step(pictures(1))
    assert [array.shape for array in copied] == [(1,)]  # the loss
