"""Which ops read and write the auxiliary states of a network, such as BatchNorm's statistics.

A BatchNorm that fixes its gamma, as it does by default, writes ones over it in its forward call, of
which MXNet tells nobody (nn/batch_norm.cc): where other ops read that gamma, it is a state, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from memplan.errors import TraceError
from memplan.mxnet.trace.nnvm import Entry, Node
from memplan.mxnet.trace.operators import (
    fixes_gamma,
    ignored_inputs,
    is_loop_or_branch,
    uses_global_statistics,
)
from memplan.mxnet.trace.probe import changed_inputs
from memplan.step.graph import UPDATE


def states_written(node: Node) -> list[Node]:
    """The states that a forward op writes, itself or in its backward op.

    Loops and branches write none: MXNet cannot differentiate one that reads a state.
    """
    asked = not (node.op == UPDATE or node.op.startswith("_backward"))
    if not asked or node.forward is not None or is_loop_or_branch(node):
        return []
    if uses_global_statistics(node) or not any(source.is_variable for source, _ in node.inputs):
        return []
    return [node.inputs[place][0] for place in changed_inputs(node)]


def states_of(nodes: Iterable[Node]) -> set[Node]:
    """The states that the forward ops among ``nodes`` write, and the gammas that they fix.

    Only those gammas that other ops read: when the others become ones nothing depends on it.
    """
    forward = [node for node in nodes if node.forward is None and node.op != UPDATE]
    gammas = {source for source, _ in _shared_gammas(forward) if source.is_variable}
    return gammas.union(state for node in forward for state in states_written(node))


def check_gammas(forward: Sequence[Node], heads: Iterable[Entry]) -> None:
    """TraceError for a gamma that ops of the ``forward`` pass compute, fix, and read elsewhere.

    What they read would depend on the schedule, as on whether it is computed again.
    """
    outputs = set(heads)
    fixing = {node.inputs[1]: node for node in forward if fixes_gamma(node)}
    shared = _shared_gammas(forward)
    for gamma, node in fixing.items():
        if not gamma[0].is_variable and (gamma in shared or gamma in outputs):
            raise TraceError(
                f"op {node.name!r} ({node.op}) has fix_gamma=True, and writes ones over its gamma, "
                f"{gamma[0].name!r}, which is computed and read elsewhere, too; leave the gamma "
                f"out, or set fix_gamma=False"
            )


def _shared_gammas(forward: Sequence[Node]) -> set[Entry]:
    """What some of these ops fix and others read the numbers of."""
    fixed = {node.inputs[1] for node in forward if fixes_gamma(node)}
    if not fixed:
        return set()
    return {
        entry
        for node in forward
        for place, entry in enumerate(node.inputs)
        if entry in fixed
        and not (place == 1 and fixes_gamma(node))
        and place not in ignored_inputs(node)
    }


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
    states = states_of(forward)
    readers = Counter(state for node in forward for state in set(states_touched(node, states)))
    return {state for state, count in readers.items() if count > 1}
