"""What the user gets: a plan, its figures beside those of the unplanned step, its summary."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan.memory.packing import Packing
from memplan.planning.realisation import symbol_of
from memplan.step.schedule import Schedule
from memplan.strategies.base import Status
from memplan.util.nbytes import format_nbytes
from memplan.util.tables import text_table

if TYPE_CHECKING:
    from memplan.planning.frontier import Plans
    from memplan.views.pictures import Figure


# Of a workspace: why it is none.
NOT_COUNTED = "not counted"

# What takes the fixed bytes. Where a step spells out the backward pass its gradients are
# activations: but for those that are added up, or sparse, there are no others.
FIXED, FIXED_WITHOUT_GRADIENTS = "arguments and gradients", "arguments and other gradients"

GRADIENTS_AMONG_ACTIVATIONS = (
    "Gradients of the planned step count among activations, but for added and sparse ones."
)

# What is said of a plan whose search ended early.
CUT = ", cut by the clock or Ctrl-C"
LEAST_CUT = "The search for the least memory was cut: in more time less may be found."

# What is meant by plans of which something is proved "in order", in few words.
IN_ORDER = "plan that keeps the order of the ops in every stage"

# Parts of a footprint that are only shown where there is some of them.
SELDOM = ("states of the optimizer", "workspace of operators")


@dataclass(frozen=True)
class Footprint:
    """Bytes of a training step on the device, and its seconds.

    ``peak_nbytes``: the most activation bytes alive at any time. ``allocated_nbytes``: what MXNet
    allocates for activations, or memplan's array takes in packed plans. ``fixed_nbytes``:
    arguments, auxiliary states, and the gradients that are no activations: all of them in mirror
    plans. ``reserve_nbytes``: the room that the user asked to leave. ``match_range``: the
    NNVM_EXEC_MATCH_RANGE with which MXNet allocates activations. ``optimizer_nbytes``: the states
    of the optimizer, where it was named. ``workspace_nbytes``: what operators take while they run,
    and copies that executors keep; ``workspace_source`` says how that is known, or that it is not.
    """

    peak_nbytes: int
    allocated_nbytes: int
    fixed_nbytes: int
    reserve_nbytes: int
    seconds: float
    match_range: int
    optimizer_nbytes: int = 0
    workspace_nbytes: int = 0
    workspace_source: str = NOT_COUNTED

    @property
    def total_nbytes(self) -> int:
        """Everything that the step holds on the device, the reserve included."""
        return self.allocated_nbytes + self.beside_nbytes

    @property
    def beside_nbytes(self) -> int:
        """All but activations."""
        return sum(self.beside_activations.values())

    @property
    def beside_activations(self) -> dict[str, int]:
        """The bytes of all but activations by what they are for, in words."""
        return {
            FIXED: self.fixed_nbytes,
            "states of the optimizer": self.optimizer_nbytes,
            "workspace of operators": self.workspace_nbytes,
            "reserve": self.reserve_nbytes,
        }

    @property
    def parts(self) -> dict[str, int]:
        """The bytes by what they are for, in words."""
        return {
            "activations alive, peak": self.peak_nbytes,
            "activations, as allocated": self.allocated_nbytes,
            **self.beside_activations,
            "whole step": self.total_nbytes,
        }


@dataclass(frozen=True)
class Plan:
    """A network that trains within a budget.

    ``lower_bound_overhead`` is proven: no plan of this realisation within the budget has less
    ``overhead`` (None: nothing was proved), among those that run backward ops once unless the
    strategy may repeat them; with ``bound_in_order``, among those that keep the order in which ops
    first run, and up to each of these runs recompute in this order, too, an op once at most. With
    ``cut_by_clock`` the time limit, or an interrupt (Ctrl-C), ended a search: in more time, or on
    another machine, the plan may be another; else equal calls give equal plans. Of one that is
    proved to be the cheapest in any order it is never said: more time finds one of equal overhead,
    which may be another one.
    ``trace`` is the traced network, ``packing`` where tensors lie in a packed plan. ``alternative``
    says which other kind of plan would cost far less, if that is known, or costs less on a GPU,
    where mirrored BatchNorms run without cuDNN.
    ``unplanned`` holds the same figures for the step without a plan.

    Plans are equal if their schedules and figures are, however long they took: Symbols cannot be
    compared.
    """

    status: Status
    schedule: Schedule = field(repr=False)
    strategy: str
    costs: str
    realisation: str
    trace: Any = field(repr=False, compare=False)
    budget_nbytes: int | None
    footprint: Footprint
    unplanned: Footprint
    lower_bound_overhead: float | None
    planning_seconds: float = field(compare=False)
    bound_in_order: bool = False
    alternative: str = field(default="", compare=False)
    cut_by_clock: bool = False
    packing: Packing | None = field(default=None, repr=False)

    @cached_property
    def symbol(self) -> Any:
        """The network (an ``mx.sym.Symbol``) with MXNet's attributes set, for any training script.

        Of an explicit, packed or updating plan, the training step as MXNet would be given it,
        backward ops included, to look at: no script can train it. By such a plan the network itself
        is trained: ``memplan.mxnet.Module(net, plan=plan)``. It is made when it is first asked for:
        who trains by memplan never does.
        """
        return symbol_of(self.trace, self.schedule)

    @property
    def peak_nbytes(self) -> int:
        """Simulated peak of the activations alive."""
        return self.footprint.peak_nbytes

    @property
    def allocated_nbytes(self) -> int:
        """What MXNet allocates for activations, or memplan's array takes in packed plans."""
        return self.footprint.allocated_nbytes

    @property
    def fixed_nbytes(self) -> int:
        """Arguments, auxiliary states, and gradients that are no activations."""
        return self.footprint.fixed_nbytes

    @property
    def total_nbytes(self) -> int:
        """fixed + optimizer + allocated + workspace + reserve: what must fit the budget."""
        return self.footprint.total_nbytes

    @property
    def optimizer_nbytes(self) -> int:
        """The states of the optimizer that was named."""
        return self.footprint.optimizer_nbytes

    @property
    def workspace_nbytes(self) -> int:
        """What operators take beside activations.

        ``footprint.workspace_source`` says how that is known: it is measured where ``costs`` are
        of ``memplan.profile`` for this realisation, packed or on a GPU; else it is estimated where
        ``ctx`` is a CPU.
        """
        return self.footprint.workspace_nbytes

    @property
    def match_range(self) -> int:
        """The NNVM_EXEC_MATCH_RANGE to bind with: chosen for explicit plans, else this process's.

        :class:`memplan.mxnet.Module` and :class:`memplan.mxnet.train.train_step.TrainStep` see to
        it.
        """
        return self.footprint.match_range

    @property
    def overhead(self) -> float:
        """Extra seconds of recomputation / seconds of the unplanned step."""
        return self.schedule.overhead

    @property
    def lower_bound(self) -> float | None:
        """``lower_bound_overhead`` by its first name, which programs outside memplan still use."""
        return self.lower_bound_overhead

    def plot(self, picture: str = "memory", path: str | PathLike[str] | None = None) -> Figure:
        """A picture of this plan as a matplotlib Figure, written to ``path`` if that is given.

        "memory": bytes over the steps, and what is alive at the peak. "matrix": the schedule as
        Checkmate's R and S. "network": what is kept and what is recomputed. Raises
        DependencyError without matplotlib (the extra ``plot``).
        """
        from memplan.views import pictures

        return pictures.plot(self, picture, path)

    def report_html(self, *, others: Plans | None = None, title: str | None = None) -> str:
        """This plan as one HTML page: see :func:`memplan.views.report.report_html`."""
        from memplan.views import report

        return report.report_html(self, others=others, title=title)

    def save_report(
        self, path: str | PathLike[str], *, others: Plans | None = None, title: str | None = None
    ) -> Path:
        """Write :meth:`report_html` to ``path``, and give that back."""
        from memplan.views import report

        return report.save_report(self, path, others=others, title=title)

    def explain(self, name: str | None = None) -> str:
        """Why the tensor or op ``name`` is kept or recomputed; None: what holds the memory.

        Raises ArgumentError where the network has no such name.
        """
        from memplan.views import explain

        if name is None:
            return explain.memory(self)
        return explain.why(self.schedule, name, self.trace.shapes)

    def _repr_html_(self) -> str:
        from memplan.views import notebook

        return notebook.notebook_html(self)

    def __str__(self) -> str:
        limit = self.budget_nbytes
        verb = "Fits" if limit is None or self.total_nbytes <= limit else "Does not fit"
        budget = "" if limit is None else f" in {format_nbytes(limit)}"
        lines = [
            f"{verb}{budget}: {format_nbytes(self.total_nbytes)} at {self.overhead:+.1%} time "
            f"(unplanned: {format_nbytes(self.unplanned.total_nbytes)})",
            *([LEAST_CUT] if limit is None and self.cut_by_clock else []),
            "",
        ]
        rows = [
            (label, format_nbytes(before), format_nbytes(after))
            for label, before, after in figures(self)
            if before or after or label not in SELDOM
        ]
        lines += text_table([("", "unplanned", "planned"), *rows], widths=(28, 12, 12))
        recomputed, is_whole = len(self.schedule.recomputed), self.trace.form.spells_out_backward
        lines += [
            "",
            f"{recomputed} of {self.schedule.graph.nforward} forward ops are recomputed"
            f"{f'; {self._proof()}' if recomputed else ''}.",
            *([GRADIENTS_AMONG_ACTIVATIONS] if is_whole else []),
            *(["Parameters are updated within the step."] if self.trace.form.updates else []),
            f"{self.realisation}, strategy {self.strategy}, costs {self.costs}, "
            f"planned in {self.planning_seconds:.1f} s{CUT * self.cut_by_clock}",
        ]
        if self.workspace_nbytes:
            lines.append(f"workspace of operators: {self.footprint.workspace_source}")
        if self.alternative:
            lines.append(f"{self.alternative}.")
        return "\n".join(lines)

    def _proof(self) -> str:
        kind = IN_ORDER if self.bound_in_order else "plan"
        if self.status is Status.OPTIMAL:
            return f"no cheaper {kind} exists"
        if self.lower_bound_overhead:
            bound = f"{self.lower_bound_overhead:+.1%}"
            return f"no {kind} within the budget costs less than {bound} (proved)"
        return "a cheaper plan may exist"


def in_words(part: str, plan: Plan) -> str:
    """What stands for this part of the footprint of ``plan``."""
    if part == FIXED and plan.trace.form.spells_out_backward:
        return FIXED_WITHOUT_GRADIENTS
    return part


def figures(plan: Plan) -> list[tuple[str, int, int]]:
    """What the bytes of the step are for, in words, and how many: without the plan, and by it."""
    planned = plan.footprint.parts
    return [(in_words(k, plan), n, planned[k]) for k, n in plan.unplanned.parts.items()]


@dataclass(frozen=True)
class Attempt:
    """What a strategy made of a budget; ``plan`` is None where it found none.

    With ``in_order`` what the status says holds among the schedules of :class:`Plan`'s
    ``bound_in_order``. ``error`` is what the strategy raised, if it did; ``cut_by_clock`` as there.
    """

    strategy: str
    budget_nbytes: int | None
    status: Status
    plan: Plan | None
    seconds: float
    in_order: bool = False
    error: str | None = None
    cut_by_clock: bool = False
