"""Is a plan's promise kept on this device? A few steps by it, and as many without, side by side."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mxnet as mx
import numpy as np

from memplan.errors import ArgumentError, CostError
from memplan.mxnet.realise.optimizer_states import optimizer_named
from memplan.mxnet.trace.device import device_name
from memplan.mxnet.train.trial import Trial, run_apart
from memplan.mxnet.train.updates import refusal
from memplan.planning.plan import Footprint, Plan
from memplan.planning.realisation import request_of, trace_again
from memplan.step.schedule import Schedule
from memplan.util.nbytes import format_nbytes
from memplan.util.numbers import shown
from memplan.util.tables import text_table
from memplan.util.words import first_of

# What a process may take above the promise: a share of it, and the 6 MB of MXNet's code and of
# calls that promises of small networks leave out at most, with how far estimates of these are off.
TOLERANCE = 0.05
TOLERANCE_NBYTES = 10_000_000

_NOT_REPEATABLE = (
    "Two runs of MXNet's own, without a plan, differ from one another as well, so that this says "
    "nothing of the plan. Check again with MXNET_ENFORCE_DETERMINISM=1 and "
    "MXNET_CUDNN_AUTOTUNE_DEFAULT=0 on a GPU, with which cuDNN computes the same twice, or with "
    "OMP_NUM_THREADS=1 on a CPU."
)

_WHERE_BITS_DIFFER = (
    'The part "Bits" of memplan\'s docs/limits.md lists where last bits differ, and where MXNet '
    "itself computes something wrong. What is not there is a fault of memplan: please report it."
)

_NOT_COMPARED = (
    "The step without a plan did not run, so that nothing is said of results and of measured "
    "overhead: {}. Check with a smaller batch to compare them."
)

# What is compared, by the first word of its name.
KINDS = {"output": "outputs", "gradient": "gradients", "parameter": "parameters", "state": "states"}


@dataclass(frozen=True)
class Check:
    """What a plan promised beside what was measured on ``device``.

    ``planned`` and ``unplanned`` are the two trials. Where the step without a plan did not run, as
    what needs a plan may not fit without, ``unplanned`` is None and ``unplanned_error`` says why:
    then nothing is said of results and seconds. ``unlike`` are the names of what differs after
    the last step, by kind (:data:`KINDS`); equal is bit for bit, from equal numbers and seeds.
    ``largest_difference`` is in parts of the largest number of the array that differs so, and
    infinite where one of the two has no numbers (:func:`largest_difference`). ``is_repeatable``:
    two runs without a plan leave the same bits, so that ``unlike`` means something. That is asked
    only where something is unlike.
    """

    plan: Plan
    device: str
    planned: Trial
    unplanned: Trial | None
    unlike: dict[str, list[str]]
    largest_difference: float = 0.0
    is_repeatable: bool = True
    unplanned_error: str | None = None

    @property
    def measured_overhead(self) -> float | None:
        """Extra seconds of a step / seconds of the unplanned step; None where that did not run."""
        if self.unplanned is None:
            return None
        return self.planned.seconds / self.unplanned.seconds - 1.0

    @property
    def is_equal(self) -> bool | None:
        """Are losses, gradients, parameters and states those of the unplanned step?

        None where that did not run.
        """
        return None if self.unplanned is None else not any(self.unlike.values())

    @property
    def is_within(self) -> bool:
        """Did the process grow by what the plan promises, or less, but for the tolerance?"""
        promised_nbytes = promised_growth(self.plan.footprint)
        return self.planned.grown_nbytes <= promised_nbytes * (1 + TOLERANCE) + TOLERANCE_NBYTES

    def __str__(self) -> str:
        plan, overhead = self.plan, self.measured_overhead
        measured = "" if overhead is None else f", {overhead:+.1%} measured"
        lines = [f"On {self.device}:", "", *self._table()]
        lines += [
            "",
            f"Memory: {'within' if self.is_within else 'ABOVE'} the promise "
            f"(and {TOLERANCE:.0%} + {format_nbytes(TOLERANCE_NBYTES)}); "
            f"workspace of operators: {plan.footprint.workspace_source}.",
            f"Time: {plan.overhead:+.1%} promised by costs {plan.costs}{measured}.",
        ]
        if self.unplanned is None:
            lines.append(_NOT_COMPARED.format(self.unplanned_error))
        for kind, names in self.unlike.items():
            result = "equal, bit for bit" if not names else f"DIFFER: {first_of(names, 3)}"
            lines.append(f"{kind.capitalize()}: {result}.")
        if self.is_equal is False:
            lines.append(_largest(self.largest_difference))
            lines.append(_WHERE_BITS_DIFFER if self.is_repeatable else _NOT_REPEATABLE)
        return "\n".join(lines)

    def _table(self) -> list[str]:
        """What was promised and measured, without a plan and by it."""
        sides = (self.plan.unplanned, self.plan.footprint)
        trials = (self.unplanned, self.planned)
        rows: dict[str, list[int | None]] = {
            "activations, as allocated": [side.allocated_nbytes for side in sides],
            "states of the optimizer": [side.optimizer_nbytes for side in sides],
            "workspace of operators": [side.workspace_nbytes for side in sides],
            "promised growth of the process": [promised_growth(side) for side in sides],
            "measured growth": [None if trial is None else trial.grown_nbytes for trial in trials],
        }
        table = [
            (label, *("-" if n is None else format_nbytes(n) for n in nbytes))
            for label, nbytes in rows.items()
        ]
        seconds = ["-" if trial is None else f"{trial.seconds:.4f}" for trial in trials]
        table = [("", "unplanned", "planned"), *table, ("seconds of a step", *seconds)]
        return text_table(table, widths=(32, 12, 12))


def promised_growth(footprint: Footprint) -> int:
    """By how much a process is to grow in training, beyond arguments, gradients and states."""
    return footprint.allocated_nbytes + footprint.workspace_nbytes + footprint.optimizer_nbytes


def check(plan: Plan, *, ctx: mx.Context, steps: int = 5, optimizer: str = "sgd") -> Check:
    """Train by ``plan`` on ``ctx`` and without it, each in a process of its own, on random numbers.

    ``steps`` are timed, after a few that are not; ``optimizer`` is the name of one of MXNet's.
    Raises ArgumentError for numbers and names that cannot be used, CostError where the process that
    trains by ``plan`` fails.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ArgumentError(f"steps must be an integer >= 1, got {shown(steps)}")
    reason = refusal(optimizer_named(optimizer))
    if plan.trace.form.updates and reason is not None:
        raise ArgumentError(f"the plan updates within the step, and {reason}; choose another")
    graph = plan.trace.graph
    request = request_of(plan.trace, device_type=ctx.device_type) | {"realisation": "mirror"}
    stock = trace_again(request, match_range=graph.match_range)
    run = partial(run_apart, ctx=ctx, steps=steps, optimizer=optimizer)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{name}.npz") for name in ("planned", "unplanned", "again")]
        run_planned = partial(run, match_range=plan.match_range, packing=plan.packing)
        planned = run_planned(plan.schedule, plan.trace, results=paths[0])
        run_unplanned = partial(run, Schedule.unplanned(stock.graph), stock)
        try:
            unplanned = run_unplanned(results=paths[1])
        except CostError as error:
            return Check(plan, device_name(ctx), planned, None, {}, unplanned_error=str(error))
        compared = partial(unlike, with_gradients=not plan.trace.form.updates)
        names = compared(*paths[:2])
        largest, is_repeatable = 0.0, True
        if any(names.values()):
            largest = largest_difference(paths[0], paths[1], itertools.chain(*names.values()))
            run_unplanned(results=paths[2])
            is_repeatable = not any(compared(*paths[1:]).values())
    return Check(plan, device_name(ctx), planned, unplanned, names, largest, is_repeatable)


