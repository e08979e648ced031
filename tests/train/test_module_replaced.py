"""Scripts that reach into a Module, for its network, executors or gradients: as mx.mod.Module."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet.module.executor_group import DataParallelExecutorGroup

import memplan
from memplan.errors import ArgumentError
from memplan.mxnet import Module

DATA, LABEL = [("data", (4, 5))], [("softmax_label", (4,))]
BATCH = mx.io.DataBatch([mx.nd.arange(20).reshape((4, 5)) / 20], [mx.nd.arange(4)])


def network(activation: Any = mx.sym.relu) -> mx.sym.Symbol:
    body = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="first")
    body = activation(body, name="activation")
    scores = mx.sym.FullyConnected(body, num_hidden=4, name="scores")
    return mx.sym.SoftmaxOutput(scores, name="softmax")


def started(module: Any) -> Any:
    module.bind(DATA, LABEL)
    mx.random.seed(1)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params={"learning_rate": 0.5})
    return module


def step(module: Any) -> list[np.ndarray]:
    """What a training step puts out, what is inferred behind it, and the parameters."""
    module.forward_backward(BATCH)
    outputs = [module.get_outputs()[0].asnumpy()]
    module.update()
    module.forward(BATCH, is_train=False)
    outputs.append(module.get_outputs()[0].asnumpy())
    return outputs + [array.asnumpy() for _, array in sorted(module.get_params()[0].items())]


def by_turns(module: Any) -> list[np.ndarray]:
    """Steps by a network, by another one in its place, and by the first one again."""
    started(module)
    found = step(module)
    for activation in (mx.sym.tanh, mx.sym.relu):
        module._symbol = network(activation)
        module.bind(DATA, LABEL)  # which does nothing, as the module is bound
        module.bind(DATA, LABEL, force_rebind=True)
        found += step(module)
    return found


@pytest.mark.parametrize("realisation", ["packed", "explicit", "updating"])
def test_a_network_that_is_replaced_is_trained_from_the_next_bind_on(realisation: str) -> None:
    stock = by_turns(mx.mod.Module(network()))
    ours = by_turns(Module(network(), realisation=realisation, strategy="store_all"))
    assert all(map(np.array_equal, stock, ours))


def test_plans_are_for_the_network_that_is_there() -> None:
    net, same, other = network(), network(), network(mx.sym.tanh)
    plan = memplan.plan(net, realisation="packed", strategy="store_all", **dict(DATA + LABEL))
    module = started(Module(net, plan=plan))
    module._symbol = same
    module.bind(DATA, LABEL, force_rebind=True)
    assert module.plan is plan
    module._symbol = other
    with pytest.raises(ArgumentError, match="the given plan was made for another network"):
        module.bind(DATA, LABEL, force_rebind=True)
    module._symbol = net
    assert module.plan is plan
    step(module)


def test_a_plan_for_other_dtypes_is_told_how_to_be_made() -> None:
    plan = memplan.plan(network(), realisation="packed", strategy="store_all", **dict(DATA + LABEL))
    module = Module(network(), plan=plan)
    message = r"for other dtypes: .* make it with type_dict=\{'data': 'float64'"
    with pytest.raises(ArgumentError, match=message):
        module.bind(*([mx.io.DataDesc(*of, dtype="float64")] for (of,) in (DATA, LABEL)))


def with_own_executors(module: Any) -> list[np.ndarray]:
    """Steps by executors that a script has made, and behind ``bind`` by those of the module."""
    data = [mx.io.DataDesc(*DATA[0])]
    label = [mx.io.DataDesc(*LABEL[0])]
    started(module)
    module._exec_group = DataParallelExecutorGroup(
        *(module.symbol, module._context, module._work_load_list, data, label),
        *(module._param_names, True, False),
    )
    module.set_params(*module.get_params())
    found = [array for _ in range(2) for array in step(module)]
    module.bind(DATA, LABEL, force_rebind=True)
    return found + step(module)


@pytest.mark.parametrize("realisation", ["packed", "updating"])
def test_executors_that_a_script_makes_train_as_those_of_mxnet(realisation: str) -> None:
    stock = with_own_executors(mx.mod.Module(network()))
    module = Module(network(), realisation=realisation, strategy="store_all")
    with pytest.warns(UserWarning, match="trains without a plan.*mx.mod.Module") as told:
        ours = with_own_executors(module)
    assert len(told) == 1
    assert all(map(np.array_equal, stock, ours))
    assert module.plan.realisation == realisation


def by_the_group(module: Any) -> list[np.ndarray]:
    """Parameters after steps for which a script calls the executors, not the module."""
    started(module)
    for _ in range(2):
        module._exec_group.forward(BATCH, is_train=True)
        module._exec_group.backward()
        module.update()
    return [array.asnumpy() for _, array in sorted(module.get_params()[0].items())]


def test_update_knows_of_steps_for_which_a_script_calls_the_executors() -> None:
    module = Module(network(), realisation="updating", strategy="store_all")
    assert all(map(np.array_equal, by_the_group(mx.mod.Module(network())), by_the_group(module)))
    module._exec_group.forward(BATCH, is_train=True)
    with pytest.warns(UserWarning, match="was not called after the last training step"):
        module.get_params()


def test_a_module_of_mxnet_takes_the_gradients_of_a_planned_one() -> None:
    """As the global network of A3C, which runs no steps: what the refusal of a planned one says."""
    found = []
    for make in (mx.mod.Module, Module):
        local, whole = started(make(network())), started(mx.mod.Module(network()))
        for _ in range(2):
            local.set_params(*whole.get_params())
            local.forward_backward(BATCH)
            pairs = zip(local._exec_group.grad_arrays, whole._exec_group.grad_arrays, strict=True)
            for [gradient], [given] in pairs:
                gradient.copyto(given)
            whole.update()
        found.append([array.asnumpy() for _, array in sorted(whole.get_params()[0].items())])
    assert all(map(np.array_equal, *found))
