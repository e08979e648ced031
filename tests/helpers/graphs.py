"""Small training graphs for tests: made by hand, or drawn by hypothesis."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hypothesis import strategies as st

from memplan.step.graph import Handover, Op, Tensor, TrainingGraph
from memplan.step.mirroring import mirror
from memplan.step.schedule import Schedule

UNIT = 4  # bytes of one element


def tensors(**nelements: int) -> tuple[Tensor, ...]:
    """Tensors of these names with so many elements of four bytes."""
    return tuple(Tensor(name, UNIT * n, n) for name, n in nelements.items())


def unit_chain(nlayers: int, nelements: int = 1) -> TrainingGraph:
    """``nlayers`` ops f0, f1, ..., then the loss, then the backward ops ..., b1, b0.

    Each takes a second and writes one tensor; each reads the one before it, and b_i also what
    f_i has written. With ``unit_chain(8)`` this is the 17-node chain of Checkmate's paper.
    """
    nodes = 2 * nlayers + 1
    ops = []
    for node in range(nodes):
        before = (node - 1,) if node else ()
        if node < nlayers:
            ops.append(Op(f"f{node}", "forward", before, (node,), 1.0))
        elif node == nlayers:
            ops.append(Op("loss", "loss", before, (node,), 1.0))
        else:
            twin = nodes - 1 - node
            ops.append(
                Op(
                    f"b{twin}",
                    "backward",
                    tuple(dict.fromkeys((*before, twin))),
                    (node,),
                    1.0,
                    recomputable=False,
                    differentiates=twin,
                    after=(twin,),
                )
            )
    names = [op.name for op in ops]
    return TrainingGraph(
        tuple(ops),
        tensors(**dict.fromkeys(names, nelements)),
        heads=(nodes - 1,),
        nforward=nlayers + 1,
    )


def unrolled(nsteps: int) -> TrainingGraph:
    """Each step reads the state before it and a part of one array; its gradient reads the part."""
    ops = [Op("split", "split", (), tuple(range(nsteps)), 0.1)]
    names = [f"part{n}" for n in range(nsteps)]

    def add(name: str, inputs: tuple[int, ...], *, forward_op: int | None = None) -> int:
        is_forward = forward_op is None
        output = (len(names),)
        ops.append(Op(name, "op", inputs, output, 1.0, is_forward, differentiates=forward_op))
        names.append(name)
        return output[0]

    state, inner = (), []
    for n in range(nsteps):
        inner.append(add(f"inner{n}", (n, *state)))
        state = (add(f"state{n}", (inner[n],)),)
    above = add("loss", state)
    nforward = len(ops)
    for n in reversed(range(nsteps)):
        above = add(f"gradient{n}", (above, n, inner[n]), forward_op=1 + 2 * n)
    sizes = {name: {"part": 2, "inner": 6}.get(name.rstrip("0123456789"), 1) for name in names}
    return TrainingGraph(tuple(ops), tensors(**sizes), (above,), nforward)


SIZES = (0, 1, 1, 2, 5)  # zero: a tensor in an array that exists anyway; equal ones: hand-overs


class _Builder:
    """Collects ops and tensors; ``draw`` is hypothesis's."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []

    def add(
        self,
        name: str,
        inputs: Sequence[int],
        sizes: Sequence[int],
        *,
        recomputable: bool,
        differentiates: int | None = None,
        after: Sequence[int] | None = None,
    ) -> tuple[int, ...]:
        outputs = tuple(range(len(self.tensors), len(self.tensors) + len(sizes)))
        self.tensors += [Tensor(f"{name}[{k}]", UNIT * n, n) for k, n in enumerate(sizes)]
        possible = [
            (i, o)
            for i, source in enumerate(inputs)
            for o, target in enumerate(outputs)
            if self.tensors[source].nelements == self.tensors[target].nelements
        ]
        chosen = self.draw(st.lists(st.sampled_from(possible), unique=True)) if possible else []
        if after is None:
            after = () if differentiates is None else (differentiates,)
        self.ops.append(
            Op(
                name,
                "backward" if differentiates is not None else "forward",
                tuple(inputs),
                outputs,
                float(self.draw(st.integers(0, 3))),
                recomputable,
                differentiates,
                tuple(after),
                tuple(Handover(i, o, self.draw(st.booleans())) for i, o in chosen),
            )
        )
        return outputs


