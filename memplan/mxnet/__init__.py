"""The only room that knows MXNet; importing it without a usable one raises DependencyError."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy

from memplan.errors import DependencyError

if TYPE_CHECKING:
    from memplan.mxnet.bucketing import BucketingModule
    from memplan.mxnet.module import Module

__all__ = ["BucketingModule", "Module"]

SUPPORTED = "1.9.1"
_HOW = "install it with pip install 'memplan[cpu]' (or 'memplan[cu112]' for NVIDIA GPUs)"


def _remedy(error: Exception) -> str:
    """What to do about ``error``, which MXNet raises when it is imported."""
    if isinstance(error, MemoryError):
        return "let this process have more memory"
    if isinstance(error, BytesWarning) and sys.flags.bytes_warning > 1:
        return "run Python without -bb"
    if isinstance(error, Warning):
        return "let warnings be warnings while it is imported (without -W error)"
    if sys.flags.optimize > 1:
        return "run Python without -OO (PYTHONOPTIMIZE=2), for MXNet reads its own docstrings"
    is_missing = isinstance(error, ImportError | OSError)  # MXNet, or a library that it loads
    if tuple(map(int, numpy.__version__.split(".")[:2])) >= (1, 24) and not is_missing:
        return f"numpy {numpy.__version__} is too new for it: pip install 'numpy<1.24'"
    return _HOW


try:
    import mxnet
except Exception as error:  # a missing libcuda or a too new NumPy raise whatever they like
    reason = str(error).rstrip(".") or type(error).__name__
    raise DependencyError(
        f"MXNet {SUPPORTED} cannot be imported: {reason}; {_remedy(error)}"
    ) from error

if mxnet.__version__ != SUPPORTED:
    raise DependencyError(
        f"memplan plans for MXNet {SUPPORTED}, but {mxnet.__version__} is installed; {_HOW}"
    )


if not TYPE_CHECKING:  # for which a name that is not here is an error, and no Any

    def __getattr__(name: str) -> Any:
        """The modules, imported when first asked for: they need the planner, which needs this."""
        if name == "Module":
            from memplan.mxnet.module import Module

            return Module
        if name == "BucketingModule":
            from memplan.mxnet.bucketing import BucketingModule

            return BucketingModule
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
