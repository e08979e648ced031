"""The attributes by which MXNet mirrors ops of a network, and networks without them."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.operators import CUDNN_OFF_BEFORE, READS_FOR_PLAN
from memplan.util.numbers import shown

_FLAGS = {"__force_mirroring__", "force_mirroring"}


def check_symbol(net: Any) -> None:
    """ArgumentError for what is no Symbol."""
    if isinstance(net, mx.gluon.Block):
        raise ArgumentError(
            "memplan plans a Symbol, and this is a Gluon block: pass "
            "block(mx.sym.Variable('data')), ended by its loss, or train it by "
            "memplan.mxnet.gluon.TrainStep"
        )
    if not isinstance(net, mx.sym.Symbol):
        raise ArgumentError(
            f"memplan plans an mx.sym.Symbol, got {type(net).__name__}: {shown(net)}"
        )


def has_flags(net: mx.sym.Symbol) -> bool:
    """Is an op of ``net`` flagged for mirroring, as by a mirror plan?"""
    return any(attrs.keys() & _FLAGS for _, attrs in symbol_json.attributes(net))


def without_flags(net: mx.sym.Symbol) -> mx.sym.Symbol:
    """A copy of ``net`` on which no op is flagged for mirroring, as it was before a mirror plan.

    ArgumentError for what is no Symbol.
    """
    check_symbol(net)
    data = symbol_json.parse(net)
    for node in data["nodes"]:
        attrs = node.get("attrs", {})
        for name in _FLAGS:
            attrs.pop(name, None)
        before = attrs.pop(CUDNN_OFF_BEFORE, None)
        if before == "":
            del attrs["cudnn_off"]
        elif before is not None:
            attrs["cudnn_off"] = before
    _take_readers_out(data)
    return symbol_json.load(data)


def _take_readers_out(data: dict[str, Any]) -> None:
    """Let others read what they read before a mirror plan put an identity op behind it.

    MXNet leaves out the nodes that then nobody reads.
    """
    nodes = data["nodes"]
    read = {
        place: node["inputs"][0]
        for place, node in enumerate(nodes)
        if READS_FOR_PLAN in node.get("attrs", {})
    }
    for entry in (*(entry for node in nodes for entry in node["inputs"]), *data["heads"]):
        if entry[0] in read:
            entry[:2] = read[entry[0]][:2]
    for place, (source, *_) in read.items():
        nodes[source]["name"] = nodes[place]["name"]
