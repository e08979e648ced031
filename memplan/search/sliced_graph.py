"""A forward pass in slices between cuts: what is read where, how many bytes that takes, what runs.

What is read across a cut of the order is a set of tensors. A backward op belongs to the slice of
the forward op that it differentiates, if it reads what the forward pass wrote, and another to that
of the op before it. The backward pass comes to the slices from the last to the first: a few ops
that do not are counted to others. What many slices read may be made again for each group of them:
the inputs of an unrolled network are parts of one array.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from memplan.search.chain import Chain, Stored
from memplan.search.kernels.arrays import Array
from memplan.search.rematerialize import carried_always, closure
from memplan.step.graph import TrainingGraph

# What this many slices read is made again for each group of them, if for all groups that takes no
# more than this part of the step. Set on an unrolled LSTM.
MANY_SLICES, MOST_SECONDS = 4, 0.05


class SlicedGraph:
    """The slices between ``cuts``, which are ops before which one lies, ascending.

    With ``ngroups`` of slices, what many slices read and few seconds make is made again for each
    group, and not stored until then.
    """

    def __init__(self, graph: TrainingGraph, cuts: Sequence[int], *, ngroups: int = 0) -> None:
        self.graph, self.cuts, self.nslices, self.ngroups = graph, cuts, len(cuts) + 1, ngroups
        self._always = carried_always(graph)
        self._slice_of = list(self._slices_of_ops())
        self._tensors_of, self._saved_of, self._read_in, self._crossings = (
            [set[int]() for _ in range(self.nslices)] for _ in range(4)
        )
        # The slices after its own in which each forward tensor is read.
        self._readers: dict[int, list[int]] = {}
        self._next_slices: dict[int, tuple[list[int], list[int]]] = {}
        self.remade = frozenset(self._remade())
        # Those of them that each group of slices reads.
        self._together = [set[int]() for _ in range(max(1, ngroups))]
        for a, p in enumerate(graph.producer):
            if p < graph.nforward and a not in self._always:
                self._enter(a, self._slice_of[p])

    def _group_of(self, q: int) -> set[int]:
        return self._together[q * self.ngroups // self.nslices]

    def _remade(self) -> Iterator[int]:
        """The tensors that many slices read, and that take few seconds to make for every group."""
        graph = self.graph
        most_seconds = MOST_SECONDS * graph.seconds / max(1, self.ngroups)
        for op in graph.ops[: graph.nforward] if self.ngroups else ():
            outputs = [a for a in op.outputs if a not in self._always]
            slices = {self._slice_of[r] for a in outputs for r in graph.readers[a]}
            if len(slices) >= MANY_SLICES and self._is_made_within(op.outputs[0], most_seconds):
                yield from outputs

    def _is_made_within(self, a: int, most_seconds: float) -> bool:
        """Is ``a`` made in this many seconds, with all that leads to it and is not always there?"""
        members, seconds, stack = set[int](), 0.0, [self.graph.producer[a]]
        while stack and seconds <= most_seconds:
            op = stack.pop()
            if op not in members:
                members.add(op)
                seconds += self.graph.ops[op].seconds
                inputs = (a for a in self.graph.ops[op].inputs if a not in self._always)
                stack += [self.graph.producer[a] for a in inputs]
        return seconds <= most_seconds

    def _slices_of_ops(self) -> Iterator[int]:
        graph = self.graph
        slices = [bisect_right(self.cuts, op) for op in range(graph.nforward)]
        yield from slices
        twins: dict[int, int] = {}
        for k, op in enumerate(graph.ops[graph.nforward :]):
            twin = op.differentiates
            reads = any(graph.producer[a] < graph.nforward for a in op.inputs)
            if reads and twin is not None and twin < graph.nforward:
                twins[k] = slices[twin]
        descent = dict(zip(twins, descending(list(twins.values())), strict=True))
        current = self.nslices - 1
        for k in range(len(graph.ops) - graph.nforward):
            current = descent.get(k, current)
            yield current

    def _enter(self, a: int, home: int) -> None:
        readers = self.graph.readers[a]
        self._tensors_of[home].add(a)
        if any(r >= self.graph.nforward and self._slice_of[r] == home for r in readers):
            self._saved_of[home].add(a)
        slices = sorted({self._slice_of[r] for r in readers} - set(range(home + 1)))
        for q in slices:
            self._read_in[q].add(a)
        if a in self.remade:
            slices = []
            for r in readers:
                self._group_of(self._slice_of[r]).add(a)
        self._readers[a] = slices
        for q in range(home + 1, slices[-1] + 1 if slices else 0):
            self._crossings[q].add(a)

    def chain(self) -> Chain:
        """The slices as a chain, with what they take in this order."""
        graph, nops = self.graph, len(self.graph.ops)
        op_seconds = np.array([op.seconds for op in graph.ops])
        forward = [slice(*pair) for pair in pairwise([0, *self.cuts, graph.nforward])]
        # The backward pass comes to the slices from the last to the first.
        slices = -np.array(self._slice_of[graph.nforward :])
        begins = graph.nforward + np.searchsorted(slices, -np.arange(self.nslices))
        base, running, keeping, local = self._held(begins)
        ends = [nops, *begins[:-1]]
        alive = base + local
        crossing, kept, read = self._stored()
        return Chain(
            seconds=np.array([op_seconds[part].sum() for part in forward]),
            crossing_nbytes=crossing,
            running_nbytes=np.array([running[part].max() for part in forward]),
            keeping_nbytes=np.array([keeping[part].max() for part in forward]),
            kept_nbytes=kept,
            read_nbytes=read,
            waiting_nbytes=base[begins - 1],
            backward_nbytes=np.array(
                [alive[begin:end].max(initial=0.0) for begin, end in zip(begins, ends, strict=True)]
            ),
        )

    def _stored(self) -> tuple[Array, Array, Array]:
        """The bytes of a chain that cross cuts, that slices keep, and that are read first."""
        n = self.nslices
        crossing, kept, read = np.zeros((n, n, n)), np.zeros((n, n)), np.zeros((n + 1, n))
        for a, slices in self._readers.items():
            nbytes = self.graph.tensors[a].nbytes
            home = before = self._slice_of[self.graph.producer[a]]
            for q in slices:
                crossing[home, before + 1 : q + 1, q] += nbytes
                before = q
            if slices:
                read[home + 1, slices[0]] += nbytes
            if a in self._saved_of[home]:
                kept[home, home] += nbytes
            elif slices:
                kept[home, slices[0]] += nbytes
        for k in range(n):
            crossing[:k, k] = np.cumsum(crossing[:k, k][::-1], axis=0)[::-1]
        read = np.cumsum(np.cumsum(read, axis=0), axis=1)[:n]
        return np.cumsum(crossing, axis=2), np.cumsum(kept, axis=1), read

    def _held(self, begins: Array) -> tuple[Array, Array, Array, Array]:
        """Bytes at every op in this order.

        Those of what is always held or backward; of a slice that runs, and of one that keeps what
        its backward pass reads; and of that in its backward pass, which begins at ``begins``.
        """
        graph, nops = self.graph, len(self.graph.ops)
        changes = np.zeros((4, nops + 1))

        def hold(row: int, begin: int, end: int, nbytes: int) -> None:
            changes[row, begin] += nbytes
            changes[row, end + 1] -= nbytes

        ends, heads = [*self.cuts, graph.nforward], frozenset(graph.heads)
        for a, (p, readers) in enumerate(zip(graph.producer, graph.readers, strict=True)):
            nbytes, home = graph.tensors[a].nbytes, self._slice_of[p]
            if a not in self._readers:
                hold(0, p, nops - 1 if a in heads else max(readers, default=p), nbytes)
                continue
            inside = [r for r in readers if self._slice_of[r] == home]
            last = max((r for r in inside if r < graph.nforward), default=p)
            crosses, is_saved = bool(self._readers[a]), a in self._saved_of[home]
            hold(1, p, ends[home] - 1 if crosses else last, nbytes)
            hold(2, p, ends[home] - 1 if crosses or is_saved else last, nbytes)
            if is_saved:
                hold(3, begins[home], max(inside), nbytes)
        base, running, keeping, local = np.cumsum(changes, axis=1)[:, :nops]
        return base - self._handed_over(), running, keeping, local

    def _handed_over(self) -> Array:
        """The bytes that each backward op writes where an input was that dies there."""
        graph, heads = self.graph, frozenset(self.graph.heads)
        result = np.zeros(len(graph.ops))
        for k, op in enumerate(graph.ops[graph.nforward :], start=graph.nforward):
            dying = {a for a in op.inputs if graph.readers[a][-1] == k and a not in heads}
            for handover in op.handovers:
                a = op.inputs[handover.input]
                if a in dying:
                    dying.remove(a)
                    result[k] += graph.tensors[a].nbytes
        return result

    def sequence(self, plan: Sequence[Stored], most_steps: int) -> list[int] | None:
        """The ops that run where ``plan`` says what is stored; None if these are too many."""
        graph = self.graph
        stored = {part.slice: part for part in plan}
        sequence = list(range(graph.nforward))
        current = self.nslices - 1
        keepable = self._keepable(stored[current])
        first_inputs = graph.ops[graph.nforward].inputs
        present = {
            a
            for op in sequence
            for a in graph.ops[op].outputs
            if a in keepable or a in self._always or a in first_inputs
        }
        tracked = frozenset(self._readers)
        droppable = present & tracked
        for op in range(graph.nforward, len(graph.ops)):
            ops = {op}
            if self._slice_of[op] != current:
                current = self._slice_of[op]
                keepable = self._keepable(stored[current])
                present -= droppable - keepable
                droppable &= keepable
                missing_tensors = self._demand(stored[current]) - present
                ops.update(graph.producer[a] for a in missing_tensors)
            run = closure(graph, ops, present)
            sequence += run
            if len(sequence) > most_steps:
                return None
            outputs = {a for other in run for a in graph.ops[other].outputs}
            droppable |= outputs & tracked & keepable
            present |= {a for a in outputs if a in keepable or a not in tracked}
        return sequence

    def most_held(self, steps: Sequence[int], live_nbytes: Array) -> tuple[Array, Array]:
        """Of ``live_nbytes`` at each step, the most while each slice's inputs are made, and while
        it runs backwards; nan where there are none. The forward pass makes those of the last slice.
        """
        making, backward = np.full((2, self.nslices), np.nan)
        nforward, begin = self.graph.nforward, self.graph.nforward
        making[-1] = live_nbytes[:nforward].max()
        for step in range(nforward, len(steps)):
            if steps[step] >= nforward:
                q = self._slice_of[steps[step]]
                making[q] = np.fmax(making[q], live_nbytes[begin:step].max(initial=0.0))
                backward[q] = np.fmax(backward[q], live_nbytes[step])
                begin = step + 1
        making[making == 0.0] = np.nan
        return making, backward

    def _keepable(self, stored: Stored) -> set[int]:
        """What may stay while the backward pass is in a slice."""
        crossings = (self._crossings[cut] for cut in stored.cuts)
        saved = (self._saved_of[s] for s in stored.slices)
        tensors = self._tensors_of[stored.slice] | self._read_in[stored.slice]
        return tensors.union(*crossings, *saved, self._group_of(stored.slice))

    def _demand(self, stored: Stored) -> set[int]:
        """What a slice reads of others, and the slices before it of what is stored."""
        saved = (self._saved_of[s] for s in stored.slices)
        tensors = self._read_in[stored.slice].union(*saved)
        for cut in stored.cuts:
            next_slices, crossings = self._by_next_slice(cut)
            tensors.update(crossings[: bisect_right(next_slices, stored.slice)])
        return tensors

    def _by_next_slice(self, cut: int) -> tuple[list[int], list[int]]:
        """In which slices what crosses a cut is read next, ascending, and what that is."""
        if cut not in self._next_slices:
            read = ((a, self._readers[a]) for a in self._crossings[cut])
            pairs = sorted((slices[bisect_left(slices, cut)], a) for a, slices in read)
            self._next_slices[cut] = [q for q, _ in pairs], [a for _, a in pairs]
        return self._next_slices[cut]


def descending(numbers: Sequence[int]) -> list[int]:
    """The numbers that never rise which are nearest to these: the sum of distances is the least.

    A heap has the places where the slope of that sum changes, as a function of the last number.
    """
    heap: list[int] = []
    result = []
    for number in numbers:
        heapq.heappush(heap, number)
        if heap[0] < number:
            heapq.heapreplace(heap, number)
        result.append(heap[0])
    for k in range(len(result) - 2, -1, -1):
        result[k] = max(result[k], result[k + 1])
    return result
