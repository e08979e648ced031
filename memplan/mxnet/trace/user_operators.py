"""Custom ops, which MXNet knows in processes that have run the modules which define them."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterable, Iterator

import mxnet as mx


def defining_modules() -> list[str]:
    """The modules that define Custom ops of this process, by name; "__main__" is the script."""
    modules = {cls.__module__ for cls in _subclasses(mx.operator.CustomOpProp)}
    return sorted(name for name in modules if name.partition(".")[0] != "mxnet")


def import_modules(names: Iterable[str]) -> None:
    """Import what defines Custom ops; an op that is still missing is an error of MXNet's later.

    The script of another process cannot be imported: it would run.
    """
    for name in names:
        if name != "__main__":
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def missing_operator(error: object) -> str | None:
    """The Custom op that MXNet does not know, if that is what ``error`` says."""
    match = re.search(r"Cannot find custom operator (\S+)", str(error))
    return None if match is None else match[1].rstrip(".")


def _subclasses(cls: type) -> Iterator[type]:
    subclasses: list[type] = cls.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from _subclasses(subclass)
