"""A Module whose batches change their shape: plans, memory, gradients and states."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.fitting import (
    CLASSES,
    MIB,
    NETWORKS,
    TWO,
    Make,
    Result,
    assert_same,
    batches,
    differing,
    fit,
    planned,
    seed,
    state,
    steps,
)
from helpers.networks import Network, residual_net
from memplan.errors import ArgumentError, UsageError
from memplan.planning.shapes import ShapePlanner


class Growing(mx.operator.CustomOp):
    """Multiplies by the number of training steps that this very object has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.nsteps = 0

    def forward(self, is_train: Any, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self.nsteps += is_train
        self.assign(out_data[0], req[0], in_data[0] * (self.nsteps if is_train else 1))

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        self.assign(in_grad[0], req[0], out_grad[0] * self.nsteps)


@mx.operator.register("growing")
class GrowingProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Growing:
        return Growing()


def with_growing() -> Network:
    hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="hidden")
    for _ in range(3):
        hidden = mx.sym.tanh(hidden * 2)
    hidden = mx.sym.Custom(hidden, op_type="growing")
    scores = mx.sym.FullyConnected(hidden, num_hidden=CLASSES, name="scores")
    return mx.sym.SoftmaxOutput(scores, name="softmax"), {"data": (8, 20)}


def test_user_code_forgets_what_it_keeps_where_shapes_change() -> None:
    """As in the executors that MXNet makes at every change, for evaluation by other shapes, too."""
    assert_same(with_growing(), 8, 8)
    assert_same(with_growing(), 8, 5, 8, 8, 5)


@pytest.mark.parametrize("context", [mx.cpu(), TWO], ids=["one", "two"])
def test_a_smaller_last_batch(context: Any) -> None:
    network = NETWORKS["residual"]
    module = assert_same(network, 8, 8, 5, context=context)
    sizes = {plan.trace.shapes["data"][0] for plan in module._plans.plans.values()}
    # Evaluation has seen batches of 6, and of 3 per device, which were not planned unless trained.
    assert sizes == ({8, 5} if context == mx.cpu() else {4, 3, 2})


def test_added_gradients_outlive_a_change_of_shape() -> None:
    network = NETWORKS["residual"]

    def run(make: Make) -> Result:
        module = make(network[0])
        for _ in steps(module, network, 8, 5, 8, grad_req="add"):
            pass
        return state(module)

    assert not differing(run(mx.mod.Module), run(planned))


def test_set_params_on_shapes_that_are_not_trained() -> None:
    """They need no plan."""
    network = NETWORKS["residual"]
    module, _ = fit(planned, network)
    nplans = len(module._plans.plans)
    values = module.get_params()
    module.forward(batches(network, 2).next(), is_train=False)
    module.set_params(*values)
    assert module.output_shapes == [("softmax_output", (2, CLASSES))]
    assert len(module._plans.plans) == nplans


def test_plans_are_remembered() -> None:
    network = NETWORKS["residual"]
    module = planned(network[0], context=TWO)
    for _ in steps(module, network, 8, 4, 8, 4):
        pass
    whole, half = module._plans.plans.values()
    assert module.plan is whole
    module.bind(
        batches(network, 4).provide_data, batches(network, 4).provide_label, force_rebind=True
    )
    assert module.plan is half


def test_shapes_share_their_memory() -> None:
    def resident_mib() -> float:
        mx.nd.waitall()
        return (
            int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
        )

    network = residual_net(size=64, filters=32)
    module = planned(network[0])
    found = [resident_mib() for _ in steps(module, network, 16, 12)]
    first, second = (plan.allocated_nbytes / MIB for plan in module._plans.plans.values())
    assert second > 0.5 * first > 20
    assert found[1] - found[0] < 0.75 * second


