"""Schedules of greedy eviction while the step runs: a second or a few at 5,000 ops.

They are what to begin with where memory is scarce, or the graph large: a schedule is there at
almost any budget in which the step can run at all (:mod:`memplan.search.kernels.online`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from memplan.search.kernels.greedy import drop_arrays
from memplan.search.kernels.online import (
    DISTANCE,
    LENGTH,
    LOOKS,
    STALENESS,
    online_state,
    run_online,
)
from memplan.search.rematerialize import repeatable
from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.remember import remembered
from memplan.util.stop import Stop

# For these shares of the budget: what is dropped a little earlier or later makes other schedules,
# whose peaks are often lower than what was allowed.
SLACKS = (1.0, 0.97, 1.03, 0.9)

# Kinds of age, and whether backward ops may run again: where memory is very scarce, that is what
# the greedy choice loses itself in.
KINDS = ((DISTANCE, True), (STALENESS, True), (DISTANCE, False))

# What takes more than this many steps, of seconds or of ops, is given up.
MOST_STEPS = 4

# No other schedule is made after this much work: on chains of 5,000 ops a choice looks at half of
# all tensors, and of the largest graphs one schedule is all there is time for.
MOST_WORK = 200e3

# What a look at a tensor costs in work, and a run of an op: measured on unrolled recurrent
# networks of 3,600 and 4,700 ops.
WORK_BY_LOOK, WORK_BY_RUN = 0.01, 0.1


@functools.cache
def compile_online() -> None:
    """Compile, or load what was compiled before: once in a process."""
    graph = TrainingGraph((Op("warm", "op", (), (0,), 1.0),), (Tensor("warm", 4, 1),), (0,), 1)
    _run(graph, 0, DISTANCE, False)


def online_schedules(
    graph: TrainingGraph, budget_nbytes: int, stop: Stop, *, recompute_backward: bool = False
) -> Iterator[Schedule]:
    """Schedules of about this many live bytes, some of more: one of each kind, at every slack.

    Of large graphs only the first of these.
    """
    kinds = dict.fromkeys((age, backward and recompute_backward) for age, backward in KINDS)
    total_work = 0.0
    for slack in SLACKS:
        for age, backward in kinds:
            if total_work >= MOST_WORK or stop.is_over():
                return
            run = (int(slack * budget_nbytes), age, backward)
            schedule, work = remembered(graph, (_run, *run), functools.partial(_run, graph, *run))
            total_work += work
            stop.spend(work)  # also where it was run before: the plan is the same either way
            if schedule is not None:
                yield schedule


def _run(
    graph: TrainingGraph, budget_nbytes: int, age: int, backward: bool
) -> tuple[Schedule | None, float]:
    """The schedule, if there is one, and the work that it took."""
    arrays = drop_arrays(graph, repeatable(graph, backward=backward))
    state = online_state(arrays, MOST_STEPS * len(graph.ops) + 1)
    length = run_online(arrays, state, budget_nbytes, age, MOST_STEPS * graph.seconds)
    work = WORK_BY_LOOK * int(state.counts[LOOKS]) + WORK_BY_RUN * int(state.counts[LENGTH])
    return None if length < 0 else Schedule.sequence(graph, state.ops[:length].tolist()), work
