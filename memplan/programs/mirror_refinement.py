"""The program of mirroring, solved with more and more moments until its answer fits.

After Jain et al.: Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys
2020 (arXiv:1910.02653), section 4: recompute seconds are minimised under a memory limit at every
step. Here it decides over flags alone (:mod:`memplan.programs.mirror_program`).
"""

from __future__ import annotations

from collections.abc import Iterator

from memplan.programs.mirror_program import MirrorProgram
from memplan.programs.proof import Fact, ProofOptions
from memplan.programs.solver import Looks, Program
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import flags_of, mirror
from memplan.step.schedule import Schedule
from memplan.step.simulate import Timeline, simulate
from memplan.util.progress import tell
from memplan.util.stop import Stop

# How many moments that are over the budget join the program after each solve.
MOMENTS_PER_ROUND = 3

# After this many solves, times the effort, the program is left. Set on the zoo's ResNet-50.
ROUNDS = 20
# And when HiGHS has looked this many times, times the effort and the number of variables, at
# whether to end: with the quarter of the effort that `auto` gives it, three seconds of one core at
# most. Set on the six networks of benchmarks/mirror.py, whose bounds are at most 0.1 point lower
# than without, and on residual networks of 125 to 362 ops.
LOOKS = 400_000


def refine_flags(
    graph: TrainingGraph,
    budget_nbytes: int,
    stop: Stop,
    options: ProofOptions,
    *,
    start: Schedule | None = None,
) -> Iterator[Fact]:
    """The optimum of the program with more and more moments, the bound never falling.

    Ends when that optimum is a schedule whose live bytes are within the budget, after so much
    effort, or with ``stop``. ``start`` is a mirrored schedule for the solver to begin with.
    """
    unplanned = simulate(Schedule.unplanned(graph))
    with Program(options.solver) as solver:
        program = MirrorProgram(graph, budget_nbytes, solver)
        program.add_moment(min(max(graph.nforward, unplanned.peak_step), len(graph.ops) - 1))
        bound, looks = 0.0, Looks(options.effort * LOOKS)
        rounds = 0
        while rounds < options.effort * ROUNDS and looks.left > 0.0 and not stop.is_over():
            rounds += 1
            if start is not None:
                program.start_from(flags_of(start))
            solution = program.solve(
                stop,
                effort=options.effort,
                gap_seconds=options.program_gap,
                looks=looks,
            )
            if solution.infeasible:
                yield Fact(None, float("inf"))
                return
            bound = max(bound, solution.bound_seconds)
            seconds = graph.seconds + bound
            tell("program", bound_seconds=seconds, unplanned_seconds=graph.seconds)
            if solution.flags is None:
                yield Fact(None, seconds)
                return
            schedule = mirror(graph, solution.flags)
            timeline = simulate(schedule)
            if timeline.peak_nbytes <= budget_nbytes:
                yield Fact(schedule, seconds)
                return
            yield Fact(None, seconds)
            if not _add_moments(program, schedule, timeline, budget_nbytes):
                program.forbid(solution.flags)


def _add_moments(
    program: MirrorProgram, schedule: Schedule, timeline: Timeline, budget_nbytes: int
) -> bool:
    """Add the moments at which ``schedule`` is most over the budget; False if all are there."""
    worst = sorted(_moments(schedule), key=lambda moment: -timeline.live_nbytes[moment[0]])
    nmoments = 0
    for step, k, copy in worst:
        if timeline.live_nbytes[step] <= budget_nbytes or nmoments == MOMENTS_PER_ROUND:
            break
        nmoments += program.add_moment(k, copy)
    return nmoments > 0


def _moments(schedule: Schedule) -> Iterator[tuple[int, int, int | None]]:
    """For every step, its moment in the program: (step, op, None) or (step, next op, copy)."""
    graph = schedule.graph
    next_op = None
    for step in range(len(schedule.ops) - 1, -1, -1):
        op = schedule.ops[step]
        if op >= graph.nforward:
            next_op = op
            yield step, op, None
        elif step < graph.nforward:
            yield step, op, None
        elif next_op is not None:
            yield step, next_op, op
