"""The gradients of a while_loop's states, which MXNet computes only where somebody wants them.

The gradients of what the body reads need those of the states after it, in every iteration. Where
that of a state before the loop is not wanted, such as that of data, MXNet 1.9.1 was seen to leave
it out of every iteration, and to add up what memory was before. So it is always asked for. That
cannot be done of a state that the condition reads, which MXNet refuses to record, nor of a loop
within another one, or within a branch: nobody but MXNet asks that for gradients.

Also refused here: what is within a loop or a branch and has no shape of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from memplan.errors import TraceError
from memplan.mxnet.trace.attributes import Attributes
from memplan.mxnet.trace.bodies import bodies
from memplan.mxnet.trace.nnvm import VARIABLE, Node, from_json
from memplan.mxnet.trace.op_gradient import gradient
from memplan.mxnet.trace.operators import WHILE_LOOP, takes_shape_of_reader


def states_to_differentiate(forward: Node) -> frozenset[int]:
    """The inputs of a while_loop whose gradients its backward op needs, whoever reads them.

    Of any other op there are none.
    """
    states = _states(forward)
    return frozenset(states) - _read_by_condition(forward) if states else frozenset()


def check_shapes_within(node: Node) -> None:
    """TraceError for a loop or branch with an array whose shape MXNet would infer from its reader.

    MXNet runs what is within op by op, and infers the shape of such an array by itself.
    """
    for graph in node.subgraphs or ():
        for inner in from_json(graph)[0]:
            if takes_shape_of_reader(inner):
                raise TraceError(
                    f"op {node.name!r} ({node.op}) has {inner.name!r} ({inner.op}) within, whose "
                    f"shape {inner.attrs['shape']} is not given in full; MXNet cannot infer it "
                    f"there. Write F.zeros_like of an array of that shape, say, and pass a "
                    f"recurrent layer or cell its states: layer(x, states), "
                    f"cell.unroll(..., begin_state=states)"
                )
            check_shapes_within(inner)


def check_loop(forward: Node) -> None:
    """TraceError for a while_loop whose condition reads a state that needs a gradient."""
    if forward.op != WHILE_LOOP:
        return
    states = _states(forward)
    counted = _read_by_condition(forward) & set(states)
    body, places = forward.subgraphs[1], Attributes(forward).numbers("func_input_locs")
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
    _check_within(forward, {*read, *states_to_differentiate(forward)})


def _check_within(forward: Node, wanted: Collection[int]) -> None:
    """TraceError for a while_loop within ``forward`` that MXNet asks for too few gradients.

    ``wanted`` are the inputs of ``forward`` of which gradients are computed.
    """
    for graph, places in bodies(forward):
        nodes, _ = from_json(graph)
        variables = [node for node in nodes if node.is_variable]
        asked = {node for node, place in zip(variables, places, strict=True) if place in wanted}
        for node in nodes:
            have = {place for place, (source, _) in enumerate(node.inputs) if source in asked}
            if not have.isdisjoint(_differentiable(node)):
                asked.add(node)
            if not states_to_differentiate(node) <= have:
                raise TraceError(
                    f"op {forward.name!r} ({forward.op}) has a while_loop within, of which a state "
                    f"begins with something whose gradient nobody wants, such as data or zeros, "
                    f"and MXNet computes no right gradients then; have that state begin with what "
                    f"depends on a parameter, or take foreach for the loop within"
                )
            _check_within(node, have)


def _differentiable(node: Node) -> set[int]:
    """The inputs that get a gradient which depends on those of the outputs."""
    if not node.inputs or bodies(node):
        return set(range(len(node.inputs)))
    try:
        template = gradient(node, [False] * node.noutputs)
    except TraceError:  # it has none, as an argmax
        return set()
    reads: list[bool] = []

    def depends(entry: tuple[Any, ...]) -> bool:
        return entry[0] == "ograd" or (entry[0] == "node" and reads[entry[1]])

    for part in template.nodes:
        reads.append(any(map(depends, part.inputs)))
    return {place for place, entry in enumerate(template.gradients) if depends(entry)}


def _states(forward: Node) -> list[int]:
    """Which inputs of a while_loop are its states before the first iteration, in their order."""
    if forward.op != WHILE_LOOP:
        return []
    attrs = Attributes(forward)
    places = attrs.numbers("func_input_locs")
    return [places[i] for i in attrs.numbers("func_var_locs")]


def _read_by_condition(forward: Node) -> frozenset[int]:
    return frozenset(Attributes(forward).numbers("cond_input_locs"))


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