@st.composite
def training_graphs(draw: st.DrawFn, max_forward: int = 6) -> TrainingGraph:
    """Forward ops with one to three outputs and their backward ops, with hand-overs.

    The backward op of f_i reads the gradients of some of f_i's outputs and some of f_i's own
    inputs and outputs; it writes the gradient of each input and that of a parameter, a head.
    Gradients of one tensor are summed by an op of their own. Heads are also the tensors that no
    forward op reads.
    """
    make = _Builder(draw)
    some = st.integers(0, 2)
    nforward = draw(st.integers(1, max_forward))
    for i in range(nforward):
        inputs = (
            draw(st.lists(st.sampled_from(range(len(make.tensors))), max_size=3))
            if make.tensors
            else []
        )
        sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
        make.add(f"f{i}", inputs, sizes, recomputable=draw(some) > 0)
    forward = list(make.ops)
    read = {tensor for op in forward for tensor in op.inputs}
    heads = [tensor for op in forward for tensor in op.outputs if tensor not in read]
    terms: dict[int, list[int]] = {}
    for i in reversed(range(nforward)):
        op = forward[i]
        inputs = []
        for tensor in op.outputs:
            arrived = terms.get(tensor, [])
            if len(arrived) > 1:
                size = make.tensors[tensor].nelements
                arrived = list(make.add(f"sum{tensor}", arrived, [size], recomputable=False))
            inputs += arrived
        inputs += [tensor for tensor in (*op.inputs, *op.outputs) if draw(some) == 0]
        distinct = list(dict.fromkeys(op.inputs))
        sizes = [make.tensors[tensor].nelements for tensor in distinct] + [draw(st.integers(0, 2))]
        *gradients, parameter = make.add(
            f"b{i}", inputs, sizes, recomputable=draw(some) == 0, differentiates=i
        )
        for tensor, gradient in zip(distinct, gradients, strict=True):
            terms.setdefault(tensor, []).append(gradient)
        heads.append(parameter)
    return TrainingGraph(tuple(make.ops), tuple(make.tensors), tuple(heads), nforward)


@st.composite
def mirrored_graphs(draw: st.DrawFn, max_forward: int = 6) -> TrainingGraph:
    """Training graphs in MXNet's own order, with the odd things that its gradients may do.

    Beyond :func:`training_graphs`: forward ops that nobody differentiates, or that wait for
    others; outputs that nobody reads; one or two backward ops for a forward op, which read
    gradients and forward tensors in any order and may or may not wait for the forward op, or for
    the op that supplies one of its inputs.
    """
    make = _Builder(draw)
    few = st.integers(0, 3)
    nforward = draw(st.integers(1, max_forward))
    for i in range(nforward):
        ready = range(len(make.tensors))
        inputs = draw(st.lists(st.sampled_from(ready), max_size=3)) if ready else []
        after = [draw(st.integers(0, i - 1))] if i and draw(few) == 0 else []
        sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
        make.add(f"f{i}", inputs, sizes, recomputable=draw(few) > 0, after=after)
    forward = list(make.ops)
    read = {tensor for op in forward for tensor in op.inputs}
    needed = {i for op in forward for i in op.after}
    heads = []
    for i, op in enumerate(forward):
        unread = [tensor for tensor in op.outputs if tensor not in read]
        if len(unread) == len(op.outputs) and i not in needed:
            heads.append(unread.pop(0))
        heads += [tensor for tensor in unread if draw(few) == 0]
    producer = {tensor: i for i, op in enumerate(forward) for tensor in op.outputs}
    terms: dict[int, list[int]] = {}
    for i in reversed(range(nforward)):
        op = forward[i]
        wanted = list(dict.fromkeys(op.inputs))
        for part in range(min(draw(few), 2)):
            inputs = []
            for tensor in op.outputs:
                arrived = terms.get(tensor, [])
                if len(arrived) > 1:
                    size = make.tensors[tensor].nelements
                    terms[tensor] = arrived = list(
                        make.add(f"sum{tensor}", arrived, [size], recomputable=False)
                    )
                inputs += arrived
            inputs += [tensor for tensor in (*op.inputs, *op.outputs) if draw(few) == 0]
            inputs = draw(st.permutations(inputs))
            sources = [i, i, *(producer[tensor] for tensor in op.inputs)]
            after = draw(st.lists(st.sampled_from(sources), max_size=1))
            mine = [tensor for tensor in wanted if draw(st.booleans())] if part == 0 else wanted
            wanted = [tensor for tensor in wanted if tensor not in mine]
            sizes = [make.tensors[tensor].nelements for tensor in mine] + [draw(st.integers(0, 2))]
            *gradients, parameter = make.add(
                f"b{i}.{part}", inputs, sizes, recomputable=False, differentiates=i, after=after
            )
            for tensor, gradient in zip(mine, gradients, strict=True):
                terms.setdefault(tensor, []).append(gradient)
            heads.append(parameter)
    return in_mxnets_order(
        TrainingGraph(tuple(make.ops), tuple(make.tensors), tuple(heads), nforward)
    )


