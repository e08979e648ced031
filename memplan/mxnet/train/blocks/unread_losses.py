"""Loss operators that the loss of a step does not read: a block returns them, or drops them.

Their gradients need none of their outputs. MXNet computes them where the block runs as a graph,
which it differentiates whole, and not where the block gets arrays; a step computes those that are
in its network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from memplan.errors import TraceError
from memplan.mxnet.train.blocks.calls import Ops
from memplan.mxnet.train.blocks.hybridized import call_hybridize


class LossOperator(NamedTuple):
    """One of a network, at this ``place`` among the ops and variables."""

    place: int
    name: str
    op: str


def refuse_unread_losses(
    block: Any, ops: Ops, nread: int, params: Mapping[str, Any], *, keep_outputs: bool
) -> None:
    """TraceError where a step would train by other loss operators than MXNet does.

    The first ``nread`` outputs of the network are losses; with ``keep_outputs`` those of ``block``
    come behind. ``params`` are the parameters by their names.
    """
    losses = ops.losses()
    by_mxnet = ops.reached(ops.heads[:nread]) if losses else set()
    others = [place for place in losses if (place in by_mxnet) != (place < ops.nknown)]
    training = ops.carrying(params) if others else ()
    place = next((place for place in others if place in training), None)
    if place is None:
        return
    op = f"op {ops.nodes[place]['name']!r} ({ops.nodes[place]['op']})"
    unread = (
        f"the loss does not read {op} of block {block.name!r}, whose gradient may need none of its "
        f"output: MXNet"
    )
    whole = "for it differentiates a graph whole of which the loss reads something"
    remedies = (
        "write softmax for probabilities, put BlockGrad around what the op reads, or return that, "
        "and compute the op outside of the block"
    )
    if place < ops.nknown:
        hybridize = call_hybridize(block, "inline_limit=0")
        raise TraceError(
            f"{unread} does not train by it, and a step does with keep_outputs=True. Leave that "
            f"out, or {hybridize}, with which MXNet does, too; or {remedies}"
        )
    if not keep_outputs and place in ops.behind(ops.returned):
        raise TraceError(
            f"{unread} trains by it, {whole}, and a step does so only with keep_outputs=True. Take "
            f"that; or {remedies}"
        )
    graph = ops.graph_of.get(place)
    of_block = "" if graph is None else f" of hybridized block {graph.block.name!r}"
    raise TraceError(
        f"{op}{of_block} is dropped by what calls the block: MXNet trains by it, {whole}, and a "
        f"planned step would not. Put BlockGrad around what the op reads, or write softmax for "
        f"probabilities, or do not compute it there"
    )


def losses_by_output(
    ops: Ops, params: Mapping[str, Any]
) -> tuple[list[list[int]], tuple[frozenset[LossOperator], ...]]:
    """By which loss operators MXNet trains if a loss reads an output of the network.

    Their places, for every output, and of those that train any of ``params`` what they are.
    """
    losses = [place for place in ops.losses() if place < ops.nknown]
    if not losses:
        return [], ()
    behind = (ops.reached([head]) for head in ops.heads)
    reached = [[place for place in losses if place in places] for places in behind]
    training = ops.carrying(params)
    trained = {
        place: LossOperator(place, ops.nodes[place]["name"], ops.nodes[place]["op"])
        for place in losses
        if place in training
    }
    return reached, tuple(frozenset(trained[p] for p in row if p in trained) for row in reached)
