"""The compiled evaluation of flags is the plain one, to the byte."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.graphs import mirrored_graphs
from helpers.networks import residual_net, unrolled_lstm
from memplan.memory.blocks import allocate
from memplan.mxnet.trace.build import trace
from memplan.search.kernels import mirroring
from memplan.search.kernels.mirroring import Evaluator
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import flaggable, mirror
from memplan.step.simulate import simulate


def agree(graph: TrainingGraph, flags: frozenset[int]) -> None:
    schedule = mirror(graph, flags)
    evaluate = Evaluator(graph)
    cost = evaluate(evaluate.flags(flags))
    assert cost.allocated_nbytes == allocate(schedule).nbytes
    assert cost.peak_nbytes == simulate(schedule).peak_nbytes
    assert cost.seconds == pytest.approx(schedule.seconds)


@examples(300)
@given(st.data())
def test_on_random_graphs(data: st.DataObject) -> None:
    graph = data.draw(mirrored_graphs())
    graph = dataclasses.replace(graph, match_range=data.draw(st.sampled_from((0, 1, 2, 16))))
    graph = graph.with_seconds([0.5 + i for i in range(len(graph.ops))])
    candidates = flaggable(graph)
    flags = data.draw(st.sets(st.sampled_from(candidates))) if candidates else set()
    agree(graph, frozenset(flags))


@pytest.mark.parametrize("network", [residual_net, unrolled_lstm])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_on_real_networks(network, share: float, dtype: str) -> None:  # type: ignore[no-untyped-def]
    net, shapes = network()
    graph = trace(net, shapes=shapes, type_dict=dict.fromkeys(shapes, dtype)).graph
    choice = random.Random(7)
    agree(graph, frozenset(op for op in flaggable(graph) if choice.random() < share))


@pytest.mark.parametrize("name", ["run_order", "replay"])
def test_an_interrupt_is_none_of_pythons_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is where it is raised while a compiled function returns."""

    def interrupted(*_: object) -> None:
        raise SystemError("returned a result with an exception set") from KeyboardInterrupt()

    net, shapes = residual_net()
    evaluate = Evaluator(trace(net, shapes=shapes).graph)
    monkeypatch.setattr(mirroring, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(evaluate.flags(()))
