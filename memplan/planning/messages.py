"""What a process that trains and its child that plans tell each other: pickled, one by one.

What must stay in the training process (its trace, MXNet's Symbols) travels as a name. The graph is
sent once, and is the same object at either end.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from types import FunctionType
from typing import IO, Any

from memplan.memory.packing import Packing
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule

GRAPH, TRACE = "graph", "trace"

#: Says that nothing more is asked about a job.
NO_MORE = b""

# What pickle raises for objects that it cannot take.
CANNOT_PICKLE = (pickle.PicklingError, TypeError, AttributeError, RecursionError, ValueError)


@dataclass(frozen=True)
class StandIn:
    """Stands, in the child, for what the training process has under this name."""

    name: str


def pickled(message: Any, objects: Mapping[str, Any], modules: set[str] | None = None) -> bytes:
    """``message`` as bytes; what ``objects`` holds is in them by its name.

    The modules of its classes and functions are added to ``modules``. Raises one of CANNOT_PICKLE
    for what cannot be sent. That is also what the script of the training process itself defines,
    which a child would look for elsewhere, and a strategy that may keep a state, which would change
    in the child only.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, objects)
    pickler.dump(message)
    if modules is not None:
        modules |= pickler.modules
    return file.getvalue()


def unpickled(data: bytes, objects: Mapping[str, Any]) -> Any:
    """What :func:`pickled` wrote; names that are not ``objects`` become stand-ins."""
    return _Unpickler(io.BytesIO(data), objects).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: IO[bytes], objects: Mapping[str, Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._names = {id(value): name for name, value in objects.items()}
        self.modules: set[str] = set()

    def persistent_id(self, obj: Any) -> str | None:
        return obj.name if type(obj) is StandIn else self._names.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException):
            return _exception, (type(obj), obj.args, obj.__dict__)
        if isinstance(obj, TrainingGraph):  # without what it has worked out
            fields = (getattr(obj, field.name) for field in dataclasses.fields(obj))
            return type(obj), tuple(fields)
        if isinstance(obj, Schedule):
            counts, sources = map(len, obj.reads), chain.from_iterable(obj.reads)
            numbers = (_numbers(values) for values in (obj.ops, counts, sources, obj.heads))
            return _schedule, (obj.graph, *numbers)
        if isinstance(obj, Packing):
            return _packing, (obj.nbytes, _numbers(chain(*obj.rows)), obj.bound_nbytes)
        if isinstance(obj, type | FunctionType):
            self.modules.add(obj.__module__)
            if obj.__module__ == "__main__":
                raise pickle.PicklingError(f"{obj.__qualname__} is defined in the script itself")
        if hasattr(obj, "solve") and not _is_frozen(obj):
            raise pickle.PicklingError(f"{type(obj).__qualname__} is no frozen dataclass")
        return NotImplemented


def _is_frozen(obj: Any) -> bool:
    parameters = getattr(obj, "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], objects: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, name: str) -> Any:
        return self._objects[name] if name in self._objects else StandIn(name)


def _numbers(values: Iterable[int]) -> array[int]:
    """Many integers without an object for each."""
    return array("q", values)


def _shared(numbers: array[int], known: dict[int, int]) -> list[int]:
    """The integers, of which equal ones, and ``known`` ones, are one object: a plan keeps many."""
    return [known.setdefault(number, number) for number in numbers]


def _schedule(graph: TrainingGraph, *numbers: array[int]) -> Schedule:
    known = {tensor: tensor for op in graph.ops for tensor in op.outputs}
    ops, counts, sources, heads = (_shared(each, known) for each in numbers)
    of_step = iter(sources)
    reads = tuple(tuple(islice(of_step, count)) for count in counts)
    return Schedule(graph, tuple(ops), reads, tuple(heads))


def _packing(nbytes: int, rows: array[int], bound_nbytes: int) -> Packing:
    numbers = _shared(rows, {})
    keys = zip(numbers[::3], numbers[1::3], strict=True)
    return Packing(nbytes, dict(zip(keys, numbers[2::3], strict=True)), bound_nbytes)


def _exception(
    kind: type[BaseException], arguments: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    """An exception again, whatever its constructor wants."""
    construct: Callable[..., BaseException] = kind.__new__
    error = construct(kind, *arguments)
    error.args = arguments
    error.__dict__.update(attributes)
    return error


def send(stream: IO[bytes], data: bytes) -> None:
    """Write one message."""
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes:
    """The next message; EOFError where the other end is gone."""
    head = stream.read(8)
    data = stream.read(int.from_bytes(head, "little")) if len(head) == 8 else b""
    if len(head) < 8 or len(data) < int.from_bytes(head, "little"):
        raise EOFError
    return data