@st.composite
def layered_graphs(draw: st.DrawFn, max_forward: int = 8) -> TrainingGraph:
    """Graphs in MXNet's order in which recomputation pays: layer upon layer, with shortcuts.

    A layer reads the one before it and perhaps an earlier one; its backward op reads its inputs
    (as that of a convolution) or its output (ReLU), and sometimes neither.
    """
    make = _Builder(draw)
    nforward = draw(st.integers(5, max_forward))
    forward: list[tuple[int, ...]] = []
    for i in range(nforward):
        before = list(forward[-1][:1]) if forward else []
        if len(forward) > 1 and draw(st.integers(0, 3)) == 0:
            before.append(draw(st.sampled_from(forward[:-1]))[0])
        sizes = [draw(st.sampled_from((1, 2, 5))), *draw(st.sampled_from(([], [], [], [1])))]
        forward.append(make.add(f"f{i}", before, sizes, recomputable=draw(st.integers(0, 5)) > 0))
    layers = list(make.ops)
    heads = [forward[-1][0]]
    terms: dict[int, list[int]] = {}
    for i in reversed(range(nforward)):
        op = layers[i]
        arrived = terms.get(op.outputs[0], [])
        if len(arrived) > 1:
            size = make.tensors[op.outputs[0]].nelements
            arrived = list(make.add(f"sum{i}", arrived, [size], recomputable=False))
        kept = draw(st.sampled_from((op.inputs, op.inputs, op.outputs, ())))
        sizes = [make.tensors[tensor].nelements for tensor in op.inputs] + [0]
        *gradients, parameter = make.add(
            f"b{i}", [*arrived, *kept], sizes, recomputable=False, differentiates=i
        )
        for tensor, gradient in zip(op.inputs, gradients, strict=True):
            terms.setdefault(tensor, []).append(gradient)
        heads.append(parameter)
    return in_mxnets_order(
        TrainingGraph(tuple(make.ops), tuple(make.tensors), tuple(heads), nforward)
    )


def uneven_chain(length: int) -> TrainingGraph:
    """A chain of ops that take different times, none of which is a round number."""
    graph = unit_chain(length)
    return graph.with_seconds([0.1 + 0.3 * (i * 7 % 11) for i in range(len(graph.ops))])


def in_mxnets_order(graph: TrainingGraph) -> TrainingGraph:
    """``graph`` with its ops in the order in which MXNet runs them."""
    order = mirror(graph, frozenset()).ops
    place = {op: i for i, op in enumerate(order)}
    return dataclasses.replace(graph, ops=tuple(graph.ops[i].renumbered(place) for i in order))


@st.composite
def schedules(draw: st.DrawFn, graph: TrainingGraph, max_again: int = 6) -> Schedule:
    """Any legal order with recomputation, in which every step may read any earlier execution."""
    waiting = set(range(len(graph.ops)))
    executions: dict[int, list[int]] = {}
    ops: list[int] = []
    reads: list[tuple[int, ...]] = []
    again = draw(st.integers(0, max_again))
    while waiting:
        ready = sorted(op for op in waiting if executions.keys() >= _needed(graph, op))
        repeatable = [op for op in executions if graph.ops[op].recomputable]
        if again and repeatable and draw(st.booleans()):
            op = draw(st.sampled_from(repeatable))
            again -= 1
        else:
            op = draw(st.sampled_from(ready))
            waiting.remove(op)
        sources = [executions[graph.producer[tensor]] for tensor in graph.ops[op].inputs]
        reads.append(tuple(draw(st.sampled_from(steps)) for steps in sources))
        executions.setdefault(op, []).append(len(ops))
        ops.append(op)
    sources = [executions[graph.producer[tensor]] for tensor in graph.heads]
    heads = tuple(draw(st.sampled_from(steps)) for steps in sources)
    return Schedule(graph, tuple(ops), tuple(reads), heads)


def _needed(graph: TrainingGraph, op: int) -> set[int]:
    call = graph.ops[op]
    return {*(graph.producer[tensor] for tensor in call.inputs), *call.after}