def test_binding_again_frees_the_memory_before() -> None:
    network = NETWORKS["residual"]
    module = planned(network[0])
    for batch in steps(module, network, 8, 5):
        module.forward(batch, is_train=False)
    small = batches(network, 4)
    group = module._exec_group
    executors = (*group.execs, *group._default_execs)
    held = [weakref.ref(found._training) for found in executors if found._training is not None]
    del group, executors
    gc.disable()
    try:
        module.bind(small.provide_data, small.provide_label, force_rebind=True)
        assert [reference() for reference in held] == [None] * len(held) != []
    finally:
        gc.enable()


def test_states_outlive_a_change_of_shape() -> None:
    """Those whose shape is not that of the batch."""
    net, shapes = NETWORKS["residual"]
    net = mx.sym.broadcast_add(net, mx.sym.Variable("state", shape=(1, CLASSES)))

    def run(make: Make) -> list[np.ndarray]:
        module = make(mx.sym.MakeLoss(net), state_names=["state"])
        data = batches((net, shapes), 8, 5)
        module.bind(data.provide_data, data.provide_label)
        seed()
        module.init_params(mx.init.Xavier())
        module.set_states(value=2)
        outputs = []
        for batch in data:
            module.forward_backward(batch)
            outputs.append(module.get_outputs()[0].asnumpy())
        return outputs

    stock, ours = run(mx.mod.Module), run(planned)
    assert all(map(np.array_equal, stock, ours))
    assert np.all(ours[1] >= 2)


@pytest.mark.parametrize("is_train", [True, False])
def test_inputs_that_need_other_parameters_are_an_error(is_train: bool) -> None:
    """MXNet says so, too; parameters of zeros would take the place of those that were trained."""
    network = NETWORKS["noisy"]
    module = planned(network[0])
    trained = [state(module) for _ in steps(module, network)][-1]
    batch = mx.io.DataBatch([mx.nd.ones((8, 24))], [mx.nd.zeros(8)])
    with pytest.raises(ArgumentError, match=r"the shape of 'fc0_weight' would be \(8, 24\)"):
        module.forward(batch, is_train=is_train)
    assert not differing(trained, state(module))


def test_inference_takes_the_memory_of_the_gradients() -> None:
    """They are gone then, which is said."""
    network = NETWORKS["residual"]
    module = planned(network[0])
    for batch in steps(module, network):
        module.forward_backward(batch)
        module.forward(batch, is_train=False)
    with pytest.raises(UsageError, match="update"):
        module.update()


def test_a_module_that_is_made_for_every_shape_begins_with_the_plans_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the MutableModule of MXNet's Faster R-CNN does, which binds to the memory of the last."""
    network = NETWORKS["residual"]
    begun_with: list[Any] = []
    search = ShapePlanner._searched

    def noting(planner: ShapePlanner, job: Any, do: Any, limit: Any, nearest: Any) -> Any:
        begun_with.append(nearest)
        return search(planner, job, do, limit, nearest)

    monkeypatch.setattr(ShapePlanner, "_searched", noting)

    def run(make: Make) -> Result:
        current = None
        for size in (8, 5, 8):
            module, data = make(network[0]), batches(network, size)
            shapes = (data.provide_data, data.provide_label)
            module.bind(*shapes, shared_module=current)
            if current is None:
                seed()
                module.init_params(mx.init.Xavier())
                module.init_optimizer(optimizer_params={"learning_rate": 0.1})
            else:
                module.borrow_optimizer(current)
            module.forward_backward(data.next())
            module.update()
            plans.append(getattr(module, "plan", None))
            current = module
        return state(current)

    plans: list[Any] = []
    assert not differing(run(mx.mod.Module), run(planned))
    first, _, last = plans[3:]
    assert last is first
    assert begun_with == [None, first]
    other = planned(network[0], strategy="store_all")
    shapes = [("data", first.trace.shapes["data"])], [("softmax_label", (8,))]
    other.bind(*shapes, shared_module=planned_once(network[0], shapes))
    assert other.plan.strategy == "store_all"


def planned_once(net: mx.sym.Symbol, shapes: Any) -> Any:
    module = planned(net)
    module.bind(*shapes)
    module.init_params()
    return module
