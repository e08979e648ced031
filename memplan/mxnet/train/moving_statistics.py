"""Where MXNet moves the statistics of norms in another order than a step, or not at all.

On a CPU the backward op of a norm moves its statistics, so that those of a layer that is called
several times depend on the order. MXNet has the order of its own graph, which begins at the loss,
and in which a hybridized block is one op that is differentiated whole. A step has the order of its
network, all of which is differentiated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memplan.errors import TraceError, UsageError
from memplan.mxnet.trace.states import states_written
from memplan.mxnet.train.calls import Ops, order_between

# The places of the norms that move each of the statistics, in the order of the graph.
Moves = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class _Units:
    """The ops of a network by number, of which those that MXNet runs in one graph have one number.

    ``nodes`` say what each reads, as a graph in JSON does, and ``moves`` which statistics it moves,
    by the norms at which places. ``outputs`` are the numbers of what computes the outputs of the
    network.
    """

    nodes: Mapping[int, Mapping[str, Any]]
    moves: Mapping[int, Sequence[tuple[str, int]]]
    outputs: Sequence[int]

    @classmethod
    def of(
        cls,
        ops: Ops,
        carrying: Collection[int],
        outputs: Iterable[int],
        graph_of: Mapping[int, int],
    ) -> _Units:
        """Ops with equal ``graph_of`` are one; norms ``carrying`` gradients to parameters move."""
        nnodes = len(ops.nodes)

        def number(place: int) -> int:
            return nnodes + graph_of[place] if place in graph_of else place

        wholes = [(place, {place}, [place]) for place in range(nnodes) if place not in graph_of]
        for graph in sorted(set(graph_of.values())):
            wholes.append((nnodes + graph, {*ops.graphs[graph]}, ops.ends[graph]))
        nodes, moves = {}, {}
        for n, members, ends in wholes:
            order = _within(ops, members, ends)
            nodes[n] = {"inputs": [(number(place),) for place in order if place not in members]}
            movers = [place for place in order if place in members and place in carrying]
            moves[n] = [(s.name, p) for p in movers for s in states_written(ops.operators[p])]
        return cls(nodes, moves, list(map(number, outputs)))

    def moved(self, read: Iterable[int]) -> Moves:
        """What moves if a loss reads these outputs, in this order, be it behind BlockGrad."""
        moves: dict[str, list[int]] = {}
        for n in order_between(self.nodes, [self.outputs[place] for place in read], ()):
            for name, place in self.moves[n]:
                moves.setdefault(name, []).append(place)
        return moves


def _within(ops: Ops, members: Collection[int], ends: Sequence[int]) -> list[int]:
    """These ``members``, and what they read of others, in MXNet's order."""
    nodes: dict[int, Mapping[str, Any]] = {place: {"inputs": ()} for place in ends}
    nodes |= {place: ops.nodes[place] for place in members}
    for place in members:
        for source, *_ in ops.nodes[place]["inputs"]:
            nodes.setdefault(source, {"inputs": ()})
    return order_between(nodes, ends, ())


@dataclass(frozen=True)
class MovingStatistics:
    """Those of a network of which it depends on the loss what moves."""

    _units: _Units
    _in_step: Moves

    def unmoved(self, read: Iterable[int]) -> list[str]:
        """The statistics that a step moves, and MXNet does not if a loss reads these outputs.

        UsageError for those that MXNet moves in another order, or less often.
        """
        moved = self._units.moved(read)
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
    if not any(map(states_written, ops.operators)):
        return None
    carrying, heads = ops.carrying(params), ops.heads[:nread]
    in_step = _Units.of(ops, carrying, heads, {}).moved(range(nread))
    units = _Units.of(ops, carrying, heads, ops.graph_of)
    for name, places in units.moved(range(nread)).items():
        if places != in_step.get(name):
            _refuse(block, ops, name, set(places).difference(in_step.get(name, ())))
    return MovingStatistics(units, in_step) if len(set(units.outputs)) > 1 and in_step else None


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
        f"{ops.blocks[ops.graph_of[min(missing)]].name!r}, for it differentiates a graph whole of "
        f"which a loss reads something. A planned step would not, for no loss reads what depends "
        f"on the op: do not compute it there, or have the loss read it"
    )
