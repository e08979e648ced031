"""Code of the script's that cannot be called with Symbols: where it is, and what to do about it."""

from __future__ import annotations

import sys
import traceback
import types
import warnings
from typing import Any

import mxnet as mx

from memplan.errors import TraceError
from memplan.mxnet.train.blocks.read_by import is_scripts_module

# How to give a loss that has several labels and parameters of its own.
LOSS_OF_SEVERAL_LABELS = (
    "a HybridBlock that has it as self.loss, and whose hybrid_forward(self, F, outputs, labels) "
    "returns self.loss(outputs, *labels)"
)

# What raises there raises for what the script has called it with.
_CALLED_BY_SCRIPTS = ("mxnet", "memplan", "numpy")


def package_of_frame(frame: types.FrameType | None) -> str:
    """The package in which the code was written that runs in ``frame``."""
    return "" if frame is None else str(frame.f_globals.get("__name__", "")).split(".")[0]


def place_of(frame: types.FrameType, line: int) -> str:
    """The function that runs in ``frame``, with its file and this ``line`` of it."""
    code = frame.f_code
    return f"{code.co_name} ({code.co_filename}:{line})"


def is_scripts_own(error: Exception) -> bool:
    """Is ``error`` of a class of the script's own, which may raise it to catch it elsewhere?"""
    name = type(error).__module__
    module = sys.modules.get(name)
    is_called = name.split(".")[0] in _CALLED_BY_SCRIPTS
    return not is_called and (module is None or is_scripts_module(module))


def warn_of_own_error(block: Any, error: Exception) -> None:
    """Warn that MXNet may have drawn numbers by now, where it runs the operators of ``block``."""
    if not getattr(block, "_active", False):
        warnings.warn(
            f"{block.name!r} has raised {type(error).__name__} while memplan asked it what it "
            f"computes: MXNet, whose operators run one by one, may have drawn random numbers and "
            f"initialised parameters by then, and a planned step has not. If the script goes on, "
            f"these may be others than without a plan",
            stacklevel=2,
        )


def cannot_take_symbols(
    culprit: Any, error: Exception, *, is_loss: bool, ninputs: int, nlabels: int, has_loss: bool
) -> TraceError:
    """That for which ``culprit``, a block or a loss, has raised this ``error`` with Symbols.

    It names the innermost block of which code of the script's ran, and the line. ``ninputs`` is
    how many inputs a TrainStep was called with, which may be meant for batches, and ``nlabels``
    how many labels a loss gets as one argument, of which it may want each as one of its own.
    A block whose step has no loss (``has_loss``) gets the labels behind its inputs.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    called = {*_CALLED_BY_SCRIPTS, *sys.stdlib_module_names} - {"__main__"}
    places = [k for k, (frame, _) in enumerate(frames) if package_of_frame(frame) not in called]
    within = frames[: places[-1] + 1] if places else frames
    owners = [frame.f_locals.get("self") for frame, _ in within]
    blocks = [owner for owner in owners if isinstance(owner, mx.gluon.Block)]
    culprit = blocks[-1] if blocks else culprit
    name = culprit.name if isinstance(culprit, mx.gluon.Block) else culprit
    where = f"{place_of(*within[-1])} raises " if places else ""
    advice = _advice(error, is_loss=is_loss) if places else ""
    if ninputs > 1 and isinstance(error, TypeError) and not (is_loss or places):
        advice = (
            f"; the {ninputs} arrays, which are on one context, are its inputs: if they are "
            f"batches, make one of them (mx.nd.concat(*x, dim=0)), or load each to another context"
        )
    if not places and isinstance(error, TypeError) and nlabels == 0 and is_loss:
        advice = "; if it takes a label, call the step with one: step(x, y)"
    if not places and isinstance(error, TypeError) and nlabels > 0 and not has_loss:
        advice = (
            "; as the TrainStep has no loss, the block gets the labels behind its inputs: if they "
            "are for a loss, give it that, TrainStep(block, loss)"
        )
    # MXNet's blocks assert that each argument is a Symbol.
    if nlabels > 1 and isinstance(error, TypeError | AssertionError) and is_loss and not places:
        advice = (
            f"; the {nlabels} labels arrive as one argument, a list: give {LOSS_OF_SEVERAL_LABELS}"
        )
    return TraceError(
        f"{type(culprit).__name__} {name!r} cannot be called with Symbols, as hybridize() does: "
        f"{where}{type(error).__name__}: {error}{advice}"
    )


def _advice(error: Exception, *, is_loss: bool) -> str:
    if "NoneType" in str(error):
        # A first call with arrays may set what is None before it.
        return (
            "; if a call with arrays sets what is None here, call the block on a batch first, then "
            "again; else write it with F alone, as a hybrid_forward does"
        )
    if is_loss:
        other = "train the block by planned(block), whose loss gets arrays"
    else:
        other = (
            "where a planned block is to look at values, do so in its __call__, and leave the "
            "computation to super().__call__(...), which alone is planned"
        )
    return (
        f"; write it with F alone, as a hybrid_forward does: the codes of F.reshape (0, -1, -4 and "
        f"others) for x.shape, F.BlockGrad(x) for x.detach(), parameters by their names; or {other}"
    )
