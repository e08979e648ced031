"""A small step as bit masks: what an exact search over its schedules asks, again and again.

Tensors are bits of an integer, and so are ops. Tensors that share a buffer by an alias count once:
where a schedule has two buffers for them, this says less than is true. So does what an op may write
over: each of its outputs may, if one buffer that it can take dies there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from memplan.search.buffers import Buffers
from memplan.search.rematerialize import repeatable
from memplan.step.graph import TrainingGraph


def bits(mask: int) -> Iterator[int]:
    """The places of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def mask_of(places: Iterable[int]) -> int:
    """The integer with these bits."""
    result = 0
    for place in places:
        result |= 1 << place
    return result


@dataclass(frozen=True)
class After:
    """What holds once certain ops have run.

    ``useful`` are the tensors that may be read yet, ``stuck`` those that will be and cannot be
    computed again, ``needed`` those that are written and will be read by an op that has not run,
    or at the end. ``written`` are all that they have written.
    """

    useful: int
    stuck: int
    needed: int
    units_to_come: int
    written: int


@dataclass(frozen=True)
class Call:
    """One op: masks of what it reads and writes, of ops that it follows, and its cost in units.

    ``takeovers`` are, by output that may be written over an input, (bytes, masks of the buffers
    that may give theirs); ``givers`` are these buffers.
    """

    inputs: int
    outputs: int
    follows: int
    units: int
    repeatable: bool
    takeovers: tuple[tuple[int, tuple[int, ...]], ...]
    givers: tuple[int, ...]


class ExactStep:
    """The masks of one graph; ``units`` are whole numbers of about 2**-40 of its seconds."""

    def __init__(self, graph: TrainingGraph, *, recompute_backward: bool) -> None:
        self.graph = graph
        self.unit_seconds = graph.seconds / 2**40 or 1.0
        buffers, again = Buffers(graph), repeatable(graph, backward=recompute_backward)
        sized = mask_of(a for a, tensor in enumerate(graph.tensors) if tensor.nbytes)
        self.calls = [
            _call(graph, k, buffers, sized, again[k], self.unit_seconds)
            for k in range(len(graph.ops))
        ]
        self.members = [mask_of(tensors) for _, tensors in buffers.classes]
        self.class_of, self.nbytes_of = buffers.class_of, [size for size, _ in buffers.classes]
        self.nbytes_by_mask = dict(zip(self.members, self.nbytes_of, strict=True))
        self.heads = mask_of(graph.heads) & sized
        self.every_op = (1 << len(graph.ops)) - 1
        self.once = mask_of(a for a, p in enumerate(graph.producer) if not again[p]) & sized
        # Buffers of what is computed once: the ops that write them.
        self.once_writers = {
            mask: mask_of(graph.producer[a] for a in bits(mask))
            for mask in self.members
            if not mask & ~self.once
        }
        self._after: dict[int, After] = {}

    def nbytes(self, tensors: int) -> int:
        """The bytes of the buffers of ``tensors``."""
        total, members, nbytes_of, class_of = 0, self.members, self.nbytes_of, self.class_of
        while tensors:
            c = class_of[(tensors & -tensors).bit_length() - 1]
            total += nbytes_of[c]
            tensors &= ~members[c]
        return total

    def buffers(self, tensors: int) -> list[int]:
        """The buffers of ``tensors``, as masks of all that shares them."""
        result = []
        while tensors:
            mask = self.members[self.class_of[(tensors & -tensors).bit_length() - 1]]
            result.append(mask)
            tensors &= ~mask
        return result

    def after(self, done: int) -> After:
        """What holds once the ops ``done`` have run."""
        known = self._after.get(done)
        if known is None:
            known = self._after[done] = self._found(done)
        return known

    def _found(self, done: int) -> After:
        useful = needed = self.heads
        written = units = 0
        for k in range(len(self.calls) - 1, -1, -1):
            call = self.calls[k]
            if done >> k & 1:
                written |= call.outputs
                # What runs again may do so for what is useful alone.
                useful |= call.inputs if call.repeatable and call.outputs & useful else 0
            else:
                useful |= call.inputs
                needed |= call.inputs
                units += call.units
        needed &= written
        return After(useful, needed & self.once, needed, units, written)

    def units_left(
        self, done: int, held: int, needs: Sequence[tuple[int, int]] | None = None
    ) -> int | None:
        """What every way from here to the end takes at least; None if there is no way.

        Each op that has not run must. What will be read and is not held is computed again, and so
        is what that reads, if it is not held. ``needs`` are what is read until one gate after
        another, and what runs again from there on in any case
        (:mod:`memplan.programs.exact_gates`): to the end, if there are none.
        """
        after, calls, producer = self.after(done), self.calls, self.graph.producer
        if after.stuck & ~held:
            return None
        written = units = most = 0
        for needed, later in needs or ((after.needed, 0),):
            missing = needed & ~held & ~written
            while missing:
                call = calls[producer[(missing & -missing).bit_length() - 1]]
                if not call.repeatable:
                    return None
                units += call.units
                written |= call.outputs
                missing = (missing | call.inputs & ~held) & ~written
            most = max(most, units + later)
        return after.units_to_come + most


def _call(
    graph: TrainingGraph,
    k: int,
    buffers: Buffers,
    sized: int,
    again: bool,
    unit_seconds: float,
) -> Call:
    op = graph.ops[k]
    takeovers = tuple(
        (nbytes, tuple(mask_of(tensors) for tensors in givers))
        for nbytes, givers in buffers.takeovers[k]
    )
    return Call(
        mask_of(op.inputs) & sized,
        mask_of(op.outputs) & sized,
        mask_of(graph.dependencies[k]),
        int(op.seconds / unit_seconds),
        again,
        takeovers,
        tuple(dict.fromkeys(mask for _, masks in takeovers for mask in masks)),
    )
