"""Why there is no plan within a budget, in words."""

from __future__ import annotations

import math

from memplan.errors import BudgetError
from memplan.planning.job import Job
from memplan.planning.least import Least
from memplan.planning.plan import IN_ORDER, Attempt
from memplan.programs.moments import Floor
from memplan.step.graph import TrainingGraph
from memplan.step.liveness import at_peak
from memplan.step.simulate import simulate
from memplan.strategies.auto import Auto
from memplan.strategies.base import MOST_OVERHEAD, Status
from memplan.util.nbytes import format_nbytes
from memplan.util.words import first_of

# Tensors that are named; of the others only the number is said.
NAMED = 3


def refusal(job: Job, attempt: Attempt, floor: Floor, least: Least, better: str) -> BudgetError:
    """The error for an ``attempt`` without a plan of ``job``.

    ``floor`` is what none of its schedules goes below, ``least`` what memplan reaches. ``better``
    is a sentence on another realisation, or empty.
    """
    graph, max_overhead = job.graph, job.max_overhead
    least_nbytes = least.footprint.total_nbytes
    says_proved = attempt.status is Status.INFEASIBLE
    is_disproved = least_nbytes <= (attempt.budget_nbytes or 0) and not attempt.in_order
    is_proved = says_proved and not is_disproved
    budget_nbytes, held_nbytes = attempt.budget_nbytes, graph.fixed_nbytes + job.beside.nbytes
    kind = IN_ORDER if attempt.in_order else "plan"
    text = "" if budget_nbytes is None else format_nbytes(budget_nbytes)
    if max_overhead == math.inf:
        text += ", whatever its time"
    elif budget_nbytes is None or max_overhead is not None:
        most = "one more forward pass" if max_overhead is None else f"{max_overhead:.1%} more time"
        text += f" at {most} at most"
    if budget_nbytes is None:
        sentences = [f"strategy {attempt.strategy} found no plan{text}"]
    elif is_proved:
        sentences = [f"no {kind} fits in {text} (proved)"]
    else:
        sentences = [f"strategy {attempt.strategy} found no plan within {text}"]
        sentences += ["It says that there is none, which is not so"] if says_proved else []
    if attempt.cut_by_clock and not is_proved:
        sentences.append(
            "The time limit has cut a search: a higher time_limit may find one, or prove more"
        )
    sentences.append(_beside(job))
    if is_proved and budget_nbytes is not None and floor.nbytes + held_nbytes > budget_nbytes:
        sentences.append(_forced(graph, floor, held_nbytes))
    sentences.append(_reached(job, least))
    sentences += _how_sure(least)
    sentences += [better] if better else []
    if budget_nbytes is None:
        # For a budget a plan may take more time than without one.
        advice = "Name a budget, or t" if max_overhead is None else "Raise max_overhead, or t"
        sentences.append(f"{'T' if max_overhead == math.inf else advice}ake strategy='auto'")
    elif least_nbytes <= budget_nbytes:
        sentences.append("strategy='auto' plans within this budget")
    else:
        if held_nbytes >= budget_nbytes:  # a smaller batch has most of it, too
            sentences.append("Raise the budget: what is held whatever the plan takes all of it")
        else:
            sentences.append("Raise the budget, or lower the batch size")
        is_auto = attempt.strategy.partition(":")[0] in ("auto", "Auto")
        if isinstance(least.solver, Auto) and not is_auto:
            sentences.append("At that least memory strategy='auto' plans; others may not")
    return BudgetError(". ".join(sentences), proved=is_proved, lowest_nbytes=least_nbytes)


def _beside(job: Job) -> str:
    """What is held whatever the plan."""
    beside, fixed = job.beside, "Arguments, gradients and states"
    if job.realisation.spells_out_backward:
        fixed = "Arguments, states and gradients that are no activations"
    parts = [
        ("the states of the optimizer", beside.optimizer_nbytes),
        ("the workspace of operators", beside.workspace_nbytes),
    ]
    others = "".join(f"{name} {format_nbytes(n)}, " for name, n in parts if n)
    return (
        f"{fixed} take {format_nbytes(job.graph.fixed_nbytes)}, {others}"
        f"the reserve {format_nbytes(beside.reserve_nbytes)}, whatever the plan"
    )


def _forced(graph: TrainingGraph, floor: Floor, held_nbytes: int) -> str:
    """Which op, by which tensors, no schedule can do without."""
    sized = sorted(floor.tensors, key=lambda a: -graph.tensors[a].nbytes)
    tensors = [(graph.tensors[a].name, graph.tensors[a].nbytes) for a in sized]
    where = "at the end of the step" if floor.op is None else f"while {_op(graph, floor.op)} runs"
    return (
        f"No schedule needs less than {format_nbytes(floor.nbytes + held_nbytes)} with these: "
        f"{where}, {format_nbytes(floor.nbytes)} of activations are there, {_listed(tensors)}"
    )


def _reached(job: Job, least: Least) -> str:
    """What memplan can reach, and what holds the peak then."""
    schedule, footprint = least.schedule, least.footprint
    size = f"{format_nbytes(footprint.total_nbytes)} ({footprint.total_nbytes} bytes)"
    if job.max_overhead is None:
        size += f" at no more than {1 + MOST_OVERHEAD:.0f} times the step's time"
    alive = [(tensor.tensor, tensor.nbytes) for tensor in at_peak(schedule)]
    if not alive:
        return f"The least memory that memplan reaches is {size}"
    op = schedule.ops[simulate(schedule).peak_step]
    holder = "memplan's array takes" if job.realisation.in_one_array else "MXNet allocates"
    return (
        f"The least memory that memplan reaches is {size}: while {_op(schedule.graph, op)} runs, "
        f"{format_nbytes(footprint.peak_nbytes)} are alive, {_listed(alive)}; {holder} "
        f"{format_nbytes(footprint.allocated_nbytes)} for them"
    )


def _how_sure(least: Least) -> list[str]:
    """Whether another process may reach other bytes."""
    if least.is_remembered:
        return [
            "An earlier plan of this process takes these bytes; another process may find a little "
            "more"
        ]
    if least.cut_by_clock:
        what = "An interrupt (Ctrl-C)" if least.was_interrupted else "The time limit"
        return [
            f"{what} has cut the search for it, so that another process may find a little more, or "
            "less; this one knows a plan for these bytes"
        ]
    return []


def _op(graph: TrainingGraph, op: int) -> str:
    return f"{graph.ops[op].name!r} ({graph.ops[op].kind})"


def _listed(tensors: list[tuple[str, int]]) -> str:
    """The first tensors by name and size, the number of the others."""
    sized = [f"{name!r} {format_nbytes(nbytes)}" for name, nbytes in tensors if nbytes]
    return f"with {first_of(sized, NAMED)}"
