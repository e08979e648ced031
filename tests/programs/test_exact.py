"""The exact search of small steps, against every schedule, and against whole sequences replayed."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Iterable

import pytest

from helpers.amounts import is_whole
from memplan.programs.exact import CHOICES, ExactSearch
from memplan.programs.exact_gates import gates_of
from memplan.programs.exact_step import ExactStep, mask_of
from memplan.programs.proof import Fact
from memplan.step.graph import Handover, Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.stop import Stop


def small_graph(
    some: random.Random, *, shares: bool, lengths: tuple[int, ...] = (4, 5, 5)
) -> TrainingGraph:
    """Ops of all kinds: several outputs, none of bytes, shared buffers, such as run once."""
    ops: list[Op] = []
    tensors: list[Tensor] = []
    for t in range(some.choice(lengths)):
        written = range(len(tensors))
        others = some.sample(written, min(len(tensors), some.choice((0, 1, 1, 2))))
        latest = written[-1:] if some.random() < 0.6 else ()
        inputs = tuple(dict.fromkeys((*others, *latest)))
        outputs, handovers = [], []
        for place in range(some.choice((1, 1, 1, 2))):
            size = some.choice((0, 1, 2, 3, 3, 3))
            if shares and inputs and some.random() < 0.5:
                source = some.randrange(len(inputs))
                size = tensors[inputs[source]].nbytes
                handovers.append(Handover(source, place, some.random() < 0.4))
            outputs.append(len(tensors))
            tensors.append(Tensor(f"t{len(tensors)}", size, size))
        after = (some.randrange(t),) if t and some.random() < 0.2 else ()
        seconds, again = float(some.randrange(4)), some.random() < 0.85
        rest = {"recomputable": again, "after": after, "handovers": tuple(handovers)}
        ops.append(Op(f"op{t}", "op", inputs, tuple(outputs), seconds, **rest))
    heads = dict.fromkeys((len(tensors) - 1, some.choice((0, 1, len(tensors) - 1))))
    return TrainingGraph(tuple(ops), tuple(tensors), tuple(heads), len(ops) - some.randrange(3))


def cheapest(
    graph: TrainingGraph, budgets: Iterable[int], *, most_runs: int, backward: bool
) -> dict[int, float]:
    """By budget the least seconds of a sequence of so many runs, each replayed as a whole."""
    least, sequence = dict.fromkeys(budgets, math.inf), list[int]()

    def extend() -> None:
        nmissing = len(graph.ops) - len(set(sequence))
        if not nmissing:
            schedule = Schedule.sequence(graph, sequence)
            for budget in least:
                if simulate(schedule).peak_nbytes <= budget:
                    least[budget] = min(least[budget], schedule.seconds)
        for t, op in enumerate(graph.ops):
            is_again = op.recomputable and (backward or t < graph.nforward)
            may_run = is_again if t in sequence else set(sequence) >= set(graph.dependencies[t])
            if may_run and len(sequence) + nmissing + (t in sequence) <= most_runs:
                sequence.append(t)
                extend()
                sequence.pop()

    extend()
    return least


def last_fact(
    graph: TrainingGraph, budget_nbytes: int, *, backward: bool = False, states: int = 10_000
) -> Fact:
    search = ExactSearch(graph, budget_nbytes, recompute_backward=backward)
    *_, fact = search.run(Stop(math.inf), states=states)
    return fact


def budgets_of(graph: TrainingGraph) -> range:
    peak = simulate(Schedule.unplanned(graph)).peak_nbytes
    return range(max(0, peak - 4), peak + 1)


@pytest.mark.parametrize("shares", [True, False])
def test_no_schedule_takes_less_than_what_is_said(*, shares: bool) -> None:
    """Wherever the search is ended; and at its end one takes as much, if no buffer is shared."""
    taken: Counter[str] = Counter()
    for seed in range(300 if is_whole() else 100):
        some = random.Random(seed)
        graph, backward = small_graph(some, shares=shares), some.random() < 0.5
        peak, most_runs = simulate(Schedule.unplanned(graph)).peak_nbytes, len(graph.ops) + 2
        budgets = range(max(0, peak - 4), peak + 1)
        everything = cheapest(graph, budgets, most_runs=most_runs, backward=backward)
        for budget, least in everything.items():
            begun = last_fact(graph, budget, backward=backward, states=some.choice((4, 8, 16)))
            fact = last_fact(graph, budget, backward=backward)
            assert begun.bound_seconds <= fact.bound_seconds <= least + 1e-9
            if fact.schedule is not None:
                assert fact.schedule.seconds == pytest.approx(fact.bound_seconds)
                assert simulate(fact.schedule).peak_nbytes <= budget
            is_longer = fact.schedule is not None and len(fact.schedule.ops) > most_runs
            is_equal = fact.bound_seconds >= least - 1e-9
            assert shares or is_longer or is_equal
            taken["dearer"] += is_equal and graph.seconds < least < math.inf
            taken["impossible"] += is_equal and least == math.inf
            taken["begun"] += begun.bound_seconds < fact.bound_seconds - 1e-9
    assert min(taken["dearer"], taken["begun"]) > 10, taken
    assert taken["impossible"] > 50


def test_searches_from_gates_say_what_one_of_the_whole_step_does() -> None:
    """No more wherever they are ended, and as much at their end."""
    taken: Counter[str] = Counter()
    for seed in range(60):
        some = random.Random(seed)
        graph = small_graph(some, shares=some.random() < 0.5, lengths=(6, 8, 10))
        backward = some.random() < 0.5
        for budget in budgets_of(graph):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("memplan.programs.exact.gates_of", lambda graph: [])
                whole = last_fact(graph, budget, backward=backward)
            begun = last_fact(graph, budget, backward=backward, states=some.choice((20, 60, 200)))
            bound = last_fact(graph, budget, backward=backward).bound_seconds
            assert begun.bound_seconds <= bound + 1e-9
            assert bound == pytest.approx(whole.bound_seconds)
            taken["dearer"] += graph.seconds < bound - 1e-9 < math.inf
            taken["impossible"] += bound == math.inf
    assert min(taken["dearer"], taken["impossible"]) > 20, taken


def test_gates_let_a_search_of_a_long_chain_end() -> None:
    graph = chain(*(3, 1, 4, 1, 5, 2) * 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memplan.programs.exact.gates_of", lambda graph: [])
        without = last_fact(graph, 18, states=12_000)
    fact = last_fact(graph, 18, states=12_000)
    assert without.schedule is None
    assert fact.schedule is not None
    assert without.bound_seconds < fact.bound_seconds == pytest.approx(fact.schedule.seconds)


def test_ops_beside_which_many_others_may_have_run_are_no_gates() -> None:
    """Of parallel ops each set can have run before another one; of those before them none has."""
    ops = [Op("source", "op", (), (0,), 1.0)]
    ops += [Op(f"branch{t}", "op", (0,), (t,), 1.0) for t in range(1, 7)]
    ops.append(Op("sum", "op", tuple(range(1, 7)), (7,), 1.0))
    graph = TrainingGraph(tuple(ops), tuple(Tensor(f"t{a}", 1, 1) for a in range(8)), (7,), 8)
    assert [(gate.op, gate.sets) for gate in gates_of(graph)] == [(0, (0,)), (7, (127,))]
    few = dataclasses.replace(
        graph,
        ops=(*graph.ops[:3], Op("sum", "op", (1, 2), (3,), 1.0)),
        tensors=graph.tensors[:4],
        heads=(3,),
        nforward=4,
    )
    assert [(gate.op, gate.sets) for gate in gates_of(few)] == [(0, (0,)), (2, (1, 3)), (3, (7,))]


def chain(*sizes: int) -> TrainingGraph:
    """A chain, and backward ops that read its tensors from the last to the first."""
    nforward = len(sizes)
    ops = [Op(f"f{t}", "op", (t - 1,) if t else (), (t,), 1.0) for t in range(nforward)]
    for number, t in enumerate(reversed(range(nforward))):
        above = (nforward + number - 1,) if number else ()
        below = (t - 1,) if t else ()
        ops.append(Op(f"b{t}", "op", (*above, t, *below), (nforward + number,), 1.0))
    tensors = tuple(Tensor(f"t{a}", n, n) for a, n in enumerate((*sizes, *[1] * nforward)))
    return TrainingGraph(tuple(ops), tensors, (len(tensors) - 1,), nforward)


def test_what_has_no_room_between_first_runs_counts() -> None:
    """Runs between two first executions begin with the first op, again and again."""
    graph = chain(3, 4, 4, 4, 3)
    assert last_fact(graph, 19).bound_seconds == pytest.approx(graph.seconds)
    assert last_fact(graph, 12).bound_seconds == pytest.approx(13.0)
    assert last_fact(graph, 10).bound_seconds == pytest.approx(18.0)
    assert math.isinf(last_fact(graph, 9).bound_seconds)


def test_a_search_that_is_ended_tells_the_least_of_what_is_open() -> None:
    graph = chain(3, 1, 4, 1, 5, 2)
    bounds = [last_fact(graph, 12, states=states).bound_seconds for states in (1, 10, 100, 10_000)]
    assert bounds == sorted(bounds)
    assert bounds[0] == pytest.approx(graph.seconds)
    assert bounds[0] < bounds[-1] == pytest.approx(14.0)


def test_equal_searches_look_at_equal_states() -> None:
    graph = chain(3, 1, 4, 1, 5, 2)
    first, second = ExactSearch(graph, 12), ExactSearch(graph, 12)
    assert list(first.run(Stop(math.inf))) == list(second.run(Stop(math.inf)))
    assert first.nstates == second.nstates < 200


def test_the_clock_ends_a_search() -> None:
    search = ExactSearch(chain(*range(1, 12)), 50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memplan.programs.exact.LOOK", 1)
        stop = Stop(-math.inf)
        *_, fact = search.run(stop)
    assert stop.cut_by_clock
    assert fact.bound_seconds == pytest.approx(22.0)


@pytest.mark.parametrize("nalike", [8, 26])
def test_of_many_alike_no_more_is_looked_at_than_is_asked(nalike: int) -> None:
    """Half of them make room for one op, in nearly 2**n choices."""
    alike = tuple(range(nalike))
    ops = [Op(f"s{k}", "op", (), (k,), 1.0) for k in alike]
    ops.append(Op("large", "op", (0,), (nalike,), 1.0, after=alike))
    ops.append(Op("small", "op", (nalike,), (nalike + 1,), 1.0))
    ops.append(Op("sum", "op", (*alike, nalike + 1), (nalike + 2,), 1.0))
    sizes = [*[10] * nalike, 5 * nalike + 20, 1, 1]
    tensors = tuple(Tensor(f"t{a}", size, size) for a, size in enumerate(sizes))
    graph = TrainingGraph(tuple(ops), tensors, (nalike + 2,), len(ops))
    search = ExactSearch(graph, 10 * nalike + 30)
    *_, fact = search.run(Stop(math.inf), states=200)
    assert search.nstates <= 200 < 2**nalike
    assert search.nchoices <= 200 * CHOICES
    assert graph.seconds - 1e-6 <= fact.bound_seconds <= graph.seconds + nalike // 2


def test_of_an_op_that_may_write_over_many_buffers_no_choice_is_made() -> None:
    """Nothing more is proved by that, and nothing that is not so."""
    sources = [Op(f"s{t}", "op", (), (t,), 1.0) for t in range(3)]
    handovers = tuple(Handover(t, 0, False) for t in range(3))
    total = Op("sum", "op", (0, 1, 2), (3,), 1.0, handovers=handovers)
    last = Op("last", "op", (0, 1, 2, 3), (4,), 1.0)
    tensors = tuple(Tensor(f"t{a}", 2, 2) for a in range(5))
    graph = TrainingGraph((*sources, total, last), tensors, (4,), 5)
    graph = dataclasses.replace(graph, tensors=(*tensors[:4], Tensor("t4", 1, 1)))
    assert math.isinf(last_fact(graph, 8).bound_seconds)
    assert last_fact(graph, 9).bound_seconds == pytest.approx(graph.seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memplan.programs.exact.MOST_GIVERS", 2)
        assert math.isinf(last_fact(graph, 8).bound_seconds)
        assert last_fact(graph, 9).bound_seconds == pytest.approx(graph.seconds)


def test_what_an_op_writes_into_a_buffer_that_it_takes_stays() -> None:
    """Of its two outputs one may be written over what it reads, and one is there in any case."""
    ops = [Op("s", "op", (), (0, 1), 3.0), Op("m", "op", (1,), (2,), 3.0)]
    ops.append(Op("x", "op", (2,), (3,), 1.0))
    handovers = (Handover(0, 0, False), Handover(0, 1, True))
    ops.append(Op("two", "op", (1,), (4, 5), 0.0, handovers=handovers))
    ops.append(Op("last", "op", (3, 5), (6, 7), 0.0))
    tensors = tuple(Tensor(f"t{a}", n, n) for a, n in enumerate((1, 3, 2, 0, 3, 3, 1, 1)))
    graph = TrainingGraph(tuple(ops), tensors, (7, 1), len(ops))
    assert last_fact(graph, 5).bound_seconds == pytest.approx(10.0)


def test_what_is_not_held_is_computed_again_with_all_that_it_reads() -> None:
    graph = chain(1, 1, 1)
    step, unit = ExactStep(graph, recompute_backward=False), graph.seconds / 2**40
    done = mask_of((0, 1, 2))
    left = [step.units_left(done, mask_of(held)) for held in ((0, 1, 2), (1, 2), (0, 1), (2,), ())]
    assert [round(units * unit) for units in left if units is not None] == [3, 4, 4, 5, 6]
    assert step.units_left(mask_of((0, 1, 2, 3)), mask_of((0, 1))) is None


def test_what_runs_again_reads_what_is_held_or_has_that_run_again() -> None:
    ops = [Op("s", "op", (), (0,), 1.0), Op("m", "op", (0,), (1,), 1.0)]
    ops += [Op("x", "op", (), (2,), 1.0), Op("last", "op", (1, 2), (3,), 1.0)]
    tensors = tuple(Tensor(f"t{a}", 1, 1) for a in range(4))
    graph = TrainingGraph(tuple(ops), tensors, (3,), 4)
    step, done = ExactStep(graph, recompute_backward=False), mask_of((0, 1, 2))
    left = [step.units_left(done, mask_of(held)) for held in ((1, 2), (0, 2), (2,))]
    assert [units and round(units * step.unit_seconds) for units in left] == [1, 2, 3]


@pytest.mark.parametrize("again", [True, False])
def test_what_runs_once_is_not_there_again_once_it_was_dropped(*, again: bool) -> None:
    """Its output is small, what is computed from it large; there is room for the one or other."""
    reads = ((), (0,), (1,), (2,), (3,), (4,), (1, 5))
    ops = [Op(f"op{t}", "op", inputs, (t,), 1.0) for t, inputs in enumerate(reads)]
    ops[0] = dataclasses.replace(ops[0], recomputable=again)
    tensors = tuple(Tensor(f"t{a}", n, n) for a, n in enumerate((1, 3, 7, 0, 9, 0, 1)))
    graph = TrainingGraph(tuple(ops), tensors, (6,), len(ops))
    assert math.isinf(last_fact(graph, 10).bound_seconds) != again
