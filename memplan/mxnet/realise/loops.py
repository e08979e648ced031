"""The gradients of a while_loop's states, which MXNet computes only where somebody wants them.

The gradients of what the body reads need those of the states after it, in every iteration. Where
that of a state before the loop is not wanted, such as that of data, MXNet 1.9.1 was seen to leave
it out of every iteration, and to add up what memory was before. So it is always asked for. That
cannot be done of a state that the condition reads, which MXNet refuses to record.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from typing import Any

from memplan.errors import TraceError
from memplan.mxnet.trace.inference import WHILE_LOOP
from memplan.mxnet.trace.nnvm import VARIABLE, Node


def states_to_differentiate(forward: Node) -> frozenset[int]:
    """The inputs of a while_loop whose gradients its backward op needs, whoever reads them.

    Of any other op there are none.
    """
    return frozenset(_states(forward)) - _read_by_condition(forward)


def check_loop(forward: Node) -> None:
    """TraceError for a while_loop whose condition reads a state that needs a gradient."""
    if forward.op != WHILE_LOOP:
        return
    states = _states(forward)
    counted = _read_by_condition(forward) & set(states)
    body, places = forward.subgraphs[1], ast.literal_eval(forward.attrs["func_input_locs"])
    place_of = dict(zip(body["arg_nodes"], places, strict=True))
    heads = body["heads"][int(forward.attrs["num_out_data"]) :]
    for state, (head, *_) in zip(states, heads, strict=True):
        if state in counted and not _read_by(body, place_of, head) <= counted:
            raise TraceError(
                f"op {forward.name!r} ({forward.op}) has a condition that reads a state which the "
                f"body computes of others, and MXNet computes no right gradients then; have it "
                f"count iterations instead, or train the block unplanned and not hybridized"
            )


def check_gradients(forward: Node, read: Collection[int]) -> None:
    """TraceError for a while_loop of whose inputs the condition reads one that has a gradient.

    ``read`` are the inputs whose gradients somebody reads. MXNet's executor computes them, but does
    not record the call of a loop that has them.
    """
    if forward.op == WHILE_LOOP and not _read_by_condition(forward).isdisjoint(read):
        raise TraceError(
            f"op {forward.name!r} ({forward.op}) has a condition that reads a state whose gradient "
            f"is wanted, and MXNet cannot record a call of it; have the condition read a state of "
            f"its own, which begins behind BlockGrad"
        )


def _states(forward: Node) -> list[int]:
    """Which inputs of a while_loop are its states before the first iteration, in their order."""
    if forward.op != WHILE_LOOP:
        return []
    places = ast.literal_eval(forward.attrs["func_input_locs"])
    return [places[i] for i in ast.literal_eval(forward.attrs["func_var_locs"])]


def _read_by_condition(forward: Node) -> frozenset[int]:
    return frozenset(ast.literal_eval(forward.attrs.get("cond_input_locs", "()")))


def _read_by(body: Any, place_of: Mapping[int, int], head: int) -> set[int]:
    """The inputs of the loop of which ``head``, a node of the body, is computed."""
    found, to_visit, visited = set(), [head], set()
    while to_visit:
        number = to_visit.pop()
        node = body["nodes"][number]
        if number in visited:
            continue
        visited.add(number)
        if node["op"] == VARIABLE:
            found.add(place_of[number])
        to_visit += [source for source, *_ in node["inputs"]]
    return found
