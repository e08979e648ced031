"""The same runs in an order in which less is alive: one of the same time that is easier to pack.

A search in live bytes asks that the peak is within the budget, and nothing of all other moments.
So in what it ends with sums wait for nothing, and what is recomputed is there long before it is
read. Where what takes memory runs as late as it can, and what frees some as early, a third less of
the sections of an LSTM are full, and offsets are found in nearly as many bytes as are alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np

from memplan.search.kernels.arrays import Array
from memplan.search.kernels.model import BEFORE, NBYTES, READ, WRITER, WRITTEN, SequenceModel


def tidied(model: SequenceModel, sequence: Array) -> Array:
    """A sequence of the same runs, each of which reads the same run as before.

    What takes memory runs late, and what frees some early. Only by what one run reads and writes
    the peak may be higher.
    """
    late = _Runs(model, sequence).in_turn(forward=False)
    return _Runs(model, late).in_turn(forward=True)


class _Runs:
    """The steps of a sequence, the last of which ends it: which must come before which.

    What they write and somebody reads are values, each of some bytes.
    """

    def __init__(self, model: SequenceModel, sequence: Array) -> None:
        self.sequence, self._model = sequence, model
        steps = range(len(sequence))
        self.before, self.after = [set[int]() for _ in steps], [set[int]() for _ in steps]
        self.reads, self.writes = [list[int]() for _ in steps], [list[int]() for _ in steps]
        self.readers, self.nbytes = list[list[int]](), list[int]()
        self._enter(sequence.tolist())

    def _lists(self, kind: int) -> list[list[int]]:
        flat = self._model.flat.tolist()
        return [flat[begin:end] for begin, end in pairwise(self._model.start[kind].tolist())]

    def _enter(self, sequence: Sequence[int]) -> None:
        reads, written, needed = map(self._lists, (READ, WRITTEN, BEFORE))
        nbytes = self._model.tensors[NBYTES].tolist()
        writers = self._model.tensors[WRITER].tolist()
        first, latest = dict[int, int](), dict[int, int]()
        value_of = dict[int, int]()  # of what the latest runs have written
        for step, op in enumerate(sequence):
            for a in reads[op]:
                self._order(latest[writers[a]], step)
                self.reads[step].append(value_of[a])
                self.readers[value_of[a]].append(step)
            if op in first:  # who reads the run before this one does so before this one
                readers = (self.readers[value] for value in self.writes[latest[op]])
                for other in (latest[op], *chain.from_iterable(readers)):
                    self._order(other, step)
            for other in needed[op] if op not in first else ():
                self._order(first[other], step)
            first.setdefault(op, step)
            latest[op] = step
            for a in written[op]:
                value_of[a] = len(self.nbytes)
                self.writes[step].append(value_of[a])
                self.readers.append([])
                self.nbytes.append(nbytes[a])

    def _order(self, step: int, later: int) -> None:
        if step != later:
            self.before[later].add(step)
            self.after[step].add(later)

    def in_turn(self, *, forward: bool) -> Array:
        """The same runs, of which those that leave less alive follow what they wait for at once.

        Backwards they are those that leave less alive before them: what takes memory comes late.
        """
        end = len(self.sequence) - 1
        order = _InTurn(self, forward=forward).order
        order = [*(order if forward else reversed(order)), end]
        result: Array = self.sequence[np.array(order, dtype=np.int64)]
        return result


class _InTurn:
    """The steps but for the end, forward or backwards: eager ones as soon as they can be taken."""

    def __init__(self, runs: _Runs, *, forward: bool) -> None:
        self.runs, self.forward = runs, forward
        end = len(runs.sequence) - 1
        waits_for, self.followers = runs.before, runs.after
        if not forward:
            waits_for, self.followers = runs.after, runs.before
        self.nmissing = [len(row) for row in waits_for]
        self.nleft = [len(readers) for readers in runs.readers]
        self.done = [False] * (end + 1)
        self.order: list[int] = []
        if not forward:
            self._take(end)
            self.order.clear()
        self.done[end] = True
        for step in range(end) if forward else range(end - 1, -1, -1):
            stack = [step]
            while stack:
                now = stack.pop()
                if not self.done[now]:
                    self._take(now)
                    # The one that comes first is the next.
                    stack += sorted(set(self._eager(now)), reverse=forward)

    def _take(self, step: int) -> None:
        self.done[step] = True
        self.order.append(step)
        for value in self.runs.reads[step]:
            self.nleft[value] -= 1
        for other in self.followers[step]:
            self.nmissing[other] -= 1

    def _eager(self, step: int) -> Iterator[int]:
        """Eager ones among those that may have waited for this step, or read what it reads.

        These gain by the step only where it leaves one reader, or none was taken before it.
        """
        read = (value for value in self.runs.reads[step] if self._changes_gains(value))
        readers = (self.runs.readers[value] for value in read)
        for other in chain(self.followers[step], *readers):
            if not (self.done[other] or self.nmissing[other]) and self._gain(other) > 0:
                yield other

    def _changes_gains(self, value: int) -> bool:
        """Does what other readers of ``value`` gain change when one of them is taken, just now?"""
        return self.nleft[value] == (1 if self.forward else len(self.runs.readers[value]) - 1)

    def _gain(self, step: int) -> int:
        """By how many bytes less is alive once the step is taken."""
        runs = self.runs
        written = sum(runs.nbytes[value] for value in runs.writes[step] if runs.readers[value])
        if self.forward:
            # What nobody else will read dies.
            last = (value for value in runs.reads[step] if self.nleft[value] == 1)
            return sum(runs.nbytes[value] for value in last) - written
        # What nobody reads later has to be there from now on, as one goes back.
        new = (v for v in runs.reads[step] if self.nleft[v] == len(runs.readers[v]))
        return written - sum(runs.nbytes[value] for value in new)
