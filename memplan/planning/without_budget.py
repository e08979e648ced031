"""The least memory that strategies reach: what a plan without a budget makes of a problem."""

from __future__ import annotations

import dataclasses

from memplan.step.schedule import Schedule
from memplan.strategies import Problem, Strategy, options_of
from memplan.strategies.auto import Auto
from memplan.strategies.base import OneOf
from memplan.strategies.quick import QUICK_SHARE, quick_schedule
from memplan.strategies.search import Search
from memplan.util.stop import Stop


def solvers_of_least(strategy: Strategy) -> tuple[Strategy, ...]:
    """The strategies whose least memory a refusal of ``strategy`` counts.

    One of them is `auto`, which the refusal recommends. The other is the refused one itself, if it
    takes no longer and plans within any budget that it reaches: those do that choose from a few
    schedules, and `search`. Programs take much longer without a budget, to make the least memory
    cheaper, and a strategy of the user's may take any time.
    """
    if isinstance(strategy, Auto):
        return (strategy,)
    is_own = type(strategy).__module__.startswith("memplan.strategies.")
    if is_own and isinstance(strategy, OneOf | Search):
        return (Auto(), strategy)
    return (Auto(),)


def schedule_without_budget(problem: Problem, solver: Strategy, stop: Stop) -> Schedule | None:
    """What ``solver`` finds for the ``problem``, which has no budget, as a plan without one does.

    Unless the clock cuts it, which ``stop`` says, it is the schedule of that plan.
    """
    if "start" in options_of(solver):
        problem.space.prepare()  # or compiling would be in the time of the quick strategies
        problem = dataclasses.replace(
            problem, start=quick_schedule(problem, stop.share_for_little(QUICK_SHARE))
        )
    seconds = max(0.1, stop.seconds_left)
    outcome = solver.solve(dataclasses.replace(problem, time_limit=seconds))
    if outcome.cut_by_clock:
        stop.cut()
    schedules = [s for s in (outcome.schedule, problem.start) if s is not None]
    return problem.cheapest(map(problem.memory.executed, schedules))
