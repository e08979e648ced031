"""The training graph: forward and backward ops in a base order, and the tensors between them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from memplan.errors import GraphError
from memplan.util.files import parse_json
from memplan.util.nbytes import MAX_NBYTES
from memplan.util.numbers import is_finite, is_whole, shown, total

if TYPE_CHECKING:
    import networkx

FORMAT = "memplan.step.graph/1"

UPDATE = "update"
"""The kind of an op that updates a parameter by its gradient; it writes no tensor with bytes."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One output of an op.

    ``nbytes`` is what it occupies in the memory that a plan can influence: 0 for a tensor that
    lives in an array which exists anyway (a parameter's gradient). ``nelements`` is its number
    of elements, in which MXNet's memory planner counts (0 likewise).
    """

    name: str
    nbytes: int
    nelements: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise GraphError(f"the name of a tensor must be a string, got {shown(self.name)}")
        for field in ("nbytes", "nelements"):
            value = getattr(self, field)
            if not is_whole(value):
                raise GraphError(
                    f"tensor {self.name!r}: {field} must be an integer >= 0, got {shown(value)}"
                )
        if (self.nbytes == 0) != (self.nelements == 0):
            raise GraphError(
                f"tensor {self.name!r} has {shown(self.nbytes)} bytes, but "
                f"{shown(self.nelements)} elements"
            )


class Handover(NamedTuple):
    """Permission to write output ``output`` into the buffer of input ``input`` (places in the op).

    It is used when that input dies at this op; with ``alias`` (reshape, identity) the two share the
    buffer even if the input lives on.
    """

    input: int
    output: int
    alias: bool


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call, forward or backward.

    ``inputs`` and ``outputs`` index the graph's tensors; parameters and data are no tensors.
    ``after`` are ops that must have run although nothing of them is read. ``differentiates`` is
    the forward op of a backward op. ``recomputable``: may it run twice? ``seconds`` is its time;
    ``flops`` and ``traffic_nbytes`` (all bytes read and written, parameters included) feed a
    roofline; ``signature`` names operator, attributes, shapes and dtypes in a table of costs.
    ``mirror_stage`` is the user's hint that this is a good place to keep (memonger's attribute).
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float = 0.0
    recomputable: bool = True
    differentiates: int | None = None
    after: tuple[int, ...] = ()
    handovers: tuple[Handover, ...] = ()
    flops: int = 0
    traffic_nbytes: int = 0
    signature: str = ""
    mirror_stage: str | None = None

    def __post_init__(self) -> None:
        self._check_names()
        for field in ("seconds", "flops", "traffic_nbytes"):
            value = getattr(self, field)
            if not is_finite(value):
                raise GraphError(
                    f"op {self.name!r}: {field} must be >= 0 and finite, got {shown(value)}"
                )
        of = () if self.differentiates is None else (self.differentiates,)
        indices = (*self.inputs, *self.outputs, *self.after, *of)
        if not all(type(index) is int for index in indices):
            raise GraphError(
                f"op {self.name!r}: tensors and ops are named by integers: {shown(indices)}"
            )
        # What is not False counts as true: a "false" of a file in JSON must not.
        if type(self.recomputable) is not bool:
            raise GraphError(
                f"op {self.name!r}: recomputable must be true or false, "
                f"got {shown(self.recomputable)}"
            )
        for handover in self.handovers:
            is_one = isinstance(handover, Handover)
            if not is_one or tuple(map(type, handover)) != (int, int, bool):
                raise GraphError(
                    f"op {self.name!r}: {shown(handover)} must be a Handover of two places and "
                    "true or false"
                )
            if handover.input not in range(len(self.inputs)) or handover.output not in range(
                len(self.outputs)
            ):
                raise GraphError(f"op {self.name!r}: {shown(handover)} points outside the op")

    def _check_names(self) -> None:
        for field in ("name", "kind", "signature"):
            if not isinstance(getattr(self, field), str):
                value = shown(getattr(self, field))
                raise GraphError(f"op {shown(self.name)}: {field} must be a string, got {value}")
        if self.mirror_stage is not None and not isinstance(self.mirror_stage, str):
            value = shown(self.mirror_stage)
            raise GraphError(
                f"op {self.name!r}: mirror_stage must be a string or None, got {value}"
            )

    def taking(self, seconds: float) -> Op:
        """The same op with another time."""
        if not is_finite(seconds):
            return dataclasses.replace(self, seconds=seconds)  # which raises
        copy = object.__new__(Op)
        for field in Op.__slots__:
            object.__setattr__(copy, field, getattr(self, field))
        object.__setattr__(copy, "seconds", seconds)
        return copy

    def renumbered(self, number_of: Mapping[int, int]) -> Op:
        """The same op in a graph whose ops have other numbers."""
        twin = None if self.differentiates is None else number_of[self.differentiates]
        after = tuple(number_of[other] for other in self.after)
        return dataclasses.replace(self, after=after, differentiates=twin)


@dataclass(frozen=True)
class TrainingGraph:
    """Ops in base execution order; the first ``nforward`` are the forward pass.

    ``heads`` index the tensors that must survive to the end of the step, in the order in which
    MXNet visits them: the network's outputs, then the gradients. ``fixed_nbytes`` is held beside
    the tensors whatever the plan: arguments, auxiliary states, gradients that are no tensors.
    ``match_range`` is the NNVM_EXEC_MATCH_RANGE under which MXNet will place them (its default is
    16).
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    heads: tuple[int, ...]
    nforward: int
    fixed_nbytes: int = 0
    match_range: int = 16

    def __post_init__(self) -> None:
        self._check_sizes()
        if self.nforward > len(self.ops):
            raise GraphError(
                f"nforward is {shown(self.nforward)}, but there are {len(self.ops)} ops"
            )
        self._check_producers()
        self._check_order()
        self._check_handovers()

    def _check_sizes(self) -> None:
        for field in ("nforward", "fixed_nbytes", "match_range"):
            value = getattr(self, field)
            if not is_whole(value):
                raise GraphError(f"{field} must be an integer >= 0, got {shown(value)}")
        for what, sizes in (
            ("bytes", [self.fixed_nbytes, *(tensor.nbytes for tensor in self.tensors)]),
            ("elements", [tensor.nelements for tensor in self.tensors]),
        ):
            if sum(sizes) > MAX_NBYTES:
                raise GraphError(
                    f"the step holds {shown(sum(sizes))} {what}, more than {MAX_NBYTES} (2^53), "
                    f"beyond which memplan cannot count; the largest part is "
                    f"{self._largest(what)}"
                )
        if not math.isfinite(self.seconds):
            slowest = max(self.ops, key=lambda op: op.seconds)
            raise GraphError(
                f"the seconds of all ops together are too many to count; the most are those of "
                f"op {slowest.name!r}, {slowest.seconds!r}"
            )

    def _largest(self, what: str) -> str:
        """The tensor, or the fixed bytes, that makes the step too large."""
        field = "nbytes" if what == "bytes" else "nelements"
        largest = max(self.tensors, key=lambda tensor: getattr(tensor, field), default=None)
        if largest is None or (what == "bytes" and self.fixed_nbytes > largest.nbytes):
            return f"arguments and what else is fixed (fixed_nbytes), {shown(self.fixed_nbytes)}"
        return f"tensor {largest.name!r}, {shown(getattr(largest, field))}"

    def _check_producers(self) -> None:
        written_tensors: set[int] = set()
        for op in self.ops:
            for tensor in op.outputs:
                if not 0 <= tensor < len(self.tensors):
                    raise GraphError(
                        f"op {op.name!r} writes tensor {shown(tensor)}, which does not exist"
                    )
                if tensor in written_tensors:
                    name = self.tensors[tensor].name
                    raise GraphError(f"op {op.name!r} writes tensor {name!r}, as an earlier op did")
                written_tensors.add(tensor)
        for tensor in range(len(self.tensors)):
            if tensor not in written_tensors:
                raise GraphError(f"tensor {self.tensors[tensor].name!r} is written by no op")

    def _check_order(self) -> None:
        ready: set[int] = set()
        for index, op in enumerate(self.ops):
            for tensor in op.inputs:
                if tensor not in ready:
                    raise GraphError(
                        f"op {op.name!r} reads tensor {shown(tensor)} before an op has written it"
                    )
            for other in (*op.after, *(() if op.differentiates is None else (op.differentiates,))):
                if not 0 <= other < index:
                    raise GraphError(
                        f"op {op.name!r} must follow op {shown(other)}, which is not before it"
                    )
            ready.update(op.outputs)
        for tensor in self.heads:
            if type(tensor) is not int or tensor not in ready:
                raise GraphError(f"head {shown(tensor)} is no tensor of the graph")

    def _check_handovers(self) -> None:
        for op in self.ops:
            for place, target, _ in op.handovers:
                pair = [self.tensors[t] for t in (op.inputs[place], op.outputs[target])]
                sizes = {(t.nbytes, t.nelements) for t in pair if t.nbytes}
                if len(sizes) > 1:
                    names = " to ".join(repr(t.name) for t in pair)
                    raise GraphError(f"op {op.name!r} hands over {names}, which differ in size")

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """For each tensor, the op that writes it."""
        result = [0] * len(self.tensors)
        for index, op in enumerate(self.ops):
            for tensor in op.outputs:
                result[tensor] = index
        return tuple(result)

    @cached_property
    def position(self) -> tuple[int, ...]:
        """For each tensor, its place among the outputs of the op that writes it."""
        result = [0] * len(self.tensors)
        for op in self.ops:
            for place, tensor in enumerate(op.outputs):
                result[tensor] = place
        return tuple(result)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor, the ops that read it, in base order."""
        result: list[list[int]] = [[] for _ in self.tensors]
        for index, op in enumerate(self.ops):
            for tensor in dict.fromkeys(op.inputs):
                result[tensor].append(index)
        return tuple(map(tuple, result))

    @cached_property
    def dependencies(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the ops it depends on, in the order in which MXNet visits them."""
        return tuple((*(self.producer[t] for t in op.inputs), *op.after) for op in self.ops)

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the ops that depend on it, in base order."""
        result: list[list[int]] = [[] for _ in self.ops]
        for index, dependencies in enumerate(self.dependencies):
            for other in dict.fromkeys(dependencies):
                result[other].append(index)
        return tuple(map(tuple, result))

    @cached_property
    def placements(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the places of its outputs that occupy memory, as MXNet requests them.

        The largest first; of equal ones the last.
        """
        sizes = [[self.tensors[t].nelements for t in op.outputs] for op in self.ops]
        return tuple(
            tuple(sorted((p for p, n in enumerate(s) if n), key=lambda p: (s[p], p), reverse=True))
            for s in sizes
        )

    @cached_property
    def seconds(self) -> float:
        """Seconds of the unplanned step."""
        return total(op.seconds for op in self.ops)

    @property
    def forward_seconds(self) -> float:
        """Seconds of the forward pass."""
        return total(op.seconds for op in self.ops[: self.nforward])

    def with_seconds(self, seconds: list[float]) -> TrainingGraph:
        """The same graph with ``seconds[i]`` as the time of op i.

        GraphError unless there is one for each op, none of them negative.
        """
        if len(seconds) != len(self.ops):
            raise GraphError(f"{len(seconds)} costs for {len(self.ops)} ops")
        ops = tuple(op.taking(s) for op, s in zip(self.ops, seconds, strict=True))
        # What else was checked of this graph holds for that one.
        copy = object.__new__(TrainingGraph)
        copy.__dict__.update({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        copy.__dict__["ops"] = ops
        copy._check_sizes()
        return copy

    def to_json(self) -> str:
        """This graph as JSON text, read back by :meth:`from_json`."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> TrainingGraph:
        """The graph that :meth:`to_json` wrote; GraphError if the text is something else."""
        try:
            data: Mapping[str, Any] = parse_json(text)
            if data["format"] != FORMAT:
                raise GraphError(
                    f"not a memplan graph: format is {data['format']!r}, not {FORMAT!r}"
                )
            ops = tuple(_op_from_json(op) for op in data["ops"])
            tensors = tuple(Tensor(**tensor) for tensor in data["tensors"])
            rest = {name: data[name] for name in ("nforward", "fixed_nbytes", "match_range")}
            return cls(ops, tensors, tuple(data["heads"]), **rest)
        except GraphError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise GraphError(f"not a memplan graph: {error}") from error

    def to_networkx(self) -> networkx.DiGraph:
        """Ops as nodes (with their fields as attributes), an edge where one reads another."""
        import networkx

        result = networkx.DiGraph()
        for index, op in enumerate(self.ops):
            result.add_node(index, **{f.name: getattr(op, f.name) for f in dataclasses.fields(op)})
            for tensor in op.inputs:
                result.add_edge(self.producer[tensor], index)
        return result


def _op_from_json(data: Mapping[str, Any]) -> Op:
    fields = {**data}
    for name in ("inputs", "outputs", "after"):
        fields[name] = tuple(fields[name])
    fields["handovers"] = tuple(Handover(*handover) for handover in fields["handovers"])
    return Op(**fields)


def reached(start: Iterable[int], edges: Sequence[Sequence[int]]) -> set[int]:
    """``start`` and all that can be reached from it; ``edges[i]`` are where i leads to.

    By ``dependencies`` of a graph these are ancestors, by ``followers`` descendants.
    """
    members = set(start)
    stack = list(members)
    while stack:
        for other in edges[stack.pop()]:
            if other not in members:
                members.add(other)
                stack.append(other)
    return members
