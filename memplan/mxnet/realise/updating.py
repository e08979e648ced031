"""Packed steps that update a parameter as soon as its gradient is complete.

A gradient dies at the update that reads it, instead of waiting for the end of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from memplan.errors import TraceError
from memplan.mxnet.realise.packed import Packed
from memplan.mxnet.realise.rewrite import explicit_order
from memplan.mxnet.trace.arguments import wanted
from memplan.mxnet.trace.form import is_in_halves
from memplan.mxnet.trace.nnvm import Entry, EntryInfo, Infos, Node, dependencies, depth_first
from memplan.mxnet.trace.operators import is_sparse_embedding
from memplan.step.graph import UPDATE


@dataclass(frozen=True)
class Updating(Packed):
    """Packed, with an update for every gradient, which is no output of the step then.

    An update reads the gradient and the parameter, in this order, and writes nothing into the
    array. It follows all that reads the parameter.
    """

    name: ClassVar[str] = "updating"
    updates: ClassVar[bool] = True

    def ended(
        self, heads: Sequence[Entry], noutputs: int, requests: Mapping[str, str]
    ) -> list[Entry]:
        """An update in place of every gradient; TraceError for one that cannot be used up."""
        order = depth_first(heads)
        if is_in_halves(order):
            raise TraceError(
                "a step in halves cannot update the parameters: what computes the loss may have "
                "gradients of its own for them; use realisation='packed'"
            )
        variables = {node.name: node for node in order if node.is_variable}
        readers: dict[Node, list[Node]] = {}
        for node in order:
            for source in dict.fromkeys(source for source, _ in node.inputs):
                readers.setdefault(source, []).append(node)
        updates: list[Entry] = []
        for name, gradient in zip(wanted(requests), heads[noutputs:], strict=True):
            if requests[name] == "add":
                raise TraceError(
                    f"the gradient of {name!r} is added up over steps (grad_req='add'), so it "
                    f"cannot be used up within one; use realisation='packed'"
                )
            if gradient[0].forward is not None and is_sparse_embedding(gradient[0].forward):
                raise TraceError(
                    f"the gradient of {name!r} is sparse, so it is not in packed memory, where it "
                    f"could be used up; use realisation='packed'"
                )
            weight = variables[name]
            if any(node is weight for node, _ in heads[:noutputs]):
                raise TraceError(
                    f"{name!r} is an output of the network, which would be the updated one at the "
                    f"end of the step; use realisation='packed'"
                )
            updates.append((_update(weight, gradient, readers.get(weight, [])), 0))
        return [*heads[:noutputs], *updates]

    def ordered(self, order: Sequence[Node], forward: Collection[Node]) -> list[Node]:
        """Updates, and what is computed for one alone, as early as possible, too.

        But behind the forward pass: where one of several losses is complete early, they could come
        before the others.
        """
        early = explicit_order(order, rank_of=_for_one_update(order))
        return sorted(early, key=lambda node: node not in forward)


def _update(weight: Node, gradient: Entry, readers: Sequence[Node]) -> Node:
    source, k = gradient
    info = source.infos.outputs[k]
    output = info and EntryInfo((0,), info.dtype, info.itemsize)
    return Node(
        UPDATE,
        f"{weight.name}_update",
        inputs=[gradient, (weight, 0)],
        control=tuple(readers),
        infos=Infos((info, weight.infos.outputs[0]), (output,)),
    )


def _for_one_update(order: Sequence[Node]) -> dict[Node, int]:
    """The updates, and those ops of the backward pass that lead to one alone.

    For each the number of ops from there to the update.
    """
    backward: set[Node] = set()
    for node in order:
        if node.forward is not None or any(other in backward for other in dependencies(node)):
            backward.add(node)
    # The one update, or None where there are several.
    leads_to: dict[Node, Node | None] = {}
    distance: dict[Node, int] = {}
    for node in reversed(order):
        if node.op == UPDATE:
            leads_to[node] = node
        goal = leads_to.get(node)
        for source in dependencies(node):
            update = leads_to.setdefault(source, goal)
            leads_to[source] = goal if update is goal else None
            distance[source] = max(distance.get(source, 0), distance.get(node, 0) + 1)
    nodes = (node for node in order if node in backward and leads_to.get(node) is not None)
    return {node: distance.get(node, 0) for node in nodes}
