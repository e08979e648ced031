"""numba's dispatchers, kept on disk for as long as what they were made of is unchanged.

numba's own cache looks at the file in which a function stands. Compiled functions call each other
across files, and constants of other files are part of them: after an edit there, numba would run
old code. Here an entry is fresh as long as no source of the function's folder has changed;
compiled functions may therefore use constants and compiled functions of their own folder only
(tests/search/test_kernels.py holds them to that).

Arrays are counted references in numba, and are counted wherever one is handed on. A function that
makes none does without: moves of a search take a quarter to a half less time.

Compiling is slow, and most of that is LLVM's work on each function together with all that it
calls. Two things are therefore left out that numba does by default. A function is not compiled
anew for each constant that another compiled function calls it with. And one whose name begins
with ``_`` gets no wrapper with which Python could call it: only compiled functions do.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache

from memplan.util.progress import LOGGER

SECONDS = 30
"""About what it takes to compile all of memplan's compiled functions on one core."""


def dispatcher_of(function: Callable[..., Any], *, makes_arrays: bool) -> Any:
    """``function``, compiled where it is first called with arguments of these types."""
    private = function.__name__.startswith("_")
    options: Any = {"no_cfunc_wrapper": True, "no_cpython_wrapper": private, "_nrt": makes_arrays}
    dispatcher = numba.njit(**options)(function)
    template: Any = dispatcher.get_call_template
    unliteral: Any = types.unliteral
    dispatcher.get_call_template = lambda args, kws: template(
        tuple(map(unliteral, args)), {name: unliteral(kws[name]) for name in kws}
    )
    # This is what cache=True does, with another stamp.
    dispatcher._cache = _Cache(function)  # type: ignore[no-untyped-call]
    return dispatcher


@functools.cache
def folder_stamp(folder: Path) -> str:
    """A hash of the sources in ``folder``, as they are when it is first asked for."""
    stamp = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        content = path.read_bytes()
        stamp.update(f"{path.name} {len(content)} ".encode() + content)
    return stamp.hexdigest()


@functools.cache
def _announce() -> None:
    """Say, once in a process, why nothing else happens for a while."""
    LOGGER.warning(
        f"memplan compiles its search: about {SECONDS} seconds, once after an installation "
        "(python -m memplan.search.compile does it ahead of time)"
    )


class _CacheImpl(CompileResultCacheImpl):
    def __init__(self, py_func: Callable[..., Any]) -> None:
        super().__init__(py_func)  # type: ignore[no-untyped-call]
        stamp = folder_stamp(Path(py_func.__code__.co_filename).parent)
        self.locator.get_source_stamp = lambda: stamp


class _Cache(FunctionCache):
    _impl_class = _CacheImpl

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What is on disk, if anything is that can be read: else numba compiles next."""
        try:
            overload = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # damaged, or of an older memplan that had a class which is gone
            self.flush()  # type: ignore[no-untyped-call]
            overload = None
        if overload is None:
            _announce()
        return overload
