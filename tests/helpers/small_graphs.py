"""Training graphs of about ten ops in which recomputation pays, drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from memplan.step.graph import Handover, Op, Tensor, TrainingGraph

SIZES = st.sampled_from((1, 1, 2, 3, 5, 0))


@st.composite
def small_graphs(draw: st.DrawFn, max_forward: int = 4, *, handovers: bool = True) -> TrainingGraph:
    """Forward ops that read each other, then backward ops that read what these have written.

    Nearly all forward ops may run again, some write two tensors, some hand over; every backward
    op reads the one before it. Without backward ops (one time in four), all ops are as free as
    the forward ones.
    """
    nforward = draw(st.sampled_from((max_forward, max_forward - 1)))
    nbackward = nforward if draw(st.integers(0, 3)) else 0
    nforward = nforward if nbackward else 2 * nforward
    ops: list[Op] = []
    tensors: list[Tensor] = []
    for i in range(nforward + nbackward):
        backward = i >= nforward
        before = ops[i - 1].outputs[:1] if i else ()
        forward = [a for op in ops[: min(i, nforward)] for a in op.outputs]
        inputs = list(before)
        if backward:
            twin = ops[nforward + nbackward - 1 - i]
            inputs += draw(st.lists(st.sampled_from((*twin.inputs, *twin.outputs)), max_size=3))
        if forward:
            inputs += draw(st.lists(st.sampled_from(forward), max_size=1 if backward else 2))
        inputs = list(dict.fromkeys(inputs)) if draw(st.booleans()) else inputs
        outputs = []
        for _ in range(1 if draw(st.integers(0, 2)) else 2):
            outputs.append(len(tensors))
            size = draw(SIZES)
            tensors.append(Tensor(f"{i}.{len(outputs)}", size, size))
        possible = [
            (s, o)
            for s, a in enumerate(inputs)
            for o, b in enumerate(outputs)
            if tensors[a].nbytes == tensors[b].nbytes
        ]
        chosen = []
        if possible and handovers and draw(st.integers(0, 2)) == 0:
            chosen = draw(st.lists(st.sampled_from(possible), unique=True, max_size=2))
        ops.append(
            Op(
                f"{'b' if backward else 'f'}{i}",
                "op",
                tuple(inputs),
                tuple(outputs),
                float(draw(st.integers(0, 4))),
                recomputable=draw(st.integers(0, 7)) > 0,
                handovers=tuple(Handover(s, o, draw(st.integers(0, 3)) == 0) for s, o in chosen),
            )
        )
    read = {a for op in ops for a in op.inputs}
    heads = tuple(a for a in range(len(tensors)) if a not in read and draw(st.booleans()))
    heads += tuple(a for a in ops[-1].outputs if a not in heads)
    return TrainingGraph(tuple(ops), tuple(tensors), heads, nforward)
