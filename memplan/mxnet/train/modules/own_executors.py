"""Executors of MXNet's that a script makes itself and puts into a Module: they have no plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any


def warn_of_no_plan(executors: Iterable[Any]) -> bool:
    """Warn if a Module trains by these, behind whose ``forward`` this is called; does it?"""
    trains = any(array is not None for executor in executors for array in executor.grad_arrays)
    if trains:
        warnings.warn(
            "this Module trains without a plan, and updates the parameters in update(): a script "
            "has made its executors itself (module._exec_group). Let bind() of this class make "
            "them; or take mx.mod.Module, which trains as this one does here",
            stacklevel=3,
        )
    return trains
