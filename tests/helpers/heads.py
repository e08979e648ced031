"""Steps of several losses."""

from __future__ import annotations

from helpers.graphs import tensors
from memplan.step.graph import Op, TrainingGraph


def heads(count: int, length: int = 3, *, once: bool = False) -> TrainingGraph:
    """``count`` chains on one trunk, each with a loss, in MXNet's order.

    With ``once`` the first ops of chains must not run again.
    """
    ops = [Op("trunk", "forward", (), (0,), 1.0)]
    losses = []
    for head in range(count):
        before = 0
        for layer in range(length):
            name, number = f"f{head}_{layer}", len(ops)
            again = not (once and layer == 0)
            ops.append(Op(name, "forward", (before,), (number,), 1.0, recomputable=again))
            before = number
        losses.append(before)
    nforward, ends = len(ops), []
    for loss in reversed(losses):
        gradient: tuple[int, ...] = ()
        for twin in range(loss, loss - length, -1):
            reads, number = (*gradient, twin), len(ops)
            name = f"b{ops[twin].name[1:]}"
            options = {"recomputable": False, "differentiates": twin, "after": (twin,)}
            ops.append(Op(name, "backward", reads, (number,), 1.0, **options))
            gradient = (number,)
        ends += gradient
    ops.append(Op("sum", "backward", tuple(ends), (len(ops),), 1.0, recomputable=False))
    names = {op.name: 1 for op in ops}
    return TrainingGraph(tuple(ops), tensors(**names), (len(ops) - 1,), nforward)
