"""What a block that is not hybridized, or its loss, computes in another mode than a training loop.

MXNet asks for the mode when an operator runs: autograd.pause(), too, is predict mode, unless it is
told otherwise, and where nothing is recorded no norm moves its statistics, which is done in the
backward pass. Symbols know no mode, so that a step runs and records all of them as in training, as
MXNet does with the graph of a hybridized block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.errors import TraceError
from memplan.mxnet.trace.operators import LOOP, NORMS_OF_BATCHES, RECURRENT, depends_on_mode
from memplan.mxnet.train.blocks.calls import Call
from memplan.mxnet.train.blocks.random_order import alone, ops_of

# What computes as in inference in both modes, by operators.
_INSTEAD = dict.fromkeys(NORMS_OF_BATCHES, "give the BatchNorm use_global_stats=True, or ")
_INSTEAD |= dict.fromkeys(("Dropout", *RECURRENT), "give it a dropout of 0, or ")


def refuse_other_modes(block: Any, calls: Sequence[Call], symbol: mx.sym.Symbol) -> None:
    """TraceError where ``symbol``, made by ``calls`` of ``block`` and its loss, has such operators.

    Those that compute the same in all modes are welcome.
    """
    found = in_other_mode(calls, symbol)
    if found is None:
        return
    name, op, in_training = found
    how = (
        "under autograd.pause(): without a plan MXNet does not move its statistics, for it does so "
        "in the backward pass"
        if in_training
        else "in predict mode (autograd.pause(), predict_mode(), set_training(False)): without a "
        "plan MXNet computes it as in inference"
    )
    raise TraceError(
        f"op {name!r} ({op}) in the step of block {block.name!r} is called {how}, and a planned "
        f"step is a graph, in which all runs as in training. If that is meant, write "
        f"F.stop_gradient() in place of autograd.pause(), and train_mode(); if not, "
        f"{_INSTEAD.get(op, '')}compute it outside of the block and its loss, and give the step "
        f"the result as an input or label; or hybridize() the block that sets the mode, with which "
        f"MXNet runs it as in training, too"
    )


def in_other_mode(calls: Sequence[Call], symbol: mx.sym.Symbol) -> tuple[str, str, bool] | None:
    """The first one in ``symbol`` that ``calls`` made so: name, operator, and if in training."""
    calls = [call for call in calls if not (call.in_training and call.is_recorded)]
    if not calls:
        return None
    nodes, known, places_of = ops_of(symbol, calls)
    # An operator in the body of a loop has a mark, and is in the graph of the body by its name.
    within = {name for node in nodes[:known] for name in _names_within(node)}
    for call, place in ((c, k) for c, places in zip(calls, places_of, strict=True) for k in places):
        node = nodes[place]
        is_in_loop = LOOP in node.get("attrs", {}) and node["name"] in within
        for op in _depending(node) if place < known or is_in_loop else ():
            if op in NORMS_OF_BATCHES or not call.in_training:
                return str(node["name"]), op, call.in_training
    return None


def _depending(node: Mapping[str, Any]) -> Iterator[str]:
    """The operators that depend on the mode: ``node``, and those in a loop or branch that it is."""
    if depends_on_mode(alone(node)):
        yield str(node["op"])
    for inner in _within(node):
        yield from _depending(inner)


def _within(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The nodes in the graphs that ``node``, a loop or branch, holds."""
    for graph in node.get("subgraphs", ()):
        yield from graph["nodes"]


def _names_within(node: Mapping[str, Any]) -> Iterator[str]:
    for inner in _within(node):
        yield str(inner["name"])
        yield from _names_within(inner)
