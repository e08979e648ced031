"""Where the unplanned step writes over an input: what is in another place may round otherwise.

An operator leaves its output in the layout in which oneDNN left the input that it writes over
(MXNet's src/common/exec_utils.h and src/operator/nn/mkldnn/mkldnn_base.cc), and the sums of a
BatchNorm are rounded by the layout of what it reads. A plan lets tensors die earlier than MXNet.
"""

from __future__ import annotations

import dataclasses

from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import Arena, replay


def overwritten(graph: TrainingGraph) -> dict[int, int]:
    """For each tensor that the unplanned step writes over one that it reads: which one that is."""
    schedule = Schedule.unplanned(graph)
    arena = _Overwritten(schedule)
    replay(schedule, arena)
    return arena.source_of


class _Overwritten(Arena):
    """Notes which tensor lies where another one is written."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.nbuffers = 0
        self.buffer_of: dict[int, int] = {}
        self.source_of: dict[int, int] = {}

    def request(self, step: int, tensor: int) -> int:
        self.buffer_of[tensor] = self.nbuffers
        self.nbuffers += 1
        return self.buffer_of[tensor]

    def share(self, buffer: int, step: int, tensor: int) -> None:
        self.buffer_of[tensor] = buffer
        inputs = self.schedule.graph.ops[self.schedule.ops[step]].inputs
        self.source_of[tensor] = next(t for t in inputs if self.buffer_of[t] == buffer)


def preferring_unplanned(graph: TrainingGraph) -> TrainingGraph:
    """``graph``, whose ops write over the inputs that they write over unplanned, if these die."""
    source_of = overwritten(graph)
    ops = []
    for op in graph.ops:
        taken = [source_of.get(op.outputs[h.output]) == op.inputs[h.input] for h in op.handovers]
        order = sorted(range(len(taken)), key=lambda place: not taken[place])
        ops.append(dataclasses.replace(op, handovers=tuple(op.handovers[i] for i in order)))
    return dataclasses.replace(graph, ops=tuple(ops))
