"""What a mirror plan, or the lack of one, says of other realisations: that they cost less."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, NamedTuple

from memplan.errors import MemplanError
from memplan.planning.apart import apart
from memplan.planning.attempt import try_strategy
from memplan.planning.job import STOCK, Job
from memplan.planning.plan import Attempt
from memplan.planning.realisation import WHOLE_STEPS, Symbol, taken_from_cudnn
from memplan.strategies.evict import Evict
from memplan.util.interrupts import Interrupt
from memplan.util.remember import forget

# The other plan is a quick one: it may take this part of the time limit, and gives up after as many
# attempts in a row that find nothing cheaper. So its overhead is more than that of a long search.
TIME_SHARE = 0.1
PATIENCE = 50

# A plan is expensive that takes this much more time, and this many times that of the other.
EXPENSIVE = 0.02
TIMES = 2.0


class Alternative(NamedTuple):
    """Sentences on another kind of plan, or none, and what it took to look for one."""

    text: str
    seconds: float


def alternative(
    job: Job, attempt: Attempt, net: Symbol, interrupt: Interrupt, /, **options: Any
) -> Alternative:
    """Sentences with the figures, where another kind of plan costs far less, or does on a GPU.

    ``options`` are those of the ``job`` that made ``attempt``. After an ``interrupt`` no other plan
    is searched for.
    """
    other, seconds = "", 0.0
    if _is_worth_a_search(job, attempt, options) and not interrupt.has_come:
        begin = time.monotonic()
        other = _other_kind(job, attempt, net, options)
        seconds = time.monotonic() - begin
    sentences = (other, _without_cudnn(job, attempt))
    return Alternative(". ".join(filter(None, sentences)), seconds)


def _without_cudnn(job: Job, attempt: Attempt) -> str:
    """On a GPU mirrored BatchNorms run by MXNet's own kernel, the time of which nobody measures."""
    count = taken_from_cudnn(attempt.plan.symbol) if attempt.plan and job.on_gpu else 0
    if not count:
        return ""
    return (
        f"It takes more time on a GPU: the BatchNorms that are recomputed ({count}) run by MXNet's "
        f"own kernel, and what is promised is the time of cuDNN's. Explicit and packed plans stay "
        f"with cuDNN"
    )


def _is_worth_a_search(job: Job, attempt: Attempt, options: dict[str, Any]) -> bool:
    """May a quick plan of another kind be cheaper by so much that it is worth its time?"""
    measures = options["costs"] is None and job.on_gpu
    if job.realisation.name != STOCK or attempt.budget_nbytes is None or measures:
        return False
    return attempt.plan is None or attempt.plan.overhead > EXPENSIVE


def _other_kind(job: Job, attempt: Attempt, net: Symbol, options: dict[str, Any]) -> str:
    budget_nbytes, plan = attempt.budget_nbytes, attempt.plan
    try:
        other_job = _whole_steps(job, net, options | {"time_limit": TIME_SHARE * job.time_limit})
        with apart(other_job) as do:
            # A bound, of which nothing is said, would take longer than the plan.
            quick = Evict(patience=PATIENCE)
            other = do(try_strategy, quick, budget_nbytes, proves=False).plan
        forget(other_job.graph)
    except (MemplanError, KeyboardInterrupt):  # nothing else can train it, or nobody wants to wait
        return ""
    if other is None or (plan is not None and TIMES * other.overhead > plan.overhead):
        return ""
    return (
        f"A {other.realisation} plan fits at {other.overhead:+.1%} time or less: train with "
        f"memplan.mxnet.Module or memplan.mxnet.gluon.TrainStep, which plan so by themselves"
    )


def _whole_steps(stock: Job, net: Symbol, options: dict[str, Any]) -> Job:
    """The job of the first realisation that trains ``net``, that of ``stock``, in whole steps.

    As "auto" chooses, but without its line in the log: the caller trains by a mirror plan.
    """
    *others, last = WHOLE_STEPS
    for name in others:
        with suppress(MemplanError):
            return Job.prepare(net, stock, **options | {"realisation": name})
    return Job.prepare(net, stock, **options | {"realisation": last})
