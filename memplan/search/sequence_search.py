"""Near-optimal schedules of any graph: annealing, ruin and recreate over sequences of executions.

A search finds something to begin with (:mod:`memplan.search.beginnings`). Rounds
(:mod:`memplan.search.rounds`) then start from the best sequence so far, or in turns from one of
several good ones (:mod:`memplan.search.elites`), until as many are made as were asked for, or so
much work is done. Between them what is too large for the memory that counts is mended
(:mod:`memplan.search.mending`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from memplan.search.aiming import Excess
from memplan.search.beginnings import LIVE_ROUND, begin
from memplan.search.chain import compile_chain
from memplan.search.elites import IMPROVED, Elites
from memplan.search.kernels.annealing import BEST_LENGTH, BEST_NBYTES, BEST_SECONDS
from memplan.search.kernels.replay import UNLIMITED
from memplan.search.least_memory import least_memory
from memplan.search.mending import mend
from memplan.search.online import compile_online
from memplan.search.round_kinds import ANNEALING_ROUNDS, Round, rounds_to_make
from memplan.search.rounds import Rounds
from memplan.search.sequences import Rules
from memplan.search.settling import change_to_pack, settle
from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.stop import Stop

# A search without a number of rounds ends after this many that found nothing cheaper.
PATIENCE = 4 * len(ANNEALING_ROUNDS)


def cheapest(search: Rounds, budget_nbytes: int, rounds: int | None) -> None:
    """Look for the cheapest sequence within the budget."""
    is_begun = bool(search.found.figures[BEST_LENGTH])
    begin(search, budget_nbytes)
    # First something that fits; only then time goes into whether the best does.
    aim = mend(search, budget_nbytes, budget_nbytes, roughly=not is_begun)
    stalled, seconds = 0, search.found.figures[BEST_SECONDS]
    elites = Elites(search) if search.is_recreated else None
    for number, kind in enumerate(rounds_to_make(rounds)):
        if search.is_enough() or search.stop.is_over():
            break
        if elites is None or number == 0:
            aim = _round(search, kind, aim, budget_nbytes)
        else:
            elites.turn(number - 1, aim)
        aim = mend(search, aim, budget_nbytes)
        cheaper = search.found.figures[BEST_SECONDS] < seconds
        stalled, seconds = 0 if cheaper else stalled + 1, search.found.figures[BEST_SECONDS]
        if rounds is None and stalled == PATIENCE and math.isfinite(search.stop.work_left):
            break


def _round(search: Rounds, kind: Round, aim: int, budget_nbytes: int) -> int:
    """Make a round; the bytes that it aimed at."""
    match_range = search.nbytes(search.start_of(kind, search.found))[1]
    if kind.from_best and search.found.figures[BEST_LENGTH]:
        # It fits: what is near it may have as many live bytes.
        aim = max(aim, int(min(budget_nbytes, search.found.figures[BEST_NBYTES])))
    search.round(kind, aim, match_range=match_range)
    return aim


@functools.cache
def compile_search() -> None:
    """Compile, or load what was compiled before: once in a process, and not in anybody's time."""
    op = Op("warm", "op", (), (0,), 1.0)
    graph = TrainingGraph((op,), (Tensor("warm", 4, 1),), (0,), 1)
    compile_chain()
    rules = Rules(recompute_backward=False, reorder=True, match_ranges=(1,))
    rounds = Rounds(graph, rules, seed=0, stop=Stop.after(1e6))
    rounds.round(LIVE_ROUND, 0)  # first, as it takes longest: compile_others is done by then
    rounds.round(IMPROVED, 0)
    cheapest(rounds, 0, 1)
    rounds.offer(rounds.unplanned, None)
    change_to_pack(rounds, 0)
    compile_online()


def search(
    graph: TrainingGraph,
    budget_nbytes: int | None,
    *,
    rules: Rules,
    starts: Sequence[Schedule],
    seed: int,
    stop: Stop,
    rounds: int | None,
    enough_seconds: float = 0.0,
    excess: Excess | None = None,
) -> Schedule | None:
    """The best schedule found in this many rounds; None if none fits the budget.

    With ``excess`` it fits only if that is 0: by how many bytes a schedule is over a budget.
    The same seed gives the same schedule on any machine, unless the clock has cut the search,
    which ``stop`` says. Without ``rounds`` it ends where the work of the stop is done, or where a
    cycle of rounds finds nothing cheaper; a stop without a bound on its work is always reached by
    the clock. A schedule that takes no more than ``enough_seconds``, or an interrupt
    (KeyboardInterrupt), ends it early.
    """
    if not any(tensor.nbytes for tensor in graph.tensors):
        unplanned = Schedule.unplanned(graph)
        return unplanned if budget_nbytes is None or budget_nbytes >= 0 else None
    if budget_nbytes is not None:
        budget_nbytes = max(-1, min(budget_nbytes, UNLIMITED))
    excess = None if budget_nbytes is None else excess
    found = Rounds(graph, rules, seed=seed, stop=stop, enough_seconds=enough_seconds, excess=excess)
    try:
        for start in starts:
            found.start_from(start, budget_nbytes)
        if budget_nbytes is None:
            least_memory(found, rounds)
            cheapest(found, int(found.found.figures[BEST_NBYTES]), rounds)
        else:
            cheapest(found, budget_nbytes, rounds)
    except KeyboardInterrupt:
        before = found.first
        settle(found, budget_nbytes or 0)
        if not found.found.figures[BEST_LENGTH]:
            # What was over by a rough count, and was to be mended, may be all that there is.
            found.offer(before, budget_nbytes)
            settle(found, budget_nbytes or 0)
            if not found.found.figures[BEST_LENGTH]:
                raise
    return found.best()
