"""Where MXNet moves the statistics of norms in another order than a step, or not at all.

On a CPU the backward op of a norm moves its statistics, so that those of a layer that is called
several times depend on the order. MXNet has the order of its own graph, which begins at the loss,
and in which a hybridized block is one op that is differentiated whole. A step has the order of its
network, all of which is differentiated. In both, backward ops run as the gradients of parameters
ask for them, one parameter after another: the order of the norms alone does not tell.

Say that a block, which is not hybridized, has one norm, or two:

    return self.norm(x), self.norm(y)     # the outputs 0 and 1
    return self.first(x), self.second(y)

A step differentiates both outputs, the last one first, and so moves the statistics of ``norm`` by
its second call and then by its first. So does MXNet for a loss that reads 0 and then 1. For one
that reads 1 and then 0 it moves them in the other order, and for one that reads 0 alone only once:
:meth:`MovingStatistics.unmoved` refuses both. Of two norms the order does not matter. A loss that
reads 0 alone leaves the statistics of ``second`` as they are, and ``unmoved`` names them, for the
step to put them back. If the block is hybridized it moves all, whatever a loss reads of it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memplan.errors import TraceError, UsageError
from memplan.mxnet.trace.losses import has_gradient
from memplan.mxnet.trace.states import states_written
from memplan.mxnet.train.blocks.calls import Entry, Graph, Ops, order_between

# The places of the norms that move each of the statistics, in the order in which they do.
Moves = Mapping[str, Sequence[int]]

# What each node reads: of which other, which of its outputs, and may that get a gradient by it?
_Read = Mapping[Any, Mapping[str, Sequence[tuple[Any, int, bool]]]]


@dataclass(frozen=True)
class _Units:
    """What MXNet differentiates as one: an op in no graph, by its place, and a :class:`Graph` else.

    ``nodes`` are the units, ``insides`` the ops of the graphs, in which what comes from outside has
    an entry for a key, and ``ends`` the keys of their outputs. ``states`` are the names of what the
    op at a place moves. ``outputs`` are the units that compute the outputs of the network, and
    ``trained`` the places of the parameters that are trained.
    """

    nodes: _Read
    insides: Mapping[Graph, _Read]
    ends: Mapping[Graph, Sequence[Any]]
    states: Mapping[int, Sequence[str]]
    outputs: Sequence[int | Graph]
    trained: Collection[int]

    @classmethod
    def of(cls, ops: Ops, trained: Collection[int], graph_of: Mapping[int, Graph]) -> _Units:
        """Ops with the same ``graph_of`` are one; ``trained`` are places of parameters."""

        def entry(place: int, k: int) -> tuple[int | Graph, int]:
            graph = graph_of.get(place)
            if graph is None:
                return place, k
            return graph, graph.ends.index((place, k)) if (place, k) in graph.ends else k

        nodes: dict[Any, Any] = {
            place: {"inputs": [(*entry(*source), gets) for source, gets in _inputs(ops, place)]}
            for place in range(len(ops.nodes))
            if place not in graph_of
        }
        graphs = dict.fromkeys(graph_of.values())
        insides = {graph: _inside(ops, graph) for graph in graphs}
        ends = {graph: _ends(graph) for graph in graphs}
        for graph, inside in insides.items():
            sources = _sources(inside, ends[graph])
            nodes[graph] = {"inputs": [(*entry(*source), True) for source in sources]}
        written = ((place, states_written(node)) for place, node in enumerate(ops.operators))
        states = {place: [state.name for state in moved] for place, moved in written if moved}
        outputs = [entry(head, 0)[0] for head in ops.heads]
        return cls(nodes, insides, ends, states, outputs, trained)

    def moved(self, read: Iterable[int]) -> Moves:
        """What moves if a loss reads these outputs, in this order, be it behind BlockGrad."""
        units = _backward(self.nodes, [self.outputs[place] for place in read], self.trained)
        known = {*units, *self.trained}
        moves: dict[str, list[int]] = {}
        for unit in units:
            for place in self._places(unit, known):
                for name in self.states.get(place, ()):
                    moves.setdefault(name, []).append(place)
        return moves

    def _places(self, unit: int | Graph, known: Collection[int | Graph]) -> Sequence[int]:
        """The ops of a ``unit``, in the order of their backward ops; ``known`` give gradients."""
        if not isinstance(unit, Graph):
            return [unit]
        inside, ends = self.insides[unit], self.ends[unit]
        sources = zip(_sources(inside, ends), self.nodes[unit]["inputs"], strict=True)
        return _backward(inside, ends, {key for key, (n, *_) in sources if n in known})


def _inputs(ops: Ops, place: int) -> Iterable[tuple[Entry, bool]]:
    """What the op at ``place`` reads, and whether it may give that a gradient."""
    for k, (source, output, *_) in enumerate(ops.nodes[place]["inputs"]):
        yield (source, output), has_gradient(ops.operators[place], k)


def _ends(graph: Graph) -> list[Any]:
    """The keys of the outputs of a ``graph``."""
    return [entry[0] if entry[0] in graph.ops else entry for entry in graph.ends]


def _sources(inside: _Read, ends: Sequence[Any]) -> list[Entry]:
    """What a graph with these ``ends`` reads from outside, in the order of its arguments."""
    return [key for key in order_between(inside, ends, ()) if isinstance(key, tuple)]


def _inside(ops: Ops, graph: Graph) -> _Read:
    """The ops of a ``graph``, and entries for what comes from outside."""
    nodes: dict[Any, Any] = {end: {"inputs": ()} for end in _ends(graph)}
    for place in graph.ops:
        nodes[place] = {"inputs": []}
        for source, gets in _inputs(ops, place):
            key, k = source if source[0] in graph.ops else (source, 0)
            nodes.setdefault(key, {"inputs": ()})
            nodes[place]["inputs"].append((key, k, gets))
    return nodes


def _backward(nodes: _Read, outputs: Sequence[Any], sources: Collection[Hashable]) -> list[Any]:
    """The nodes by way of which ``sources`` get gradients, in MXNet's order of backward ops.

    It asks for the gradients of the sources one after another, each of which is that of what reads
    it, the last of these first (Gradient in src/nnvm/gradient.cc).
    """
    order = order_between(nodes, outputs, ())
    readers: dict[Any, dict[int, list[Any]]] = {node: {} for node in order}
    for node in reversed(order):
        for source, k, gets in nodes[node]["inputs"]:
            if gets:
                readers[source].setdefault(k, []).append(node)
    ways = {
        node: {"inputs": [(reader,) for k in sorted(by) for reader in by[k]]}
        for node, by in readers.items()
    }
    behind = order_between(ways, [node for node in order if node in sources], ())
    return [node for node in behind if node not in sources]


@dataclass(frozen=True)
class MovingStatistics:
    """Those of a network of which it depends on the loss what moves.

    Whatever loss reads all that it may, MXNet does not move those that are ``kept``.
    """

    kept: Sequence[str]
    _units: _Units
    _in_step: Moves
    #: What moves for losses that were seen: every step asks, and mostly of the same.
    _moved: dict[tuple[int, ...], Moves] = field(default_factory=dict)

    def unmoved(self, read: Iterable[int]) -> list[str]:
        """The statistics that a step moves, and MXNet does not if a loss reads these outputs.

        UsageError for those that MXNet moves in another order, or less often.
        """
        outputs = tuple(read)
        if outputs not in self._moved:
            self._moved[outputs] = self._units.moved(outputs)
        moved = self._moved[outputs]
        other = next((name for name in moved if moved[name] != self._in_step[name]), None)
        if other is not None:
            raise UsageError(
                f"calls of a layer share {other!r}, and MXNet moves it in the order in which the "
                f"loss reads the outputs of a block that is not hybridized, and not for those that "
                f"the loss does not read, but a planned step for all, in their order. Return them "
                f"in the order in which the loss reads them, and no others; or call "
                f"hybridize(inline_limit=0), with which MXNet does as the step, but for a block "
                f"with a forward of its own"
            )
        return [name for name in self._in_step if name not in moved]


def moving_statistics(
    block: Any, ops: Ops, params: Mapping[str, Any], nread: int
) -> MovingStatistics | None:
    """Those of the network of a ``block``, if it depends on the loss what moves.

    Its first ``nread`` outputs are the losses, or what they may be computed of. TraceError where
    MXNet moves others than a step if all of these are differentiated.
    """
    if not ops.writes_states():
        return None
    trained = ops.trained(params)
    in_step = _Units.of(ops, trained, {}).moved(range(len(ops.heads)))
    units = _Units.of(ops, trained, ops.graph_of)
    moved = units.moved(range(nread))
    for name, places in moved.items():
        if places != in_step.get(name):
            _refuse(block, ops, name, set(places).difference(in_step.get(name, ())))
    kept = [name for name in in_step if name not in moved]
    depends = len(set(units.outputs[:nread])) > 1
    return MovingStatistics(kept, units, in_step) if in_step and (depends or kept) else None


def _refuse(block: Any, ops: Ops, name: str, missing: Collection[int]) -> None:
    if not missing:
        raise TraceError(
            f"calls of a layer of block {block.name!r} share {name!r}, and MXNet moves it in the "
            f"order in which a hybridized block returns what depends on them, but a planned step "
            f"in the order in which that is read. Return it in the order in which it is read"
        )
    op = ops.nodes[min(missing)]
    raise TraceError(
        f"MXNet moves {name!r} by op {op['name']!r} ({op['op']}) of hybridized block "
        f"{ops.graph_of[min(missing)].block.name!r}, for it differentiates a graph whole of "
        f"which a loss reads something. A planned step would not, for no loss reads what depends "
        f"on the op: do not compute it there, or have the loss read it"
    )
