"""Every schedule of a small graph, by a shortest-path search in live bytes."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations, count

from memplan.errors import ArgumentError
from memplan.search.rematerialize import repeatable
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies.base import Outcome, Problem, Status

# Tensors that share memory, and the memory in use.
Buffer = frozenset[int]
Live = frozenset[Buffer]


@dataclass(frozen=True)
class _State:
    """Before step ``k`` of stage ``t`` the buffers ``live`` hold tensors that will be read.

    Tensors without bytes are not listed: they stay once they are there.
    """

    t: int
    k: int
    live: Live


@dataclass(frozen=True)
class BruteForceSequences:
    """Searches all schedules with first executions in base order, on at most ``max_ops`` ops.

    With ``any_order``, ops may run again at any time and any number of times; without, as in
    Checkmate, once per stage and in base order (:mod:`memplan.search.rematerialize`). Backward ops
    run once unless ``recompute_backward``.
    """

    max_ops: int = 12
    any_order: bool = False
    recompute_backward: bool = False

    def solve(self, problem: Problem) -> Outcome:
        """The optimum; without a budget, the cheapest schedule of the lowest possible peak.

        Raises ArgumentError if the graph is too large.
        """
        graph, budget_nbytes = problem.graph, problem.budget_nbytes
        if len(graph.ops) > self.max_ops:
            raise ArgumentError(
                f"brute force takes at most {self.max_ops} ops, not {len(graph.ops)}"
            )
        search = _Search(graph, self.any_order, self.recompute_backward)
        if budget_nbytes is None:
            found = search.shortest(None)
            assert found is not None  # without a limit, the unplanned schedule is one
            budget_nbytes = found[0]
        found = search.shortest(budget_nbytes)
        if found is None:
            return Outcome(Status.INFEASIBLE, in_order=True)
        schedule = Schedule.sequence(graph, found[1])
        return Outcome(Status.OPTIMAL, schedule, schedule.seconds, in_order=True)


class _Search:
    def __init__(self, graph: TrainingGraph, any_order: bool, backward: bool) -> None:
        self.graph = graph
        self.any_order = any_order
        self.again = repeatable(graph, backward=backward)

    def shortest(self, budget_nbytes: int | None) -> tuple[int, tuple[int, ...]] | None:
        """Dijkstra's algorithm: (peak, ops) of the cheapest way to the end, if there is one.

        Without a budget, the way with the lowest peak.
        """
        order = count()
        queue: list[tuple[float, int, int, _State, tuple[int, ...]]] = []
        heapq.heappush(queue, (0.0, next(order), 0, _State(0, 0, frozenset()), ()))
        done: set[_State] = set()
        while queue:
            length, _, peak, state, ops = heapq.heappop(queue)
            if state in done:
                continue
            done.add(state)
            if state.t == len(self.graph.ops) and self._holds_the_heads(state.live):
                # What dies, and so who writes into whose buffer, follows from the ops alone: it
                # need not be what was chosen on this way.
                true_peak = simulate(Schedule.sequence(self.graph, ops)).peak_nbytes
                if true_peak <= (peak if budget_nbytes is None else budget_nbytes):
                    return true_peak, ops
            for nbytes, op, following in self._steps(state):
                if budget_nbytes is not None and nbytes > budget_nbytes:
                    continue
                seconds = 0.0 if op is None else self.graph.ops[op].seconds
                high = max(peak, nbytes)
                longer = float(high) if budget_nbytes is None else length + seconds
                ran = ops if op is None else (*ops, op)
                heapq.heappush(queue, (longer, next(order), high, following, ran))
        return None

    def _holds_the_heads(self, live: Live) -> bool:
        there = frozenset[int]().union(*live)
        return all(a in there or not self.graph.tensors[a].nbytes for a in self.graph.heads)

    def _steps(self, state: _State) -> Iterator[tuple[int, int | None, _State]]:
        """What may come next: (bytes alive, the op that runs or None, the state after it).

        With ``any_order`` ops may run again even after the last one, for the heads.
        """
        t, k, live = state.t, state.k, state.live
        last = t == len(self.graph.ops)
        for op in range(t + (not last)) if self.any_order else () if last else (k,):
            following = (t + 1, 0) if op == t else (t, 0 if self.any_order else k + 1)
            if op < t and not self.any_order:
                yield 0, None, _State(*following, live)
            if op == t or self.again[op]:
                for nbytes, after in self._executions(t, op, live):
                    yield nbytes, op, _State(*following, after)

    def _executions(self, t: int, op: int, live: Live) -> Iterator[tuple[int, Live]]:
        """Execute ``op`` in stage ``t``: (bytes alive, what is alive after), whatever may die."""
        graph, call = self.graph, self.graph.ops[op]
        there = frozenset[int]().union(*live)
        inputs = {a for a in call.inputs if graph.tensors[a].nbytes}
        outputs = {a for a in call.outputs if graph.tensors[a].nbytes}
        if not there >= inputs or there & outputs:
            return
        passed = t + 1 if op == t else t
        dead = {a for a in inputs | outputs if not self._may_be_read(a, passed)}
        free = [a for a in inputs | outputs if a not in dead and not self._must_stay(a, passed)]
        subsets = chain.from_iterable(combinations(free, n) for n in range(len(free) + 1))
        for dying in (frozenset(dead.union(subset)) for subset in subsets):
            buffers = self._place(op, live, dying)
            nbytes = sum(graph.tensors[next(iter(buffer))].nbytes for buffer in buffers)
            left = (buffer - dying for buffer in buffers)
            yield nbytes, frozenset(buffer for buffer in left if buffer)

    def _may_be_read(self, a: int, t: int) -> bool:
        """May a step read ``a`` once the ops before ``t`` have run?"""
        return a in self.graph.heads or any(
            reader >= t or self.again[reader] for reader in self.graph.readers[a]
        )

    def _must_stay(self, a: int, t: int) -> bool:
        """Will a step read ``a`` once the ops before ``t`` have run, and can it not run again?"""
        return not self.again[self.graph.producer[a]] and (
            a in self.graph.heads or any(reader >= t for reader in self.graph.readers[a])
        )

    def _place(self, op: int, live: Live, dying: frozenset[int]) -> list[Buffer]:
        """The buffers while ``op`` runs, if the tensors ``dying`` are not needed after it."""
        graph, call = self.graph, self.graph.ops[op]
        buffers = list(live)
        placed: set[int] = set()
        given: set[int] = set()
        shared: set[Buffer] = set()
        for source, target, alias in call.handovers:
            a, output = call.inputs[source], call.outputs[target]
            if source in given or output in placed or output in dying:
                continue
            if not graph.tensors[output].nbytes or not graph.tensors[a].nbytes:
                continue
            buffer = next(b for b in buffers if a in b)
            reads = sum(tensor in buffer for tensor in call.inputs)
            if alias or (reads == 1 and buffer <= dying and buffer not in shared):
                given.add(source)
                placed.add(output)
                buffers[buffers.index(buffer)] = buffer | {output}
                shared.add(buffer | {output})
        buffers += [
            frozenset({output})
            for output in call.outputs
            if output not in placed and graph.tensors[output].nbytes
        ]
        return buffers
