"""A digest of the code of a strategy that is not memplan's: a cache sees that it was edited.

It is made of the bytecode that is loaded, with all that this names at the level of its module,
followed through the functions and classes of the user, and of the source of their modules. Source
alone would not do: a file may have been edited since it was imported, and what is typed into a
notebook has none. What lists, dicts and objects hold is told by the source; where there is none,
it is in the digest as it is, though a rule that counts its calls is another rule at each call then.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import numbers
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

# What is never the user's. The version of memplan is in the keys of the cache.
_NOT_OF_THE_USER = {"memplan", *sys.stdlib_module_names}

# Folders of packages that were installed: these are followed for strategies of their own only.
_INSTALLED = {"site-packages", "dist-packages"}

# Values that are known by their text.
_PLAIN = (numbers.Number, str, bytes, type(None), enum.Enum)


def own_code(strategy: object) -> str | None:
    """The digest, "" for a strategy of memplan; None where there is no code that can be read."""
    cls = type(strategy)
    packages = {_package(base.__module__) for base in cls.__mro__} - _NOT_OF_THE_USER
    if not packages:
        return "" if _package(cls.__module__) == "memplan" else None
    code = _Code(packages)
    code.add(strategy)  # with its options, which may have code as well
    code.follow()
    sources = [source for _, source in sorted(code.sources.items())]
    solve = inspect.getattr_static(cls, "solve", None)
    if not isinstance(solve, FunctionType) and not any(sources):
        return None
    text = "\n".join([*code.lines, *sources])
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def _package(module: object) -> str:
    return str(module or "builtins").partition(".")[0]


def _source(module: str) -> str:
    """The source of the module, "" where there is none."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # TypeError: of a notebook or of a console
        return ""


def _place_in_order(value: object) -> tuple[str, str]:
    """What a member of a set is sorted by; a text may hold an address, but begins with the name."""
    return str(getattr(value, "__module__", "")), repr(value)


def _held(value: Any) -> Collection[object]:
    """What an object of Python's holds, such as a decorated function that function."""
    if isinstance(value, list | set):
        return value
    if isinstance(value, dict):
        return (*value, *value.values())
    if isinstance(value, CellType):
        try:
            return (value.cell_contents,)
        except ValueError:  # it is empty
            return ()
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, property):
        return (value.fget, value.fset)
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, classmethod | staticmethod | MethodType):
        return (value.__func__, getattr(value, "__self__", None))
    return (inspect.getattr_static(value, "__wrapped__", None),)


class _Code:
    """What runs, as ``lines`` of text, and the ``sources`` of the user's modules that it is in."""

    def __init__(self, packages: Collection[str]) -> None:
        self.lines: list[str] = []
        self.sources: dict[str, str] = {}
        self._packages = packages
        # What is to be described, or is already: a text names an object by its place here.
        self._objects: list[object] = []
        self._places: dict[int, int] = {}

    def add(self, value: object) -> None:
        """Add the text of ``value``, or its place, where :meth:`follow` describes it."""
        if isinstance(value, _PLAIN):
            self.lines.append(repr(value))
        elif isinstance(value, tuple | frozenset):  # equal ones may be one object, or several
            self._parts(value)
        else:
            place = self._places.setdefault(id(value), len(self._objects))
            if place == len(self._objects):
                self._objects.append(value)
            self.lines.append(f"object {place}")

    def follow(self) -> None:
        """Describe all objects that were added, and those that come with them."""
        for value in self._objects:  # which grows meanwhile
            if isinstance(value, FunctionType):
                self._function(value)
            elif isinstance(value, type):
                self._class(value)
            else:
                self.add(type(value))
                self._parts(_held(value))
                module = type(value).__module__
                if self._is_of_the_user(module):
                    self._variable(getattr(value, "__dict__", {}), module)

    def _variable(self, value: object, module: str) -> None:
        """Add ``value``, which the user's ``module`` or an object of its classes has under a name.

        Of what may change only the code, where the source tells the rest.
        """
        if isinstance(value, list | dict | set) and self._source(module):
            parts = [part for part in _held(value) if isinstance(part, FunctionType | type)]
            self._parts(set(parts) if isinstance(value, set) else parts)
        else:
            self.add(value)

    def _source(self, module: str) -> str:
        """The source of the user's ``module``, "" where there is none; it is among the sources."""
        if module not in self.sources:
            self.sources[module] = _source(module)
        return self.sources[module]

    def _parts(self, values: Collection[object]) -> None:
        """Add ``values``, those of a set in an order that does not depend on the process."""
        self.lines.append(f"{len(values)} values")
        if isinstance(values, set | frozenset):
            values = sorted(values, key=_place_in_order)
        for value in values:
            self.add(value)

    def _function(self, function: FunctionType) -> None:
        self.lines.append(f"{function.__module__}.{function.__qualname__}")
        if self._is_of_the_user(function.__module__):
            self._source(function.__module__)
            self.add(function.__defaults__)
            self.add(function.__kwdefaults__)
            self.add(function.__closure__)
            self._code(function.__code__, function.__globals__)

    def _code(self, code: CodeType, values: Mapping[str, object]) -> None:
        exceptions = getattr(code, "co_exceptiontable", b"")  # since Python 3.11
        self.lines += [code.co_code.hex(), exceptions.hex()]
        self.lines.append(" ".join((*code.co_names, *code.co_varnames)))
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._code(constant, values)
            else:
                self.add(constant)
        self._named(code.co_names, values)

    def _named(self, names: Collection[str], values: Mapping[str, object], *within: object) -> None:
        """Add those of ``values`` that have one of the ``names``, those of modules among them."""
        for name in names:
            value = values.get(name)
            if not isinstance(value, ModuleType):
                self._variable(value, str(values.get("__name__")))
            elif self._is_of_the_user(value.__name__) and value not in within:
                self._named(names, vars(value), value, *within)

    def _class(self, cls: type) -> None:
        for base in cls.__mro__:
            self.lines.append(f"{base.__module__}.{base.__qualname__}")
            if not self._is_of_the_user(base.__module__):
                continue
            for name, value in vars(base).items():
                # The other names of this kind are notes of Python's, which it may add to.
                if isinstance(value, FunctionType) or not name.startswith("__"):
                    self.lines.append(name)
                    self._variable(value, base.__module__)

    def _is_of_the_user(self, module: str | None) -> bool:
        package = _package(module)
        if package in self._packages or package in _NOT_OF_THE_USER:
            return package in self._packages
        file = getattr(sys.modules.get(module or ""), "__file__", None)
        return file is None or _INSTALLED.isdisjoint(Path(file).parts)
