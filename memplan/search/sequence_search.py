"""Near-optimal schedules of any graph: annealing, ruin and recreate over sequences of executions.

Rounds (:mod:`memplan.search.rounds`) start from the best sequence so far, or in turns from one of
several good ones (:mod:`memplan.search.elites`), until as many are made as were asked for, or so
much work is done. A search for MXNet's blocks first finds plans by their live bytes, which is far
faster, then replays the allocator.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from memplan.search.aiming import Excess
from memplan.search.chain import compile_chain
from memplan.search.elites import IMPROVED, Elites
from memplan.search.kernels.annealing import BEST_LENGTH, BEST_NBYTES, BEST_SECONDS
from memplan.search.kernels.arrays import Array
from memplan.search.kernels.replay import UNLIMITED
from memplan.search.online import compile_online
from memplan.search.race import race
from memplan.search.round_kinds import (
    ANNEALING_ROUNDS,
    FIRST_RECREATED,
    FIRST_TO_MEND,
    MOST_RECREATED,
    MOST_RECREATED_FIRST,
    SHORT_HOT,
    Round,
    rounds_to_make,
)
from memplan.search.rounds import Rounds, best_sequence
from memplan.search.sequences import Rules
from memplan.search.settling import NEAR, change_to_pack, settle
from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.stop import Stop

# Shares of the budget that live bytes are given in the search for a first plan in blocks, and the
# round that each gets.
LIVE_SHARES = (0.95, 0.85, 0.75, 0.65, 0.55, 0.45)
LIVE_ROUND = Round(False, 0.3, 0.5)
# Without a budget: how far below the least memory so far the next aim is, and what share of the
# time is then left to make that cheaper.
SHRINK = 0.002
CHEAPEN_SHARE = 0.25
# Without a plan in blocks, share of the time for plans by live bytes.
LIVE_TIME_SHARE = 0.3
# Share of the time for a greedy plan, and by how much less memory the next one is to have.
GREEDY_SHARE = 0.3
# Of that, the share for drops where the peak is.
PEAKS_SHARE = 0.5
GREEDY_STEP = 0.9
# Where no greedy plan fits, these shares of the budget give others, and bytes that are over it, in
# budgets, cost so many steps. Set on networks that benchmarks/gaps.py calls tuned.
LARGER, EXCESS_SECONDS = (1.1, 1.2, 1.4), 5.0
# Slices begin a search where the others cost more than so many steps: from recomputed slices moves
# of single ops get less far. Set on Darknet-53 at 30% of its step, and on an LSTM.
FAR_COST = 2.0
# Where what is found costs so much more than the step, in steps, rounds recreate from slices, which
# are the cheapest for what they are over: near the least memory of a recurrent network that ends
# far below what begins with nothing. Set on LSTMs of 1,292 ops at 30 to 40% of the step, and of
# 4,812 at 20% of the peak; in graphs of convolutions, whose plans mostly cost less, one such round
# ended above. HRNet's at 30% costs more, and gains by them.
FAR_OVERHEAD, SLICED_SHARE = 0.3, 0.3
# What comes of that is mostly too large where live bytes are not what counts. So it is done so
# often, each time in fewer of them by half of what is over, at least by this share. Set on the
# first of these LSTMs, at 30% of the step: in 0.995 of the budget it costs 11 points more, which is
# still 6 less than what is mended.
RACES, LEAST_FALL = 4, 0.002
# What is too large where live bytes are not what counts is mended by so many rounds of this kind,
# in which it is packed attempt by attempt, and in blocks and of large graphs of the second, in
# which it is not. They get fewer bytes by half of what is over, but by MOST_FALL of them at most,
# as packed they cost little more than before; where what fits is nearly as cheap there is one. Set
# on SENet-154 at 40% of its step, and on HRNet and a FCN at 30%. Those of the second kind get fewer
# by what is over; where something fits by twice that, and so on, but by at most MENDING_STEP of
# them, twice that, and so on, where that is nearly as cheap: set on an LSTM at 30%. One that finds
# nothing in so few bytes is followed by one in bytes halfway back. Where nothing fits there are
# more of them, which get fewer by all that is over.
MENDING, MENDING_ANNEALED = Round(False, 0.5, 0.1, recreates=True), Round(False, SHORT_HOT, 0.1)
MENDINGS, MENDINGS_OF_NOTHING, MOST_FALL, MENDING_STEP = 4, 8, 0.01, 0.005
# A search without a number of rounds ends after so many that found nothing cheaper.
PATIENCE = 4 * len(ANNEALING_ROUNDS)


def cheapest(search: Rounds, budget_nbytes: int, rounds: int | None) -> None:
    """Look for the cheapest sequence within the budget."""
    is_begun = bool(search.found.figures[BEST_LENGTH])
    if search.match_ranges and not is_begun:
        search.first = _live_start(search, budget_nbytes)
    elif not search.match_ranges:
        _first_round(search, budget_nbytes, is_begun=is_begun)
        if not is_begun and not search.found.figures[BEST_LENGTH]:
            _greedy_start(search, budget_nbytes)
    if not (search.match_ranges or search.is_enough()):
        _sliced_start(search, budget_nbytes, roughly=not is_begun)
    # First something that fits; only then time goes into whether the best does.
    aim = _settled(search, budget_nbytes, budget_nbytes, roughly=not is_begun)
    stalled, seconds = 0, search.found.figures[BEST_SECONDS]
    elites = Elites(search) if _is_recreated(search) else None
    for number, kind in enumerate(rounds_to_make(rounds)):
        if search.is_enough() or search.stop.is_over():
            break
        if elites is None or number == 0:
            aim = _round(search, kind, aim, budget_nbytes)
        else:
            elites.turn(number - 1, aim)
        aim = _settled(search, aim, budget_nbytes)
        cheaper = search.found.figures[BEST_SECONDS] < seconds
        stalled, seconds = 0 if cheaper else stalled + 1, search.found.figures[BEST_SECONDS]
        if rounds is None and stalled == PATIENCE and math.isfinite(search.stop.work_left):
            break


def _first_round(search: Rounds, budget_nbytes: int, *, is_begun: bool) -> None:
    """Of graphs that are not too long, a round from nothing, a short one beside a beginning.

    In a few tenths of a second it mostly finds what costs less than all that greedy eviction does.
    """
    if search.nops > MOST_RECREATED_FIRST:
        return
    if is_begun and settle(search, budget_nbytes):  # so that what fits is not lost
        search.offer(search.first, budget_nbytes)  # it is mended next
        return
    if not search.is_enough():
        is_short = is_begun or search.excess is not None
        search.round(FIRST_TO_MEND if is_short else FIRST_RECREATED, budget_nbytes)


def _round(search: Rounds, kind: Round, aim: int, budget_nbytes: int) -> int:
    """Make a round; the bytes that it aimed at."""
    match_range = search.nbytes(search.start_of(kind, search.found))[1]
    if kind.from_best and search.found.figures[BEST_LENGTH]:
        # It fits: what is near it may have as many live bytes.
        aim = max(aim, int(min(budget_nbytes, search.found.figures[BEST_NBYTES])))
    search.round(kind, aim, match_range=match_range)
    return aim


def _is_recreated(search: Rounds) -> bool:
    return not search.match_ranges and search.nops <= MOST_RECREATED


def _settled(search: Rounds, aim: int, budget_nbytes: int, *, roughly: bool = False) -> int:
    """The live bytes to aim at, where the best was too large for the memory that counts.

    Short rounds mend it, each in fewer bytes than the one before, or in more where one has found
    nothing; what then fits leaves room for a higher aim.
    """
    kind = MENDING if _is_recreated(search) else MENDING_ANNEALED
    tries, nover, nlost, first_aim, reached = 0, 0, 0, aim, aim
    while tries < (MENDINGS_OF_NOTHING if search.fitting is None else MENDINGS):
        tries += 1
        is_found = search.found.figures[BEST_SECONDS] < search.settled.figures[BEST_SECONDS]
        is_worth = search.saved(search.first) > NEAR * search.unit
        is_lost = aim < reached and not is_found and is_worth
        if roughly and (is_lost or search.stop.is_over()):
            # What was over the budget by a rough count may be all that there is.
            search.offer(search.first, budget_nbytes)
            aim, reached, roughly, is_lost = first_aim, first_aim, False, False
        nlost = nlost + 1 if is_lost else 0
        # A round that packs does more than a close look, where no plan is lost without that.
        briefly = kind.recreates and tries == 1 and search.fitting is not None
        over = settle(search, budget_nbytes, roughly=roughly, briefly=briefly)
        if not over and not is_lost:
            return (aim + budget_nbytes + 1) // 2
        # Once something fits, others may, too: how well a schedule is packed is a matter of luck.
        if not over:
            aim = (aim + reached + 1) // 2
        else:
            is_near = search.saved(search.first) <= NEAR * search.unit
            if is_near and tries > 1 and kind.recreates:
                break
            if not is_near:
                nover, reached = nover + 1, aim
            if kind.recreates and tries <= MENDINGS:
                aim -= min((over + 1) // 2, int(MOST_FALL * aim))
            elif is_near:
                aim -= min(over, int(tries * MENDING_STEP * aim))
            else:
                aim -= over if search.fitting is None else nover * over
        if not search.stop.is_over():
            # From what is too large it may find nothing in any aim; what fits is in most.
            begins_fitting = nlost > 1 and search.fitting is not None
            start = best_sequence(search.found) if begins_fitting else search.first
            _mend(search, kind, start, aim, budget_nbytes)
        elif not roughly:
            return aim
    if roughly:  # as above, where the last round has found nothing
        search.offer(search.first, budget_nbytes)
    settle(search, budget_nbytes)
    # What a round that packs ends with is judged as packed, so that the next may have more bytes.
    return (aim + budget_nbytes + 1) // 2 if kind.recreates else aim


def _mend(search: Rounds, kind: Round, start: Array, aim: int, budget_nbytes: int) -> None:
    """A round that looks for what fits; else what it ends with may do so after a closer look."""
    found, settled = search.found.figures, search.settled.figures
    end = search.round(kind, aim, start=start, packed_nbytes=budget_nbytes)
    if kind.recreates and found[BEST_SECONDS] == settled[BEST_SECONDS]:
        search.offer(end, budget_nbytes)


def _greedy_start(search: Rounds, budget_nbytes: int) -> None:
    """Begin with the cheapest that greedy eviction gives, at the peaks or online, if that fits.

    If none does, with the one that is cheapest for the little that it is too large.
    """
    stop = search.stop.share_of_work(GREEDY_SHARE)
    at_peaks = search.evict(budget_nbytes, stop.share_of_work(PEAKS_SHARE))
    made = [at_peaks, *search.evicted_online(budget_nbytes, stop)]
    sequences = [sequence for sequence in made if sequence is not None]
    for sequence in sequences:
        search.offer(sequence, budget_nbytes)
    if search.found.figures[BEST_LENGTH]:
        return
    sliced = search.sliced(budget_nbytes, stop)
    for sequence in sorted(sliced, key=search.seconds):
        search.offer(sequence, budget_nbytes)
        if search.found.figures[BEST_LENGTH] and not settle(search, budget_nbytes, roughly=True):
            return
    larger = (search.evict(int(share * budget_nbytes), stop) for share in LARGER)
    sequences += [sequence for sequence in larger if sequence is not None]

    def cost(sequence: Array) -> float:
        over = search.live_peak(sequence) / max(1, budget_nbytes) - 1.0
        return search.seconds(sequence) / search.unit + EXCESS_SECONDS * over

    greedy = min(sequences, key=cost, default=None)
    if greedy is None or cost(greedy) > FAR_COST:
        sequences += sliced
    search.first = min(sequences, key=cost, default=search.first)


def _sliced_start(search: Rounds, budget_nbytes: int, *, roughly: bool) -> None:
    """Where what is found is expensive, recreate from slices, cheap for what they are over."""
    if search.found.figures[BEST_SECONDS] <= (1.0 + FAR_OVERHEAD) * search.graph.seconds:
        return
    settle(search, budget_nbytes, roughly=roughly)  # so that what fits is not lost
    sliced = search.sliced(budget_nbytes, search.stop.share_of_work(SLICED_SHARE))
    found, settled = search.found.figures, search.settled.figures
    aim, over = budget_nbytes, 0
    for left in reversed(range(RACES if sliced else 0)):
        if search.stop.is_over():
            break
        race(search, sliced, aim, search.stop.share_of_work(SLICED_SHARE))
        if found[BEST_SECONDS] == settled[BEST_SECONDS]:
            break
        over = settle(search, budget_nbytes, briefly=True) if left else 0  # the last is mended
        if not over:
            return
        aim -= max((over + 1) // 2, int(LEAST_FALL * aim))
    if over:  # so is what another one has found, if this one found nothing
        search.offer(search.first, budget_nbytes)


def _live_start(search: Rounds, budget_nbytes: int) -> Array:
    """Of sequences found by live bytes, the best to begin with in blocks."""
    stop = search.stop.share_of_work(LIVE_TIME_SHARE)
    ranked = []
    for done, share in enumerate(LIVE_SHARES):
        until = stop.share_of_work(1.0 / (len(LIVE_SHARES) - done))
        found = search.nothing()
        live_budget = int(share * budget_nbytes)
        greedy = search.evict(live_budget, until.share_of_work(GREEDY_SHARE))
        if greedy is not None:
            found.sequence[: len(greedy)] = greedy
            found.figures[:2] = len(greedy), search.seconds(greedy)
        last = search.round(LIVE_ROUND, live_budget, best=found, stop=until)
        sequence = best_sequence(found)
        if not len(sequence):
            sequence = last
        search.offer(sequence, budget_nbytes)
        over = max(0.0, search.nbytes(sequence)[0] / max(1, budget_nbytes) - 1.0)
        ranked.append((search.seconds(sequence) / search.unit + over, sequence))
        if over == 0.0:
            break
    return min(ranked, key=lambda pair: pair[0])[1]


def lowest(search: Rounds, rounds: int | None) -> None:
    """Look for the sequence with the least memory, then for a cheaper one of that memory."""
    stop = search.stop.share_of_work(1.0 - CHEAPEN_SHARE)
    search.offer(search.unplanned, None)
    search.offer(search.first, None)
    _lowest_greedy(search, search.stop.share_of_work(GREEDY_SHARE))
    if search.match_ranges:
        sequence = _lowest_live(search, rounds, search.stop.share_of_work(LIVE_TIME_SHARE))
        _fewest_blocks(search, sequence, rounds, stop)
    else:
        _lowest_live(search, rounds, stop)
    cheapest(search, int(search.found.figures[BEST_NBYTES]), rounds)


def _lowest_greedy(search: Rounds, stop: Stop) -> None:
    """Greedy plans, each with less memory than the one before."""
    budget = search.live_peak(search.first)
    while budget and not stop.is_over():
        budget = int(GREEDY_STEP * budget)
        greedy = search.evict(budget, stop)
        if greedy is None:
            break
        search.offer(greedy, None)


def _lowest_live(search: Rounds, rounds: int | None, stop: Stop) -> Array:
    """Rounds that lower the peak of live bytes further and further; the lowest."""
    found = search.nothing()
    sequence = best_sequence(search.found)
    found.sequence[: len(sequence)] = sequence
    found.figures[BEST_LENGTH] = len(sequence)
    for done, kind in enumerate(rounds_to_make(rounds)):
        if stop.is_over():
            break
        budget = search.live_peak(best_sequence(found)) - 1
        shrink = SHRINK / (1 + done)
        kind = kind._replace(from_best=True)
        search.round(kind, budget, shrink=shrink, best=found, stop=stop)
        search.offer(best_sequence(found), None)
    return best_sequence(found)


def _fewest_blocks(search: Rounds, lowest_live: Array, rounds: int | None, stop: Stop) -> None:
    """Rounds in which the bytes of blocks count; the first from the lowest peak of live bytes."""
    for done, kind in enumerate(rounds_to_make(rounds)):
        if stop.is_over():
            break
        kind = kind._replace(from_best=kind.from_best and done > 0)
        sequence = search.start_of(kind, search.found) if kind.from_best else lowest_live
        search.fewest(kind, sequence, stop)


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
            lowest(found, rounds)
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
