"""A drawing of the forward pass: an op in each row, its branches side by side in lanes."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.step.graph import TrainingGraph


@dataclass(frozen=True)
class Layout:
    """Forward op i is in row i and lane ``lanes[i]``, from 0.

    ``edges`` are pairs of ops: the second reads the first. An edge goes straight down in the lane
    of its source, and to its target's lane in the last row: no other op is in that lane before.
    """

    lanes: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def nlanes(self) -> int:
        """The number of lanes (0 without ops)."""
        return max(self.lanes, default=-1) + 1


def largest_outputs(graph: TrainingGraph) -> list[int]:
    """The bytes of the largest output of each forward op."""
    forward = graph.ops[: graph.nforward]
    return [max((graph.tensors[t].nbytes for t in op.outputs), default=0) for op in forward]


def forward_layout(graph: TrainingGraph) -> Layout:
    """Lanes for the forward ops of ``graph``, as few as a single pass finds.

    An op goes on in the lane of an input that nothing later reads, else opens the first free one.
    """
    edges = [
        (source, target)
        for target in range(graph.nforward)
        for source in dict.fromkeys(graph.producer[t] for t in graph.ops[target].inputs)
    ]
    last_reader = dict(edges)  # of several targets of a source, the last stays
    lanes: list[int] = []
    busy: dict[int, int] = {}  # lane -> the op whose edges run in it
    for target in range(graph.nforward):
        ending = sorted(lane for lane, op in busy.items() if last_reader[op] == target)
        free = next(lane for lane in range(len(busy) + 1) if lane not in busy)
        lane = ending[0] if ending else free
        for old in ending:
            del busy[old]
        if last_reader.get(target, target) > target:
            busy[lane] = target
        lanes.append(lane)
    return Layout(tuple(lanes), tuple(edges))
