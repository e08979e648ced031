"""The copies of arrays in other layouts that MXNet's executor keeps, replayed on a schedule.

Operators of a library leave arrays in layouts of its own. For a run of any other operator the
executor keeps copies of the inputs that are in such a layout, and of the outputs that are written
over one. What an op is written over depends on what dies there: a plan that recomputes an input
lets it die earlier than the unplanned step does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import Arena, replay
from memplan.util.remember import remembered

# When an op of the library leaves its first output in a layout of the library's own: always, never,
# if one input is in such a layout, if any is, if all are, or if any is and all that it writes over.
OWN, USUAL, INPUT, ANY, ALL, TAKEN = "own", "usual", "input", "any", "all", "taken"
# An operator that is none of the library's leaves every output in the layout of what lies there.
PLACE = "place"


class Rule(NamedTuple):
    """In which layout an op leaves its first output; ``place`` is that of one of its inputs.

    Of the tensors ``ignored`` it reads only the shape: they may be dead, and lie where others are
    by then. The executor copies what lies there, as it does what is read.
    """

    leaves: str
    place: int = 0
    ignored: tuple[int, ...] = ()

    def leaves_own(self, are_own: Sequence[bool], under: Sequence[bool]) -> bool:
        """Is that a layout of the library's own?

        ``are_own`` tells so of each input, ``under`` of those over which the op writes.
        """
        if self.leaves == INPUT:
            return are_own[self.place]
        if self.leaves == ALL:
            return all(are_own)
        if self.leaves == TAKEN:
            return any(are_own) and all(under)
        return self.leaves == OWN or (self.leaves == ANY and any(are_own))


def may_copy(graph: TrainingGraph, rules: Sequence[Rule]) -> bool:
    """May there be a copy by some schedule of ``graph``, whose ops are of these ``rules``?"""
    own: set[int] = set()
    for op, rule in zip(graph.ops, rules, strict=True):
        are_own = [tensor in own for tensor in op.inputs]
        if rule.leaves == PLACE and (any(are_own) or not own.isdisjoint(rule.ignored)):
            return True
        if any(are_own) or rule.leaves == OWN:
            own.update(op.outputs[:1] if rule.leaves != USUAL else ())
    return False


def further_copies(schedule: Schedule, rules: Sequence[Rule]) -> int:
    """The bytes of copies by ``schedule`` that are not kept by the unplanned step.

    Where a schedule keeps fewer, none count: bounds hold for every schedule with all those of the
    unplanned step.
    """
    if not rules:
        return 0
    unplanned = Schedule.unplanned(schedule.graph)
    return max(0, kept_nbytes(schedule, rules) - kept_nbytes(unplanned, rules))


def kept_nbytes(schedule: Schedule, rules: Sequence[Rule]) -> int:
    """The bytes of the copies that the executor keeps for all runs of ``schedule``."""
    key = (kept_nbytes, tuple(rules))

    def counted() -> int:
        arena = _Layouts(schedule, rules)
        replay(schedule, arena)
        return arena.nbytes

    return remembered(schedule, key, counted)


class _Layouts(Arena):
    """Which buffers are in a layout of the library's own, and the bytes of the copies so far."""

    def __init__(self, schedule: Schedule, rules: Sequence[Rule]) -> None:
        self.schedule, self.rules = schedule, rules
        self.nbuffers = self.nbytes = 0
        self.own: set[int] = set()
        self.buffer_of: dict[tuple[int, int], int] = {}
        self.latest_of: dict[int, int] = {}

    def request(self, step: int, tensor: int) -> int:
        self.share(self.nbuffers, step, tensor)
        self.nbuffers += 1
        return self.nbuffers - 1

    def share(self, buffer: int, step: int, tensor: int) -> None:
        self.buffer_of[step, tensor] = self.latest_of[tensor] = buffer

    def end_of_requests(self, step: int) -> None:
        graph, index = self.schedule.graph, self.schedule.ops[step]
        op, rule = graph.ops[index], self.rules[index]
        sources = zip(self.schedule.reads[step], op.inputs, strict=True)
        inputs = [self.buffer_of.get(source, -1) for source in sources]
        outputs = [self.buffer_of.get((step, tensor), -1) for tensor in op.outputs]
        if rule.leaves == PLACE:
            ignored = [self.latest_of.get(tensor, -1) for tensor in rule.ignored]
            tensors = (*op.inputs, *rule.ignored, *op.outputs)
            pairs = zip((*inputs, *ignored, *outputs), tensors, strict=True)
            self.nbytes += sum(graph.tensors[t].nbytes for b, t in pairs if b in self.own)
            return
        are_own = [buffer in self.own for buffer in inputs]
        under = [buffer in self.own for buffer in outputs if buffer in inputs]
        self.own.difference_update(outputs)
        if outputs[0] >= 0 and rule.leaves_own(are_own, under):
            self.own.add(outputs[0])
