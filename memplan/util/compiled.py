"""Functions that numba compiles; numba itself is loaded when the first of them is called.

numba and LLVM take 60 MB, which a process that trains by a plan made elsewhere need not have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any


def compiled(function: Callable[..., Any]) -> Any:
    """``function``, compiled when it is first called with arguments of these types.

    It must make no arrays: its caller gives it those that it needs. One whose name begins with "_"
    can be called by compiled functions alone, which takes less to compile.
    """
    return Compiled(function, makes_arrays=False)


def compiled_with_arrays(function: Callable[..., Any]) -> Any:
    """As :func:`compiled`, for a function that makes arrays, or calls one that returns them."""
    return Compiled(function, makes_arrays=True)


class Compiled:
    """A function that is compiled when it is first called; ``py_func`` is the plain one."""

    def __init__(self, py_func: Callable[..., Any], *, makes_arrays: bool) -> None:
        self.py_func, self._makes_arrays = py_func, makes_arrays

    def __call__(self, *arguments: Any) -> Any:
        return self.dispatcher(*arguments)

    @cached_property
    def dispatcher(self) -> Any:
        """numba's object for it; those of the compiled functions that it may call are made, too."""
        from memplan.util.dispatcher import dispatcher_of

        dispatcher = self.__dict__["dispatcher"] = dispatcher_of(
            self.py_func, makes_arrays=self._makes_arrays
        )
        # numba looks for what a function calls among the globals of its module.
        names = self.py_func.__globals__
        for name, value in list(names.items()):
            if isinstance(value, Compiled):
                names[name] = value.dispatcher
        return dispatcher
