"""Sequences of executions of a graph's ops: as schedules, what they hold, how long they take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.search.kernels.annealing import LIVE, expand
from memplan.search.kernels.arrays import Array, graph_arrays
from memplan.search.kernels.model import BEFORE, sequence_model
from memplan.search.kernels.replay import UNLIMITED, replay, replay_memory
from memplan.search.kernels.sequence import load
from memplan.search.kernels.state import room_for_width, sequence_state
from memplan.search.rematerialize import repeatable
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule

# There is room for sequences of this many times the ops; those to begin with fill half of it.
ROOM = 8


class Rules(NamedTuple):
    """What a schedule may do, and what counts: ``match_ranges`` of MXNet's blocks, or live bytes
    if there are none.
    """

    recompute_backward: bool
    reorder: bool
    match_ranges: tuple[int, ...]


class GraphSequences:
    """The sequences of one graph that keep the ``rules``.

    A sequence runs groups of ops, each known by its number; the last one is the end.
    """

    def __init__(self, graph: TrainingGraph, rules: Rules, seed: int) -> None:
        self.graph, self.rules = graph, rules
        self.match_ranges = tuple(min(m, UNLIMITED) for m in rules.match_ranges)
        repeatable_ops = repeatable(graph, backward=rules.recompute_backward)
        self.model = sequence_model(graph, repeatable_ops, reorder=rules.reorder)
        self.nops = len(self.model.seconds)
        self.capacity = ROOM * len(graph.ops) + 1000
        self.state = sequence_state(self.model, self.capacity, seed)
        self.arrays = graph_arrays(graph)
        most = room_for_width(self.model, self.capacity)
        self.memory = replay_memory(self.arrays, most, most)
        self.room = np.zeros(most, dtype=np.int64)

    def schedule(self, sequence: Array) -> Schedule:
        """The schedule of a sequence."""
        return Schedule.sequence(self.graph, self._ops(sequence).tolist())

    def _ops(self, sequence: Array) -> Array:
        load(self.model, self.state, sequence, len(sequence), UNLIMITED)
        return self.room[: expand(self.model, self.state, self.room)].copy()

    def nbytes(self, sequence: Array) -> tuple[int, int]:
        """The bytes that count, and the match range by which they are the least (or LIVE)."""
        if not self.match_ranges:
            return self.live_peak(sequence), LIVE
        ops = self._ops(sequence)
        return min(
            (int(replay(self.arrays, self.memory, ops, len(ops), m, UNLIMITED)[0]), m)
            for m in self.match_ranges
        )

    def live_peak(self, sequence: Array) -> int:
        """The peak of live bytes."""
        ops = self._ops(sequence)
        return int(replay(self.arrays, self.memory, ops, len(ops), 0, UNLIMITED)[1])

    def seconds(self, sequence: Array) -> float:
        """The seconds that the ops of a sequence take."""
        if len(self.model.op_seconds) >= self.nops:  # aliases run with some of the runs only
            return float(self.model.op_seconds[self._ops(sequence)].sum())
        return float(self.model.seconds[sequence].sum())

    def of_schedule(self, schedule: Schedule) -> Array | None:
        """The groups that ``schedule`` runs, by their first ops, and the end.

        None where the rules do not allow it.
        """
        start, flat = self.model.start, self.model.flat
        group = {int(flat[start[-1, v]]): v for v in range(self.nops - 1)}
        steps = [group[op] for op in schedule.ops if op in group]
        sequence = np.array([*steps, self.nops - 1], dtype=np.int64)
        return sequence if self.is_legal(sequence) else None

    def is_legal(self, sequence: Array) -> bool:
        """May ops run in this order, as often as this, and is there room for it?"""
        width = self.model.widths[sequence].sum()
        if len(sequence) > self.capacity // 2 or width > len(self.room) // 2:
            return False
        start, ran = self.model.start[BEFORE], np.zeros(self.nops, dtype=bool)
        for v in sequence:
            if ran[v] and not self.model.repeatable[v]:
                return False
            if not ran[self.model.flat[start[v] : start[v + 1]]].all():
                return False
            ran[v] = True
        return True
