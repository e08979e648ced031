"""Gammas that a BatchNorm fixes, writing ones over them, and that others read, too."""

from __future__ import annotations

import random
from collections.abc import Callable

import mxnet as mx
import pytest

from helpers.operator_calls import IMAGE, V, shelled
from helpers.operator_runs import (
    assert_mirrored_is,
    differing,
    random_flags,
    scheduled_run,
    training_run,
)
from helpers.schedules import random_schedule
from memplan.errors import TraceError
from memplan.planning.realisation import trace
from memplan.step.mirroring import flaggable
from memplan.step.schedule import Schedule

Symbol = mx.sym.Symbol


def scaled(x: Symbol, gamma: Symbol) -> Symbol:
    return mx.sym.broadcast_mul(mx.sym.cos(x), mx.sym.reshape(gamma, shape=(1, 4, 1, 1)))


def read_before(x: Symbol) -> Symbol:
    gamma = V("gamma_positive", shape=(4,))
    return mx.sym.BatchNorm(scaled(x, gamma), gamma, V("beta"), name="norm")


def read_after(x: Symbol) -> Symbol:
    gamma = V("gamma_positive", shape=(4,))
    return mx.sym.BatchNorm(mx.sym.sin(x), gamma, V("beta"), name="norm") + scaled(x, gamma)


def of_two_norms(x: Symbol) -> Symbol:
    """Only one of them fixes the gamma."""
    inputs = V("gamma_positive", shape=(4,)), V("beta", shape=(4,))
    first, second = (
        mx.sym.BatchNorm(wave, *inputs, fix_gamma=fix, name=f"norm{fix}")
        for wave, fix in ((mx.sym.sin(x), True), (mx.sym.cos(x), False))
    )
    return first + second


@pytest.mark.parametrize("call", [read_before, read_after, of_two_norms])
def test_what_reads_one_reads_what_it_does_without_a_plan(call: Callable[[Symbol], Symbol]) -> None:
    with mx.name.NameManager():
        symbol, shapes = shelled(call, IMAGE)
    traced = trace(symbol, shapes=shapes)
    expected = training_run(symbol, traced)
    flags = [frozenset({op}) for op in flaggable(traced.graph)]
    flags += [random_flags(traced, random.Random(seed)) for seed in range(3)]
    assert_mirrored_is(expected, traced, iter(flags))
    for realisation in ("packed", "explicit"):
        traced = trace(symbol, shapes=shapes, realisation=realisation)
        schedules = [random_schedule(traced.graph, seed) for seed in range(5)]
        for schedule in (Schedule.unplanned(traced.graph), *schedules):
            assert not differing(expected, scheduled_run(traced, schedule))


@pytest.mark.parametrize("realisation", ["mirror", "packed", "explicit"])
def test_one_that_nobody_else_reads_costs_nothing(realisation: str) -> None:
    """Nor does one that two layers fix, or of which the shape alone is read."""

    def call(x: Symbol) -> Symbol:
        inputs = V("gamma", shape=(4,)), V("beta", shape=(4,))
        first, second = (
            mx.sym.BatchNorm(wave(x), *inputs, name=wave.__name__)
            for wave in (mx.sym.sin, mx.sym.cos)
        )
        return mx.sym.broadcast_add(first, mx.sym.sum(mx.sym.zeros_like(inputs[0]))) + second

    with mx.name.NameManager():
        symbol, shapes = shelled(call, IMAGE)
    graph = trace(symbol, shapes=shapes, realisation=realisation).graph
    norms = [op for op in graph.ops if op.kind == "BatchNorm"]
    assert [op.recomputable for op in norms] == [True, True]
    assert not any(op.after for op in norms)


def test_a_computed_one_that_others_read_is_refused() -> None:
    def call(x: Symbol) -> Symbol:
        gamma = mx.sym.exp(V("gamma", shape=(4,)), name="grown")
        return mx.sym.BatchNorm(scaled(x, gamma), gamma, V("beta"), name="norm")

    symbol, shapes = shelled(call, IMAGE)
    with pytest.raises(TraceError, match=r"'norm' \(BatchNorm\) has fix_gamma=True.* 'grown'"):
        trace(symbol, shapes=shapes)


def test_a_computed_one_that_nobody_else_reads() -> None:
    def call(x: Symbol) -> Symbol:
        gamma = mx.sym.exp(V("gamma", shape=(4,)))
        return mx.sym.BatchNorm(mx.sym.sin(x), gamma, V("beta"), name="norm")

    symbol, shapes = shelled(call, IMAGE)
    expected = training_run(symbol, trace(symbol, shapes=shapes))
    for realisation in ("packed", "explicit"):
        traced = trace(symbol, shapes=shapes, realisation=realisation)
        for seed in range(3):
            schedule = random_schedule(traced.graph, seed)
            assert not differing(expected, scheduled_run(traced, schedule))