def unlike(one: Path, other: Path, *, with_gradients: bool) -> dict[str, list[str]]:
    """The names of arrays that are not the same bits in both files, by kind."""
    names_of: dict[str, list[str]] = {kind: [] for kind in KINDS.values()}
    with np.load(one) as first, np.load(other) as second:
        for name in dict.fromkeys((*first.files, *second.files)):
            if name.startswith("gradient ") and not with_gradients:
                continue
            both = name in first.files and name in second.files
            if not both or first[name].tobytes() != second[name].tobytes():
                names_of[KINDS[name.split(" ", 1)[0]]].append(name)
    return names_of


def largest_difference(one: Path, other: Path, names: Iterable[str]) -> float:
    """By how much arrays of these names differ at most, each in parts of its largest number.

    Infinite where one of the files has no such array, or zeros, NaN or an infinity where the other
    has numbers.
    """
    largest = 0.0
    with np.load(one) as first, np.load(other) as second:
        for name in names:
            if name not in first.files or name not in second.files:
                return math.inf
            ours, theirs = (file[name].astype(np.float64) for file in (first, second))
            if ours.shape != theirs.shape or (np.isfinite(ours) != np.isfinite(theirs)).any():
                return math.inf
            finite = np.isfinite(theirs)
            difference = float(np.abs(ours - theirs)[finite].max(initial=0.0))
            scale = float(np.abs(theirs[finite]).max(initial=0.0))
            if difference:
                largest = max(largest, difference / scale if scale else math.inf)
    return largest


def _largest(difference: float) -> str:
    if math.isinf(difference):
        return "Where one of the two has numbers, the other has zeros, NaN, infinities or nothing."
    return f"The largest difference is {difference:.0e} of the largest number of its array."
