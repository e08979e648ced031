"""What the stages of a frontier-advancing schedule may read, carry and share.

Stage t ends with the first execution of op t (Jain et al. 2020, arXiv:1910.02653, section 4.3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule


class Buffers:
    """Which tensors share a buffer by an alias, and which outputs may take over a dying one.

    ``classes`` are (bytes, tensors); ``takeovers[k]`` are, for outputs of op k, (bytes, the
    classes of the inputs that may give theirs).
    """

    def __init__(self, graph: TrainingGraph) -> None:
        import networkx  # 9 MB, which are for searches alone

        sized = [tensor.nbytes > 0 for tensor in graph.tensors]
        links = networkx.Graph()
        links.add_nodes_from(a for a, has_bytes in enumerate(sized) if has_bytes)
        for op in graph.ops:
            for h in op.handovers:
                output, source = op.outputs[h.output], op.inputs[h.input]
                if h.alias and sized[output] and sized[source]:
                    links.add_edge(source, output)
        self.class_of = [-1] * len(graph.tensors)
        self.classes: list[tuple[int, list[int]]] = []
        for members in networkx.connected_components(links):
            for a in members:
                self.class_of[a] = len(self.classes)
            self.classes.append((graph.tensors[min(members)].nbytes, sorted(members)))
        self.takeovers = [self._takeovers(graph, k) for k in range(len(graph.ops))]

    def _takeovers(self, graph: TrainingGraph, k: int) -> list[tuple[int, list[list[int]]]]:
        op = graph.ops[k]
        sources: dict[int, dict[int, None]] = defaultdict(dict)
        for h in op.handovers:
            giver, taker = self.class_of[op.inputs[h.input]], self.class_of[op.outputs[h.output]]
            read_once = op.inputs.count(op.inputs[h.input]) == 1
            if giver >= 0 and taker >= 0 and giver != taker and read_once:
                sources[op.outputs[h.output]][giver] = None
        return [
            (graph.tensors[output].nbytes, [self.classes[c][1] for c in classes])
            for output, classes in sources.items()
        ]


def last_stages(
    graph: TrainingGraph, is_repeatable: Sequence[bool]
) -> tuple[list[int], list[int], list[int]]:
    """For each op the last stage in which it may run; for each tensor the last in which it may be
    read, and the last in which a first execution reads it (both after the last stage for heads).
    """
    nops = len(graph.ops)
    last_run = list(range(nops))
    last_stage = [-1] * len(graph.tensors)
    last_first_read = [max(readers, default=-1) for readers in graph.readers]
    for a in graph.heads:
        last_stage[a] = last_first_read[a] = nops
    for i in range(nops - 1, -1, -1):
        for a in graph.ops[i].outputs:
            last_stage[a] = max([last_stage[a], *(last_run[j] for j in graph.readers[a])])
        if is_repeatable[i]:
            reach = max((last_stage[a] for a in graph.ops[i].outputs), default=-1)
            last_run[i] = max(i, min(nops - 1, reach))
    return last_run, last_stage, last_first_read


def carried_ranges(schedule: Schedule) -> list[list[range]]:
    """For every tensor the stages into which its readers have it carried; the end is one, too."""
    graph, stage = schedule.graph, schedule.stage
    result: list[list[range]] = [[] for _ in graph.tensors]
    for step, op in enumerate(schedule.ops):
        for a, source in zip(graph.ops[op].inputs, schedule.reads[step], strict=True):
            if stage[source] < stage[step]:
                result[a].append(range(stage[source] + 1, stage[step] + 1))
    for a, source in zip(graph.heads, schedule.heads, strict=True):
        result[a].append(range(stage[source] + 1, len(graph.ops) + 1))
    return result


def carried_tensors(schedule: Schedule) -> list[AbstractSet[int]]:
    """For every stage, and for the end, the tensors written before it and read in or after it."""
    result: list[set[int]] = [set() for _ in range(len(schedule.graph.ops) + 1)]
    for a, ranges in enumerate(carried_ranges(schedule)):
        for stages in ranges:
            for t in stages:
                result[t].add(a)
    return list(result)
