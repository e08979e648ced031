"""Reshapes before the ops that read an array as another op does not write it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from memplan.step.graph import Handover, Op
from memplan.step.schedule import Schedule


def with_reshapes(
    schedule: Schedule, places: Mapping[int, Sequence[int]]
) -> tuple[Schedule, list[int]]:
    """``schedule`` with a Reshape before every run of some ops, and where each op has gone.

    ``places`` are, by op, those among its inputs of what it reads by way of a Reshape, which
    shares the memory of that tensor. They stand right before the op, in that order.
    """
    adding = _Adding(schedule, places)
    return adding.schedule(), adding.index_of


class _Adding:
    """The ops of a graph, each behind the Reshapes of its inputs."""

    def __init__(self, schedule: Schedule, places: Mapping[int, Sequence[int]]) -> None:
        self.before, self.places = schedule, places
        self.tensors = list(schedule.graph.tensors)
        self.ops: list[Op] = []
        self.index_of: list[int] = []
        for index, op in enumerate(schedule.graph.ops):
            self._add(op, places.get(index, ()))

    def _add(self, op: Op, places: Sequence[int]) -> None:
        inputs = list(op.inputs)
        for number, place in enumerate(places):
            name = f"{op.name}_input{number}"
            self.tensors.append(dataclasses.replace(self.tensors[inputs[place]], name=f"{name}[0]"))
            written = len(self.tensors) - 1
            shares = (Handover(0, 0, alias=True),)
            self.ops.append(Op(name, "Reshape", (inputs[place],), (written,), handovers=shares))
            inputs[place] = written
        self.index_of.append(len(self.ops))
        differentiates = op.differentiates
        self.ops.append(
            dataclasses.replace(
                op,
                inputs=tuple(inputs),
                differentiates=None if differentiates is None else self.index_of[differentiates],
                after=tuple(self.index_of[other] for other in op.after),
            )
        )

    def schedule(self) -> Schedule:
        """The steps of the schedule, each behind those Reshapes."""
        before, nforward = self.before, self.before.graph.nforward
        graph = dataclasses.replace(
            before.graph,
            ops=tuple(self.ops),
            tensors=tuple(self.tensors),
            nforward=1 + self.index_of[nforward - 1] if nforward else 0,
        )
        ops: list[int] = []
        reads: list[tuple[int, ...]] = []
        step_of: list[int] = []
        for op, sources in zip(before.ops, before.reads, strict=True):
            read = [step_of[source] for source in sources]
            places = self.places.get(op, ())
            for number, place in enumerate(places):
                reads.append((read[place],))
                read[place] = len(ops)
                ops.append(self.index_of[op] - len(places) + number)
            step_of.append(len(ops))
            ops.append(self.index_of[op])
            reads.append(tuple(read))
        heads = tuple(step_of[step] for step in before.heads)
        return Schedule(graph, tuple(ops), tuple(reads), heads)
