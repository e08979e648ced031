"""From a network and a budget to a Plan: trace, costs, strategy, check, realise."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from memplan.errors import ArgumentError
from memplan.planning.alternative import Alternative, alternative
from memplan.planning.apart import apart
from memplan.planning.attempt import refused
from memplan.planning.cache import Cache
from memplan.planning.comparison import Comparison
from memplan.planning.job import STOCK, Job
from memplan.planning.known import remember
from memplan.planning.larger_budgets import with_shared_bounds
from memplan.planning.plan import Attempt, Plan
from memplan.planning.realisation import Context, Optimizer, Shape, Symbol, step_mib, usable
from memplan.planning.tasks import Task, run
from memplan.planning.told_apart import no_shapes_for_options
from memplan.step.costs import Costs
from memplan.strategies import Strategy, configured, create
from memplan.strategies.memonger import Memonger
from memplan.util.arguments import several_of, with_named_options
from memplan.util.interrupts import Interrupt, noticing
from memplan.util.nbytes import parse_budget
from memplan.util.numbers import plain, shown

if TYPE_CHECKING:
    from memplan.mxnet.trace.arguments import GradReq

Budget = int | float | str | None


@with_named_options
@no_shapes_for_options
def search_plan(
    net: Symbol,
    ntrial: int | None = None,
    type_dict: Mapping[str, Any] | None = None,
    *,
    strategy: str | Strategy = "auto",
    budget: Budget = None,
    **options: Any,
) -> Symbol:
    """``net`` with attributes set so that any training script trains it within ``budget``.

    Takes what :func:`plan` takes, and memonger's call as it is: with ``ntrial`` the strategy is
    memonger's search, with its own number of thresholds at least: memonger narrows its few
    thresholds around good ones; as few that are evenly spaced may miss them all. Raises what
    :func:`plan` raises, and ArgumentError for another realisation than "mirror", of whose plans no
    Symbol can be trained by any script.
    """
    realisation = options.get("realisation", STOCK)
    if usable(realisation) != STOCK:
        raise ArgumentError(
            f"search_plan gives a Symbol that any training script trains, and only mirror plans "
            f"have one: with realisation={realisation!r} it would be of the whole step, backward "
            f"ops included, which MXNet cannot differentiate. Leave realisation out; or make the "
            f"plan by memplan.plan, and train net by memplan.mxnet.Module(net, plan=plan) or "
            f"TrainExecutor, a Gluon block by planned or TrainStep, which plan themselves"
        )
    if ntrial is not None:
        _check_ntrial(ntrial, strategy)
        asked = Memonger(ntrial=ntrial)  # a number that cannot be used is refused
        strategy = Memonger(ntrial=max(asked.ntrial, Memonger.ntrial))
    return plan(net, strategy=strategy, budget=budget, type_dict=type_dict, **options).symbol


def _check_ntrial(ntrial: Any, strategy: Any) -> None:
    """ArgumentError where it is rather a budget, and beside another strategy."""
    number = plain(ntrial)
    if isinstance(number, str) or (isinstance(number, float) and number <= 1.0):
        raise ArgumentError(
            f"ntrial must be an integer, got {shown(ntrial)}; if that is the budget, give it "
            f"by its name: budget={shown(ntrial)}"
        )
    name = strategy.partition(":")[0].lower() if isinstance(strategy, str) else ""
    is_memonger = isinstance(strategy, Memonger) or name == "memonger"
    if not is_memonger and strategy != "auto":  # which is that of no strategy
        raise ArgumentError(
            f"ntrial={ntrial} asks for memonger's search, and strategy={shown(strategy)} for "
            f"another; leave one of them out"
        )


def get_cost(net: Symbol, type_dict: Mapping[str, Any] | None = None, **shapes: Shape) -> int:
    """Whole MB that MXNet allocates for the activations of a training step, as memonger's.

    A planned ``net`` costs what it trains in, for MXNet itself is asked, which reads the attributes
    of the network. It is bound as memonger does, with a gradient for every argument, but needs no
    GPU. An MB has 2^20 bytes here, and MXNet counts 4 for every element, whatever its dtype: true
    bytes are in ``plan(...).allocated_nbytes``. Arguments, their gradients and states come on top.

    Raises ArgumentError for arguments that cannot be used, TraceError for a network that MXNet
    cannot train, DependencyError without MXNet.
    """
    return step_mib(net, shapes, type_dict)


@with_named_options
@no_shapes_for_options
def plan(
    net: Symbol,
    *,
    strategy: str | Strategy = "auto",
    budget: Budget = None,
    realisation: str = "mirror",
    ctx: Context | None = None,
    costs: Costs | None = None,
    time_limit: float = 60,
    type_dict: Mapping[str, Any] | None = None,
    reserve: int | str = 0,
    optimizer: Optimizer | None = None,
    grad_req: GradReq = None,
    max_overhead: float | None = None,
    gap: float | None = None,
    seed: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    **shapes: Shape,
) -> Plan:
    """The plan that ``strategy`` finds for training ``net`` within ``budget``.

    ``shapes`` are the input shapes: ``data=(32, 3, 224, 224)``. The other arguments:

    - ``strategy`` is the name of a strategy, with options if any ("auto:effort=4"), or one made by
      :func:`memplan.strategies.create`.
    - ``budget`` is for the whole step on the device: bytes, a string such as "4GiB", or a fraction
      of the unplanned total. None means the least memory at no more than one extra forward pass.
    - ``realisation`` says how MXNet is made to run the plan. "mirror": by attributes on the
      network. "explicit": by a Symbol of the whole step. "packed": by calls of its ops on parts of
      an array. "updating": packed, and the parameters are updated within the step. "auto": packed
      or, where that refuses the network, explicit. :class:`memplan.mxnet.Module` and ``TrainStep``
      train by all but "mirror", any script by that.
    - ``ctx`` is where the network will train.
    - ``costs`` are the seconds of ops (:func:`memplan.step.costs.with_costs`). None means measured
      on ``ctx`` if that is a GPU, else a roofline of the CPU if ``ctx`` is one, else of a V100.
    - ``time_limit`` is the most seconds that tracing and the strategy may take together; measuring
      costs is not counted, nor starting the process that searches and loading the search, some
      seconds, nor the search for the least total, which a refusal names, and which gives the
      plan where all else has found none: it takes as long again at most, nor that for
      ``plan.alternative``, which takes a tenth at most beside tracing: by both, and by loading the
      search, ``plan.planning_seconds`` may exceed it. A search ends after so much work, so that
      equal calls give equal plans, and a plan says if ``time_limit`` cut it.
    - ``type_dict`` and ``grad_req`` are those of MXNet's ``bind``. None: as Module does, that is,
      float32, and a gradient for every argument but the named inputs and the labels.
    - ``optimizer`` (one of MXNet's, or its name) is what updates the parameters: its states are
      counted. ``reserve`` are bytes, or a string, to leave for what memplan cannot know.
    - ``max_overhead`` is the most recomputation to accept, as a share of the step's time. None:
      three times that time with a budget.
    - ``gap`` ends the search when a plan is proved to be this near to the cheapest, as a share of
      the step's time (None: the strategy's own, 0.002); ``seed`` chooses another search. Both are
      for strategies that have these options.
    - ``cache`` is a folder in which plans are kept by all that they depend on; one found there is
      checked and measured as a new one.

    Where mirroring cannot keep the budget, or costs twice as much as a quick packed plan, the error
    or the plan (``plan.alternative``) says so; the plan, too, where BatchNorms leave cuDNN for it.

    The search runs in a process of its own, which waits a minute for the next plan, then ends; a
    strategy that your script itself defines runs in this one. An interrupt (Ctrl-C) ends the search
    with the best plan so far; without any, it is raised.

    Raises ArgumentError for arguments that cannot be used, TraceError for a network that cannot
    be trained, CostError for costs that do not fit it, BudgetError where no plan is within the
    budget, PlanningError where the process of the search fails, DependencyError without MXNet.
    """
    options: dict[str, Any] = {
        "realisation": realisation,
        "ctx": ctx,
        "costs": costs,
        "time_limit": time_limit,
        "type_dict": type_dict,
        "reserve": reserve,
        "optimizer": optimizer,
        "grad_req": grad_req,
        "max_overhead": max_overhead,
        **shapes,
    }
    with noticing() as interrupt:
        strategy = configured(strategy, realisation=usable(realisation), gap=gap, seed=seed)
        return _plan(net, strategy, budget, cache, options, interrupt)


def _plan(
    net: Symbol,
    strategy: str | Strategy,
    budget: Budget,
    cache: str | os.PathLike[str] | None,
    options: Mapping[str, Any],
    interrupt: Interrupt,
) -> Plan:
    """The plan; ``options`` are the arguments of :meth:`Job.prepare`."""
    begin = time.monotonic()
    folder = None if cache is None else Cache.open(cache)
    job = Job.prepare(net, **options)
    budget_nbytes = parse_budget(budget, job.unplanned.total_nbytes)
    profiled = options["costs"] is None and job.on_gpu
    # The process that searches starts on nobody's time: of short limits it would leave nothing.
    spent = 0.0 if profiled else time.monotonic() - begin
    attempt: Attempt | None = None
    better = Alternative("", 0.0)
    try:
        with apart(job) as do:
            task = Task(job, strategy, budget_nbytes, spent=spent, do=do)
            [attempt] = run([task], interrupt=interrupt, cache=folder)
            assert attempt is not None  # or run would have raised the interrupt
            if attempt.plan is None:
                better = alternative(job, attempt, net, interrupt, **options)
                if interrupt.has_come:  # the least memory, which a refusal names, is more search
                    raise KeyboardInterrupt
                raise refused(do, attempt, task.solver, better.text)
            remember(attempt.plan.schedule, attempt.plan.allocated_nbytes)
        # Here the process waits that has made the plan; another one takes a second to start.
        better = alternative(job, attempt, net, interrupt, **options)
    except KeyboardInterrupt:
        if attempt is None or attempt.plan is None:
            raise
        # Without a search, as one has come; a second one is not to lose the plan either.
        with suppress(KeyboardInterrupt):
            better = alternative(job, attempt, net, interrupt, **options)
    seconds = attempt.plan.planning_seconds + better.seconds
    return dataclasses.replace(attempt.plan, alternative=better.text, planning_seconds=seconds)


def _listed(values: Any, name: str) -> list[Any]:
    """These values, or the one that it is; ArgumentError for none, as the argument ``name``."""
    several = several_of(values)
    if several == []:
        raise ArgumentError(f"{name}: none is named")
    return [values] if several is None else several


@with_named_options
@no_shapes_for_options
def compare(
    net: Symbol,
    *,
    strategies: str | Strategy | Iterable[str | Strategy] = ("memonger", "chen_greedy", "auto"),
    budgets: Budget | Iterable[Budget] = (0.75, 0.5, None),
    gap: float | None = None,
    seed: int | None = None,
    executor: Executor | None = None,
    cache: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Comparison:
    """Plans of every strategy at every budget; print it, or take its ``to_csv()``.

    ``options`` are the other arguments of :func:`plan`; ``time_limit`` is that of one plan, and
    ``gap`` and ``seed`` go to the strategies that have these options. A budget that a strategy
    cannot meet is a row, not an error, and so is one for which it raises, unless all do. What is
    proved for one budget counts for smaller ones as well. ``executor`` (a process pool, Dask's
    ``client.get_executor()``) makes rows at the same time; ``cache`` is a folder for finished
    ones. After an interrupt the rows made so far are returned. ArgumentError, before the first
    search, for a strategy that there is not, what is no budget, and none of either.
    """
    solvers, amounts = _listed(strategies, "strategies"), _listed(budgets, "budgets")
    folder = None if cache is None else Cache.open(cache)
    with noticing() as interrupt:
        job = Job.prepare(net, **options)
        limits = [parse_budget(budget, job.unplanned.total_nbytes) for budget in amounts]
        for strategy in solvers:  # an unknown name is said before the first long search
            create(strategy, realisation=job.realisation.name)
        solvers = [configured(strategy, gap=gap, seed=seed) for strategy in solvers]
        tasks = [Task(job, strategy, limit) for limit in limits for strategy in solvers]
        rows = run(tasks, interrupt=interrupt, executor=executor, cache=folder, go_on=True)
    kinds = [place for _ in limits for place in range(len(solvers))]
    attempts = [(kind, row) for kind, row in zip(kinds, rows, strict=True) if row is not None]
    return Comparison(tuple(with_shared_bounds(attempts)))
