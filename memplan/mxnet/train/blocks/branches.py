"""Parameters that a block trains in one branch of a ``cond`` and not in the other.

A block that is not hybridized takes one branch in Python: MXNet leaves the gradients alone of what
that does not read, and a trainer leaves such parameters out, or says that they are stale. A step
runs the ``cond`` as an operator, as a graph does, which gives zeros for these gradients.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from memplan.errors import TraceError
from memplan.mxnet.trace.bodies import bodies
from memplan.mxnet.trace.operators import COND
from memplan.mxnet.train.blocks.calls import Entry, Ops, order_between


def refuse_untaken_branches(block: Any, ops: Ops, nread: int, params: Mapping[str, Any]) -> None:
    """TraceError where it depends on a branch whether a parameter of ``block`` has a gradient.

    The first ``nread`` outputs of the network are losses. ``params`` are the parameters by their
    names.
    """
    nodes = enumerate(ops.nodes[: ops.nknown])
    in_python = {k for k, node in nodes if node["op"] == COND and k not in ops.in_graphs}
    if not in_python:
        return
    names = list(dict.fromkeys(ops.operators[place].name for place in ops.trained(params)))
    heads = ops.heads[:nread]
    always = _united(_trained_behind(ops, nread, names, in_python), heads)
    ever = _trained_behind(ops, nread, names, ())
    for place in sorted(in_python & ever.keys()):
        unsure = ever[place] & ~always
        if unsure:
            _refuse(block, ops.operators[place].name, names[(unsure & -unsure).bit_length() - 1])


def _trained_behind(
    ops: Ops, nread: int, names: list[str], in_python: Collection[int]
) -> dict[int, int]:
    """Which of the parameters ``names`` have a gradient if a node has one, by places of nodes.

    They are bits of a number, by their places among the names. Of what is ``in_python`` they are
    those that have one whichever branch is taken.
    """
    bits = {name: 1 << k for k, name in enumerate(names)}
    read = _read(ops)
    inputs = {k: {"inputs": entries} for k, entries in read.items()}
    order = order_between(inputs, ops.heads[:nread], ())
    outputs = {tuple(entry[:2]) for place in order for entry in ops.nodes[place]["inputs"]}
    outputs.update(ops.outputs[:nread])
    found: dict[int, int] = {}
    for place in order:
        own = bits.get(ops.operators[place].name, 0) if ops.operators[place].is_variable else 0
        if place in in_python:
            known = {k for source, k in outputs if source == place}
            branches = _read_by_branches(ops, place, known)
            found[place] = functools.reduce(
                operator.and_, (_united(found, branch) for branch in branches)
            )
        else:
            found[place] = own | _united(found, (source for source, *_ in read[place]))
    return found


def _united(found: Mapping[int, int], places: Iterable[int]) -> int:
    return functools.reduce(operator.or_, (found[place] for place in places), 0)


def _read(ops: Ops) -> dict[int, list[Entry]]:
    """What is differentiated with each node: what it reads, or all that its graph reads."""
    read = {place: list(node["inputs"]) for place, node in enumerate(ops.nodes)}
    for graph in ops.graphs:
        entries = [entry for place in graph.ops for entry in ops.nodes[place]["inputs"]]
        of_graph = [entry for entry in entries if entry[0] not in graph.ops]
        read.update(dict.fromkeys(graph.ops, of_graph))
    return read


def _read_by_branches(ops: Ops, place: int, outputs: Collection[int]) -> list[set[int]]:
    """The places of what each branch of the ``cond`` at this one computes by.

    Only what it computes ``outputs`` by counts, or, if these are none, all of its outputs.
    """
    by_branch = []
    for graph, numbers in bodies(ops.operators[place]):
        heads = [source for source, *_ in graph["heads"]]
        behind = order_between(graph["nodes"], [heads[k] for k in outputs] or heads, ())
        of_variable = zip(graph["arg_nodes"], numbers, strict=True)
        inputs = [number for variable, number in of_variable if variable in {*behind}]
        by_branch.append({ops.nodes[place]["inputs"][number][0] for number in inputs})
    return by_branch


def _refuse(block: Any, branching: str, name: str) -> None:
    raise TraceError(
        f"block {block.name!r} runs the cond {branching!r} in Python, for it is in no hybridized "
        f"block: MXNet leaves parameter {name!r} without a gradient where it takes a branch that "
        f"does not read it, or where the condition alone does, and a planned step gives it zeros, "
        f"by which momentum and weight decay move it. Compute both branches and choose, of a and "
        f"b: F.where(F.broadcast_mul(F.ones_like(a), condition), a, b); freeze the parameter "
        f"(grad_req 'null') if only the condition reads it; or leave the block without a plan"
    )
