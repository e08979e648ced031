"""Sums of gradients that are begun later: an order that holds less, and what it lets be stored."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from helpers.amounts import examples
from helpers.branches import taking
from helpers.graphs import UNIT, tensors, training_graphs
from memplan.search import postponing
from memplan.search import slices as module
from memplan.search.postponing import _most, _Postponing, postponed
from memplan.search.reordered import reordered
from memplan.search.slices import sliced_schedules
from memplan.step.graph import Handover, Op, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.util.remember import forget
from memplan.util.stop import Stop


def recurrent(nsteps: int, *, large: int = 12, small: int = 6) -> TrainingGraph:
    """Steps that share two weights, and whose outputs' gradients are there at once.

    A step runs backwards in one op that writes what both gradients of weights are made of.
    """
    ops, sizes = list[Op](), dict[str, int]()

    def add(name: str, size: int, *inputs: int, twin: int | None = None, outputs: int = 1) -> int:
        handovers = (Handover(0, 0, alias=False),) if "sum" in name else ()
        first, kind = len(sizes), name.rstrip("0123456789")
        sizes.update({f"{name}_{n}": size for n in range(outputs)})
        written = tuple(range(first, len(sizes)))
        ops.append(Op(name, kind, inputs, written, 1.0, twin is None, twin, handovers=handovers))
        return first

    states, copies = list[int](), list[int]()
    for n in range(nsteps):
        states.append(add(f"state{n}", 1, *states[-1:]))
        copies.append(add(f"copy{n}", 1, states[-1]))
    loss = add("loss", 1, *copies)
    nforward = len(ops)
    gradients = add("spread", 1, loss, twin=nforward - 1, outputs=nsteps)
    above, sums = loss, dict[str, int]()
    for n in reversed(range(nsteps)):
        inner = add(f"inner{n}", 2, above, gradients + n, states[n], twin=2 * n)
        above = add(f"gradient{n}", 1, inner, twin=2 * n)
        for name, size in (("large", large), ("small", small)):
            summand = add(f"{name}{n}", size, inner, states[n], twin=2 * n)
            if name in sums:
                summand = add(f"{name}_sum{n}", size, sums[name], summand, twin=2 * n)
            sums[name] = summand
    return TrainingGraph(tuple(ops), tensors(**sizes), (above, *sums.values()), nforward)


def test_the_smaller_sum_is_begun_when_outputs_gradients_have_gone() -> None:
    graph = recurrent(12)
    order = [graph.ops[op].name for op in postponed(graph).order]
    usual = [graph.ops[op].name for op in reordered(graph).order]
    assert usual.index("small11") < usual.index("inner9")
    assert order.index("small11") > order.index("large10")
    assert order.index("small_sum0") > order.index("small11")
    assert postponed(graph, reorder=False).graph is graph


@taking(moves=1)
@examples(100)
@given(training_graphs())
def test_an_order_is_legal_and_holds_no_more(taken: Counter[str], graph: TrainingGraph) -> None:
    order = list(postponed(graph).order)
    taken["moves"] += order != list(reordered(graph).order)
    assert order[: graph.nforward] == list(range(graph.nforward))
    schedule = Schedule.sequence(graph, order)
    verdict = validate(schedule, simulate(schedule).peak_nbytes)
    assert verdict.valid, verdict.reason
    postponing = _Postponing(graph, reordered(graph).order)
    lives = [postponing._live(each) for each in (order, reordered(graph).order)]
    assert _most(lives[0]) <= _most(lives[1])


def test_more_is_stored_where_less_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the usual order both sums are there when most of the gradients of outputs are."""
    graph = recurrent(40, large=16, small=8)
    budget = 84 * UNIT

    def cheapest() -> Schedule:
        forget(graph)
        made = sliced_schedules(graph, budget, Stop.after(1e5), reorder=True)
        fitting = [s for s in made if validate(s, budget).valid]
        return min(fitting, key=lambda schedule: schedule.seconds)

    later = cheapest()
    monkeypatch.setattr(module, "postponed", reordered)
    assert later.overhead < cheapest().overhead - 0.05


def test_it_ends_with_the_steps_that_it_may_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 10,000 ops it went on for seconds to make orders that it did not look at."""
    graph, made = recurrent(40), list[int]()
    behind = _Postponing._behind

    def counted(self: _Postponing, place: int, peak: int, ops: set[int]) -> list[int] | None:
        made.append(self._nsteps_left)
        return behind(self, place, peak, ops)

    monkeypatch.setattr(_Postponing, "_behind", counted)
    monkeypatch.setattr(postponing, "MOST_STEPS", 3 * len(graph.ops))
    _Postponing(graph, reordered(graph).order)
    assert made
    assert sum(left <= 0 for left in made) <= 1


def test_nothing_is_begun_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "postponed", lambda graph, *, reorder: pytest.fail("begun"))
    assert not sliced_schedules(recurrent(4), 8 * UNIT, Stop.after(-1.0), reorder=True)
