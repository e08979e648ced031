"""The objects of Custom ops, which outlive what runs them: MXNet makes new ones at every bind.

An executor of MXNet's has one object for each Custom op, for training and inference alike, as long
as it lives. A planned step and inference are bound apart, and again after something else needed
their memory; what the user's object keeps must stay meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import mxnet as mx

#: The name of a Custom op, and how many before it have the same one.
Key = tuple[str, int]


def keys(names: Iterable[str]) -> list[Key]:
    """What tells the Custom ops of these ``names`` apart, in the order of the network."""
    counts: Counter[str] = Counter()
    result = []
    for name in names:
        result.append((name, counts[name]))
        counts[name] += 1
    return result


class KeptOperators:
    """The objects of a network's Custom ops, made when first needed; not those within loops.

    ``is_kept`` says whether that of an op is; None: all are, as an executor's.
    """

    def __init__(self, is_kept: Callable[[Key], bool] | None = None) -> None:
        self._is_kept, self.are_all_kept = is_kept or (lambda op: True), is_kept is None
        self._objects: dict[Key, Any] = {}

    def forget(self, ops: Iterable[Key]) -> None:
        """Make new ones for these ``ops`` from now on; what still runs has the old ones."""
        for op in ops:
            self._objects.pop(op, None)

    @contextlib.contextmanager
    def for_ops(self, ops: Sequence[Key]) -> Iterator[None]:
        """Within it MXNet asks, in this thread, for the objects of ``ops``, one after the other.

        Where none of them is kept it makes them itself.
        """
        if not any(map(self._is_kept, ops)):
            yield
            return
        _see_creation()
        before, rest = _asked.take, iter(ops)

        def take(create: Callable[..., Any], *arguments: Any) -> Any:
            op = next(rest)
            if op not in self._objects:
                with _as_mxnet():
                    self._objects[op] = create(*arguments)
            return _Lent(self._objects[op])

        _asked.take = take
        try:
            yield
        finally:
            _asked.take = before

    def wait_for(self, outputs: Iterable[Any]) -> None:
        """Wait until the ops, if there are any, have computed these ``outputs``.

        The engine does not know that what runs next uses the same objects.
        """
        if self._objects:
            for array in outputs:
                array.wait_to_read()


class _Lent(mx.operator.CustomOp):  # type: ignore[misc]
    """Stands for a kept object where MXNet runs it: MXNet writes into every object that it gets."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self._kept = kept

    def forward(self, *arguments: Any, **options: Any) -> None:
        with _as_mxnet():  # where the engine runs in the thread that asks it
            self._kept.forward(*arguments, **options)

    def backward(self, *arguments: Any, **options: Any) -> None:
        with _as_mxnet():
            self._kept.backward(*arguments, **options)


class _Asked(threading.local):
    """Whom this thread asks for objects; None: the user's code, as MXNet does."""

    take: Callable[..., Any] | None = None


_asked = _Asked()


@contextlib.contextmanager
def _as_mxnet() -> Iterator[None]:
    """Within it the user's code may bind Custom ops of its own."""
    before, _asked.take = _asked.take, None
    try:
        yield
    finally:
        _asked.take = before


def _see_creation() -> None:
    """Have MXNet's calls of ``create_operator`` answered by whom the thread asks.

    MXNet looks the method up on the user's object, whose class may define or inherit it anywhere.
    """
    if mx.operator.CustomOpProp.__getattribute__ is object.__getattribute__:
        mx.operator.CustomOpProp.__getattribute__ = _attribute


def _attribute(properties: Any, name: str) -> Any:
    value = object.__getattribute__(properties, name)
    if name != "create_operator" or _asked.take is None:
        return value
    return functools.partial(_asked.take, value)
