"""Which ops read and write the auxiliary states of a network, such as BatchNorm's statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import has_state_or_user_code, uses_global_statistics
from memplan.mxnet.trace.probe import changed_inputs
from memplan.step.graph import UPDATE


def states_written(node: Node) -> list[Node]:
    """The states that a forward op writes, itself or in its backward op.

    Those of user code and loops are not known.
    """
    asked = not (node.op == UPDATE or node.op.startswith("_backward"))
    if not asked or node.forward is not None or has_state_or_user_code(node):
        return []
    if uses_global_statistics(node) or not any(source.is_variable for source, _ in node.inputs):
        return []
    return [node.inputs[place][0] for place in changed_inputs(node)]


def reads_states(node: Node, states: Collection[Node]) -> bool:
    """Does the output of a forward op depend on the values of any of ``states``?"""
    written = states_written(node)
    return any(source in states and source not in written for source, _ in node.inputs)


def states_touched(node: Node, states: Collection[Node]) -> list[Node]:
    """The ``states`` that an op reads or writes; for a backward op also those of its forward op."""
    touched = [source for source, _ in node.inputs if source in states]
    if node.forward is not None:
        touched += [state for state in states_written(node.forward) if state in states]
    return touched


def states_shared(nodes: Iterable[Node]) -> set[Node]:
    """The states that several of the forward ops among ``nodes`` read or write."""
    forward = [node for node in nodes if node.forward is None]
    states = {state for node in forward for state in states_written(node)}
    readers = Counter(state for node in forward for state in set(states_touched(node, states)))
    return {state for state, count in readers.items() if count > 1}
