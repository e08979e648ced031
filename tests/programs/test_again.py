"""What cannot run again beside gradients that stay, against random schedules of small graphs."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.branches import taking
from helpers.schedules import random_order
from helpers.small_graphs import small_graphs
from memplan.programs.again import Again
from memplan.programs.moments import Moments
from memplan.step.graph import Handover, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate

SCHEDULES = 30


def with_more(graph: TrainingGraph, rng: random.Random) -> TrainingGraph:
    """More of what this is about: ops that run once, buffers that are handed on, and heads."""
    tensors = graph.tensors
    ops = []
    for op in graph.ops:
        possible = [
            Handover(s, o, alias=rng.random() < 0.5)
            for s, a in enumerate(op.inputs)
            for o, b in enumerate(op.outputs)
            if tensors[a].nbytes == tensors[b].nbytes
        ]
        handovers = tuple(rng.sample(possible, rng.randint(0, len(possible))))
        ops.append(dataclasses.replace(op, recomputable=rng.random() < 0.5, handovers=handovers))
    heads = [a for a in range(len(tensors)) if rng.random() < 0.4]
    rng.shuffle(heads)
    return dataclasses.replace(graph, ops=tuple(ops), heads=tuple(heads))


def any_schedule(graph: TrainingGraph, again: list[int], rng: random.Random) -> Schedule:
    """Ops of ``again`` run again anywhere; each read, and each head, is of any earlier run."""
    steps = random_order(graph, rng)
    for op in rng.choices(again, k=rng.randint(1, 2 * len(again))):
        steps.insert(rng.randint(steps.index(op) + 1, len(steps)), op)
    runs: dict[int, list[int]] = {}

    def sources(tensors: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rng.choice(runs[graph.producer[a]]) for a in tensors)

    reads = []
    for step, op in enumerate(steps):
        reads.append(sources(graph.ops[op].inputs))
        runs.setdefault(op, []).append(step)
    return Schedule(graph, tuple(steps), tuple(reads), sources(graph.heads))


def check(again: Again, schedule: Schedule, taken: Counter[str]) -> None:
    """Whatever runs again takes what stays of the ops that have run, and what it works on."""
    live = simulate(schedule).live_nbytes
    before: set[int] = set()
    for step, op in enumerate(schedule.ops):
        staying = again.staying_nbytes(before)
        assert staying <= live[step]
        if op in before:
            least = staying + again.working_nbytes[op]
            assert least <= live[step]
            taken["exact"] += 0 < staying < least == live[step]
        before.add(op)


@taking(exact=150)
@examples(1000, quick=150)
@given(small_graphs(max_forward=4), st.booleans(), st.integers(0, 2**32))
def test_what_runs_again_takes_no_less_than_is_said(
    taken: Counter[str], graph: TrainingGraph, backward: bool, seed: int
) -> None:
    rng = random.Random(seed)
    graph = with_more(graph, rng)
    moments = Moments(graph, recompute_backward=backward)
    again = [op for op, may in enumerate(moments.repeatable) if may]
    for _ in range(SCHEDULES if again else 0):
        check(moments.again, any_schedule(graph, again, rng), taken)
