"""A schedule of one training step carried over to a step of other shapes, or of other length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from memplan.search.eviction import Drop, Evictions
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.strategies import Problem
from memplan.util.stop import Stop

# Of a graph's forward ops at least this part has its like in a graph by whose schedule it is
# planned: a network unrolled over twice as many time steps.
ALIKE = 0.5


def transferred(schedule: Schedule, graph: TrainingGraph) -> Schedule | None:
    """The ops of ``graph`` in the order in which ``schedule`` runs their like; None without many.

    Ops are alike that compute the same from the same inputs, whatever their sizes and names; where
    both graphs have the same ops, that is the same sequence. Where there are few, as some op stands
    between others now, those are alike that compute the same from what the same kinds of ops
    compute. An op without its like runs when something first depends on it, or at the end. So what
    comes out is a schedule whatever is taken for alike.
    """
    for nearby in (False, True):
        numbers: dict[object, int] = {}
        place = {like: op for op, like in enumerate(_likenesses(graph, numbers, nearby=nearby))}
        others = _likenesses(schedule.graph, numbers, nearby=nearby)
        matching = [place.get(like) for like in others]
        nmatched = sum(op is not None and op < graph.nforward for op in matching)
        if nmatched >= ALIKE * graph.nforward:
            sequence = (matching[op] for op in schedule.ops)
            ops = [op for op in sequence if op is not None]
            return Schedule.sequence(graph, _completed(graph, ops))
    return None


def _likenesses(
    graph: TrainingGraph, numbers: dict[object, int], *, nearby: bool
) -> list[tuple[int, int]]:
    """What each op is: the number of its description, and the how many-th it is of that.

    A forward op is described by its kind and inputs, or ``nearby`` by its kind and those of the ops
    that write them; a backward op by its forward op. Of a sum of gradients the last term says which
    one it is: longer networks begin it with more terms.
    """
    counts: Counter[int] = Counter()
    result: list[tuple[int, int]] = []

    def written(a: int) -> object:
        number, count = result[graph.producer[a]]
        return (number, count) if nearby else (number, graph.position[a])

    for index, op in enumerate(graph.ops):
        inputs: tuple[object, ...]
        if op.differentiates is not None:
            twin = result[op.differentiates]
            inputs = (twin if nearby else twin[0],)
        elif index >= graph.nforward:
            inputs = tuple(map(written, op.inputs[-1:]))
        elif nearby:
            inputs = tuple(graph.ops[graph.producer[a]].kind for a in op.inputs)
        else:
            inputs = tuple(map(written, op.inputs))
        number = numbers.setdefault((op.kind, inputs), len(numbers))
        counts[number] += 1
        result.append((number, counts[number]))
    return result


def _completed(graph: TrainingGraph, ops: Iterable[int]) -> list[int]:
    """``ops``, each after what it depends on, then those that are missing."""
    executed_ops: set[int] = set()
    earlier_ops: set[int] = set()
    result: list[int] = []
    for op in ops:
        if op in earlier_ops and graph.ops[op].recomputable:
            result.append(op)
        else:
            result += _missing(graph, op, executed_ops)
        earlier_ops.add(op)
    for op in range(len(graph.ops)):
        result += _missing(graph, op, executed_ops)
    return result


def _missing(graph: TrainingGraph, op: int, executed_ops: set[int]) -> list[int]:
    """``op`` and all that it depends on, of what has not run; that has then."""
    missing_ops: set[int] = set()
    stack = [op]
    while stack:
        other = stack.pop()
        if other not in executed_ops:
            executed_ops.add(other)
            missing_ops.add(other)
            stack += graph.dependencies[other]
    return sorted(missing_ops)


def mended(
    problem: Problem, schedule: Schedule | None, stop: Stop, *, patience: int
) -> Schedule | None:
    """``schedule`` with more drops, until it fits the budget of ``problem``; None if that fails.

    Then drops are taken back and chosen again, until ``patience`` attempts in a row found nothing
    cheaper, or the work of ``stop`` is done. Without a schedule all drops are chosen.
    """
    assert problem.budget_nbytes is not None
    drops: set[Drop] = set()
    evictions = Evictions(problem.graph, problem.budget_nbytes)
    if schedule is not None:
        drops = evictions.drops_in(schedule)

    # To fit takes little work, without which there is nothing to go on with: only time ends that.
    fit_stop = Stop(stop.deadline)
    share = 1.0 if problem.counts_live else 0.5

    def solve(aim: int, until: Stop) -> Schedule | None:
        search = evictions.within(aim)
        fit = search.fit(drops, until)
        if fit is None:
            return None
        return search.improve(fit, stop.share(share), patience=patience).schedule

    best = problem.aim_lower(solve, fit_stop, share=share)
    if fit_stop.cut_by_clock:
        stop.cut()
    return problem.cheapest([best, schedule])
