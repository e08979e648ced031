"""Functions compiled by numba, and kept on disk for as long as what they were made of is unchanged.

numba's own cache looks at the file in which a function stands. Compiled functions call each other
across files, and constants of other files are part of them: after an edit there, numba would run
old code. Here an entry is fresh as long as no source of the function's folder has changed;
compiled functions may therefore use constants and compiled functions of their own folder only
(tests/search/test_kernels.py holds them to that).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache


def compiled(function: Callable[..., Any]) -> Any:
    """``function``, compiled where it is first called with arguments of these types."""
    dispatcher = numba.njit(function)
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


class _CacheImpl(CompileResultCacheImpl):
    def __init__(self, py_func: Callable[..., Any]) -> None:
        super().__init__(py_func)  # type: ignore[no-untyped-call]
        stamp = folder_stamp(Path(py_func.__code__.co_filename).parent)
        self.locator.get_source_stamp = lambda: stamp


class _Cache(FunctionCache):
    _impl_class = _CacheImpl
