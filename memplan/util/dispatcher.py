"""numba's dispatchers, kept on disk for as long as what they were made of is unchanged.

numba's own cache looks at the file in which a function stands. Compiled functions call each other
across files, and constants of other files are part of them: after an edit there, numba would run
old code. Here an entry is fresh as long as no source of the function's folder has changed;
compiled functions may therefore use constants and compiled functions of their own folder only
(tests/search/test_kernels.py holds them to that). An entry is a file whose name says all that it
was compiled for: processors and versions of numba may share a folder, and one that comes with an
installation from elsewhere is read where it is for this processor, and nowhere else.

Arrays are counted references in numba, and are counted wherever one is handed on. A function that
makes none does without: moves of a search take a quarter to a half less time.

Compiling is slow, and most of that is LLVM's work on each function together with all that it
calls. Two things are therefore left out that numba does by default. A function is not compiled
anew for each constant that another compiled function calls it with. And one whose name begins
with ``_`` gets no wrapper with which Python could call it: only compiled functions do.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core import types
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from memplan.errors import DependencyError
from memplan.util.files import STALE_SECONDS
from memplan.util.interrupts import deferring
from memplan.util.progress import LOGGER

SECONDS = 30
"""About what it takes to compile all of memplan's compiled functions on one core."""

SUFFIX = ".memplan-compiled"
"""Files of compiled code end with it."""


def dispatcher_of(function: Callable[..., Any], *, makes_arrays: bool) -> Any:
    """``function``, compiled where it is first called with arguments of these types.

    Raises DependencyError where numba is told to compile nothing.
    """
    if getattr(numba.config, "DISABLE_JIT", 0):
        raise DependencyError(
            "NUMBA_DISABLE_JIT is set: numba then compiles nothing, and memplan's search is too "
            "slow where it is not compiled; unset it"
        )
    private = function.__name__.startswith("_")
    options: Any = {"no_cfunc_wrapper": True, "no_cpython_wrapper": private, "_nrt": makes_arrays}
    # Without Python's lock, which another thread may then have: one that proves something.
    dispatcher = numba.njit(nogil=True, **options)(function)
    template: Any = dispatcher.get_call_template
    unliteral: Any = types.unliteral
    dispatcher.get_call_template = lambda args, kws: template(
        tuple(map(unliteral, args)), {name: unliteral(kws[name]) for name in kws}
    )
    # This is what cache=True does, with files of our own.
    dispatcher._cache = _Cache(function)
    return dispatcher


@functools.cache
def _folder_stamp(folder: Path) -> str:
    """A hash of the sources in ``folder``, and of this one, as they are when it is first asked."""
    stamp = hashlib.sha256()
    for path in (*sorted(folder.glob("*.py")), Path(__file__)):
        content = path.read_bytes()
        stamp.update(f"{path.name} {len(content)} ".encode() + content)
    return stamp.hexdigest()


@functools.cache
def _announce() -> None:
    """Say, once in a process, why nothing else happens for a while."""
    LOGGER.warning(
        f"memplan compiles its search: about {SECONDS} seconds, once for this processor and numba "
        "(python -m memplan.search.compile does it ahead of time)"
    )


@functools.cache
def _announce_that_none_is_kept() -> None:
    """Say, once in a process, why the next one compiles, too."""
    LOGGER.warning(
        "what was compiled cannot be kept, and is compiled anew each time: no file can be written "
        "beside memplan's sources, nor in ~/.cache/memplan; set NUMBA_CACHE_DIR to a folder where "
        "one can"
    )


def _folders(sources: Path) -> Iterator[Path]:
    """Where what was compiled of ``sources`` may lie, and is written if that can be."""
    name = f"{sources.name}-{hashlib.sha256(bytes(sources)).hexdigest()[:16]}"
    chosen: str = getattr(numba.config, "CACHE_DIR", "")  # NUMBA_CACHE_DIR
    if chosen:
        yield Path(chosen) / name
    yield sources / "__pycache__"
    users = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if users.is_absolute():
        yield users / "memplan" / name


class _Cache(NullCache):
    """The files of one function: their names begin with ``fresh``, or else they are stale."""

    def __init__(self, py_func: Callable[..., Any]) -> None:
        source = Path(py_func.__code__.co_filename)
        self.folders = tuple(_folders(source.parent))
        self.function = f"{source.stem}.{py_func.__qualname__}.{sys.implementation.cache_tag}"
        self.fresh = f"{self.function}-{_folder_stamp(source.parent)[:16]}"

    def _name(self, sig: Any, target_context: Any) -> str:
        """The file for these types of arguments, this processor and this numba."""
        made_for = repr((sig, target_context.codegen().magic_tuple(), numba.__version__))
        return f"{self.fresh}-{hashlib.sha256(made_for.encode()).hexdigest()[:32]}{SUFFIX}"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What is on disk, if anything is that can be read: else numba compiles next."""
        # LLVM calls Python back as it loads, and as numba makes its own functions at the first
        # refresh: what is raised there is only printed.
        with deferring():
            target_context.refresh()
            name = self._name(sig, target_context)
            for folder in self.folders:
                with contextlib.suppress(Exception):  # there is no such file, or it is damaged
                    data = pickle.loads((folder / name).read_bytes())
                    return CompileResult._rebuild(target_context, *data)  # type: ignore[no-untyped-call]
        _announce()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write it into the first folder that can be written to, if there is one."""
        name = self._name(sig, data.target_context)
        content = dumps(data._reduce())  # type: ignore[no-untyped-call]
        for folder in self.folders:
            with contextlib.suppress(OSError):
                _write(folder, name, content)
                with contextlib.suppress(OSError):
                    self._delete_stale(folder)
                return
        _announce_that_none_is_kept()

    def _delete_stale(self, folder: Path) -> None:
        """Delete what was compiled of other sources, and drafts of who was killed as it wrote."""
        for path in folder.glob(f"{self.function}-*{SUFFIX}*"):
            is_draft = not path.name.endswith(SUFFIX)
            is_left = is_draft and time.time() - path.stat().st_mtime > STALE_SECONDS
            if is_left or not path.name.startswith(self.fresh):
                path.unlink(missing_ok=True)


def _write(folder: Path, name: str, content: bytes) -> None:
    """Write the file, all of it or nothing; OSError if it cannot be."""
    draft = folder / f"{name}.{secrets.token_hex(8)}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        draft.write_bytes(content)
        draft.replace(folder / name)
    finally:
        draft.unlink(missing_ok=True)  # of a full disk
