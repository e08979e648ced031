"""Where the forward pass may be cut, and what is kept."""

from __future__ import annotations

import dataclasses
import random

import pytest

from helpers.graphs import unit_chain
from memplan.search.segments import (
    articulation_points,
    cut_and_next,
    flags_keeping,
    threshold_cuts,
)
from memplan.step.graph import Op, Tensor, TrainingGraph


def diamond() -> TrainingGraph:
    """a → b, c → d → e: b and c are parallel."""
    reads = [(), (0,), (0,), (1, 2), (3,)]
    ops = tuple(Op(name, "op", reads[i], (i,)) for i, name in enumerate("abcde"))
    tensors = tuple(Tensor(name, 4, 1) for name in "abcde")
    return TrainingGraph(ops, tensors, heads=(4,), nforward=5)


def uneven_chain(seed: int) -> TrainingGraph:
    """Tensors of up to 100 bytes, of which some are cut lines of two."""
    rng = random.Random(seed)
    graph = unit_chain(30)
    tensors = [dataclasses.replace(t, nbytes=rng.randint(1, 100)) for t in graph.tensors]
    stages = [rng.choice([None, "True", "1", "2"]) for _ in graph.ops]
    ops = [dataclasses.replace(o, mirror_stage=s) for o, s in zip(graph.ops, stages, strict=True)]
    return dataclasses.replace(graph, tensors=tuple(tensors), ops=tuple(ops))


def test_articulation_points_are_what_every_path_goes_through() -> None:
    assert articulation_points(diamond()) == (3,)
    chain = unit_chain(6)
    assert articulation_points(chain) == tuple(range(1, chain.nforward - 1))


def test_everything_else_that_may_run_twice_is_flagged() -> None:
    graph = diamond()
    ops = list(graph.ops)
    ops[1] = dataclasses.replace(ops[1], recomputable=False)
    graph = dataclasses.replace(graph, ops=tuple(ops))
    assert flags_keeping(graph, [3]) == {0, 2, 4}


@pytest.mark.parametrize(("threshold", "kept"), [(0, 6), (4, 3), (8, 2), (1000, 0)])
def test_a_segment_ends_once_it_holds_more_than_the_threshold(threshold: int, kept: int) -> None:
    graph = unit_chain(5)
    nbytes = graph.tensors[0].nbytes
    points = range(graph.nforward)
    assert graph.nforward == 6
    cut, _ = cut_and_next(graph, points, threshold * nbytes // 4)
    assert len(cut) == kept


def test_points_of_one_line_are_kept_together() -> None:
    graph = diamond()
    stages = {1: "1", 2: "1", 3: "2"}
    ops = tuple(
        dataclasses.replace(op, mirror_stage=stages.get(i)) for i, op in enumerate(graph.ops)
    )
    graph = dataclasses.replace(graph, ops=ops)
    assert cut_and_next(graph, tuple(stages), 4) == ((1, 2, 3), 8)
    assert cut_and_next(graph, tuple(stages), 8) == ((3,), 16)
    assert cut_and_next(graph, tuple(stages), 100) == ((), None)


def test_cuts_are_different_and_no_more_than_asked_for() -> None:
    graph = unit_chain(40)
    points = range(graph.nforward)
    cuts = list(threshold_cuts(graph, points, at_most=20))
    assert 3 < len(cuts) == len(set(cuts)) <= 20
    assert len(cuts[0]) == graph.nforward
    assert list(threshold_cuts(graph, points, at_most=1)) == [tuple(points)]


@pytest.mark.parametrize("at_most", [1, 2, 3, 16, 48, 96, 1000])
@pytest.mark.parametrize("least_nbytes", [1, 4, 300])
def test_no_cut_is_skipped(at_most: int, least_nbytes: int) -> None:
    """The sweep by every threshold, one after the other, is the other opinion."""
    for seed in range(10):
        graph = uneven_chain(seed)
        points = range(graph.nforward)
        total = sum(tensor.nbytes for tensor in graph.tensors[: graph.nforward])
        least = min(least_nbytes, total)
        shares = [step / max(1, at_most - 1) for step in range(at_most)]
        thresholds = [0, *(int(least ** (1.0 - s) * total**s) for s in shares[1:])]
        cuts = dict.fromkeys(cut_and_next(graph, points, nbytes)[0] for nbytes in thresholds)
        found = threshold_cuts(graph, points, at_most=at_most, least_nbytes=least_nbytes)
        assert list(found) == list(cuts)


@pytest.mark.parametrize("at_most", [10**15, 10**30])
def test_thresholds_without_a_new_cut_take_no_time(at_most: int) -> None:
    graph = unit_chain(40)
    cuts = list(threshold_cuts(graph, range(graph.nforward), at_most=at_most))
    assert len(cuts) == len(set(cuts)) <= graph.nforward + 1
    assert cuts[-1] == ()
