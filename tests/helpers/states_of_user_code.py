"""A network whose Custom op writes an auxiliary state that another op reads."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from helpers.networks import Network, dense, var

# What the second attribute says of a norm says nothing of user code.
OF_AVERAGING: dict[str, Any] = {"when": "forward", "use_global_stats": True}


class _Averaging(mx.operator.CustomOp):
    """Moves its state towards the mean of its input, in the one pass or the other."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])
        self._average("forward", in_data, aux)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0])
        self._average("backward", in_data, aux)

    def _average(self, when, in_data, aux):
        if when == self.when:
            aux[0][:] = 0.5 * aux[0] + in_data[0].mean(axis=0)


@mx.operator.register("memplan_averaging")
class _AveragingProp(mx.operator.CustomOpProp):
    def __init__(self, when: str, use_global_stats: str) -> None:
        super().__init__()
        self.when = when

    def list_auxiliary_states(self):
        return ["mean"]

    def infer_shape(self, in_shapes):
        return in_shapes, in_shapes, [in_shapes[0][1:]]

    def create_operator(self, ctx, shapes, dtypes):
        return _Averaging(self.when)


def read_beside_user_code(when: str = "forward") -> Network:
    """Of four losses the first reads, in the ``reader``, a state that the second's writer writes.

    Where it is written in the backward pass, the second reads and the first writes.
    """
    roles = ["reader", "writer"] if when == "forward" else ["writer", "reader"]
    state, trunk = var("mean"), dense(var(), 16, name="trunk")
    losses = []
    for head, role in enumerate([*roles, "", ""]):
        x = trunk
        for layer in range(3):
            x = mx.sym.sin(dense(x, 16), name=f"wave{head}_{layer}")
        if role == "reader":
            x = mx.sym.sin(mx.sym.broadcast_add(x, state, name=role))
        elif role == "writer":
            options = OF_AVERAGING | {"when": when}
            x = mx.sym.Custom(x, state, op_type="memplan_averaging", name=role, **options)
        losses.append(mx.sym.MakeLoss(mx.sym.mean(mx.sym.square(x)), name=f"loss{head}"))
    return mx.sym.Group(losses), {"data": (512, 16)}
