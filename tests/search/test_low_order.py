"""An order of the backward pass in which little is alive, and sequences made from it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given

from helpers.amounts import examples
from helpers.graphs import UNIT, tensors, training_graphs
from memplan.search import low_order as module
from memplan.search.elites import Elites
from memplan.search.kernels.annealing import BEST_SECONDS
from memplan.search.low_order import low_order
from memplan.search.round_kinds import SHORT
from memplan.search.rounds import Rounds
from memplan.search.sequences import Rules
from memplan.step.graph import Op, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.validate import validate
from memplan.util.stop import Stop

LIVE = Rules(recompute_backward=False, reorder=True, match_ranges=())


def branches(*sizes: int, number: int = 2) -> TrainingGraph:
    """So many branches of ops that write so many elements, joined by a loss.

    In the base order each branch runs backwards before the next one does.
    """
    ops, written, above = list[Op](), dict[str, int](), dict[tuple[int, int], int]()

    def add(name: str, size: int, inputs: tuple[int, ...], twin: int | None = None) -> int:
        index = len(ops)
        written[name] = size
        is_forward = twin is None
        kind = "f" if is_forward else "b"
        ops.append(Op(name, kind, inputs, (index,), 1.0, is_forward, differentiates=twin))
        return index

    last = []
    for b in range(number):
        for k, size in enumerate(sizes):
            inputs = (above[b, k - 1],) if k else ()
            above[b, k] = add(f"f{b}_{k}", size, inputs)
        last.append(above[b, len(sizes) - 1])
    loss = add("loss", 1, tuple(last))
    for b in range(number):
        gradient = loss
        for k in reversed(range(len(sizes))):
            inputs = tuple(dict.fromkeys((gradient, above[b, k])))
            gradient = add(f"b{b}_{k}", sizes[k], inputs, above[b, k])
    return TrainingGraph(tuple(ops), tensors(**written), heads=(), nforward=loss + 1)


def backward_names(graph: TrainingGraph) -> list[str]:
    return [graph.ops[op].name for op in low_order(graph)[graph.nforward :]]


def test_small_parts_of_all_branches_run_before_the_large_ones_of_any() -> None:
    names = backward_names(branches(8, 8, 8, 1, 1, 1))
    assert {name[-1] for name in names[:6]} == {"5", "4", "3"}
    assert {name[-1] for name in names[6:]} == {"2", "1", "0"}


def ready_at_once(*ops: Op, **nelements: int) -> TrainingGraph:
    """Backward ops behind a forward op for each of the first tensors, from which they may run."""
    names = list(nelements)
    nforward = len(names) - sum(len(op.outputs) for op in ops)
    forward = tuple(Op(names[n], "f", (), (n,), 1.0) for n in range(nforward))
    heads = tuple(n for n, name in enumerate(names) if name.startswith("head"))
    return TrainingGraph((*forward, *ops), tensors(**nelements), heads=heads, nforward=nforward)


def test_a_head_is_not_freed() -> None:
    """So what writes it waits, over however low a hill, for what frees memory."""
    graph = ready_at_once(
        Op("freeing", "b", (0,), (2,), 1.0, False, differentiates=0),
        Op("head", "b", (1,), (3,), 1.0, False, differentiates=1),
        **{"f": 4, "g": 4, "freed": 4, "head": 3},
    )
    assert backward_names(graph) == ["freeing", "head"]


def test_of_what_leaves_more_alive_what_frees_most_after_its_hill_is_first() -> None:
    """The lower hill comes later: then it is climbed from less."""
    graph = ready_at_once(
        Op("hill", "b", (), (0,), 1.0, False),
        Op("down", "b", (0,), (1,), 1.0, False),
        Op("more", "b", (1,), (2,), 1.0, False),
        Op("low", "b", (), (3,), 1.0, False),
        **{"large": 6, "head1": 2, "head2": 5, "head3": 3},
    )
    assert backward_names(graph) == ["hill", "down", "low", "more"]


def test_of_what_is_ready_the_last_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = branches(8, 8, 1, 1, number=3)
    monkeypatch.setattr(module, "MOST_READY", 1)
    assert [name[1] for name in backward_names(graph)] == ["2"] * 4 + ["1"] * 4 + ["0"] * 4


@examples(50)
@given(training_graphs())
def test_the_order_is_one_of_the_graph(graph: TrainingGraph) -> None:
    order = low_order(graph)
    assert list(order[: graph.nforward]) == list(range(graph.nforward))
    assert sorted(order) == list(range(len(graph.ops)))
    assert validate(Schedule.sequence(graph, order)).valid


@pytest.mark.parametrize(
    ("rules", "is_low"),
    [
        (LIVE, True),
        (LIVE._replace(reorder=False), False),
        (LIVE._replace(match_ranges=(1,)), False),
    ],
)
def test_rounds_know_it_where_ops_may_move_and_live_bytes_count(rules: Rules, is_low: bool) -> None:
    graph = branches(8, 8, 1, 1)
    rounds = Rounds(graph, rules, seed=0, stop=Stop.after(1e5))
    order = low_order(graph) if is_low else range(len(graph.ops))
    assert rounds.schedule(rounds.low).ops == tuple(order)


def making(graph: TrainingGraph, monkeypatch: pytest.MonkeyPatch, costs: dict[str, float]) -> str:
    """From which order sequences are made in turn: l for low, u for the usual one."""
    search = Rounds(graph, LIVE, seed=0, stop=Stop.after(1e6))
    kept, begins = Elites(search), list[str]()

    def noted(kind: object, budget: int, *, best: object, start: object, **_: object) -> object:
        if start is search.low or start is search.unplanned:
            begins.append("l" if start is search.low else "u")
        best.figures[BEST_SECONDS] = costs[begins[-1]]  # type: ignore[attr-defined]
        return np.zeros(0, dtype=np.int64)

    monkeypatch.setattr(search, "round", noted)
    for _ in range(8):
        kept._make(SHORT, UNIT)
    return "".join(begins)


def test_sequences_are_made_more_often_from_the_order_that_gave_cheaper_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = branches(8, 8, 1, 1)
    assert making(graph, monkeypatch, {"l": 1.0, "u": 2.0}) == "lu" + "ullull"
    assert making(graph, monkeypatch, {"l": 2.0, "u": 1.0}) == "lu" + "luuluu"
    assert making(graph, monkeypatch, {"l": math.inf, "u": 1.0}) == "lu" + "luuluu"
    assert making(graph, monkeypatch, {"l": math.inf, "u": math.inf}) == "lu" + "luuluu"
