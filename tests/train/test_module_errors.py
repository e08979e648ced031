"""What a Module refuses, and how it stands after an error."""

from __future__ import annotations

import warnings
from typing import Any

import mxnet as mx
import pytest

from helpers.fitting import NETWORKS, batches, planned
from helpers.networks import two_headed_net
from memplan.errors import ArgumentError, BudgetError, TraceError, UsageError
from memplan.mxnet import BucketingModule, Module
from memplan.step.schedule import Schedule
from memplan.strategies import Outcome, Status
from memplan.strategies.base import Problem


def test_update_without_a_step() -> None:
    network = NETWORKS["residual"]
    module = planned(network[0])
    data = batches(network)
    module.bind(data.provide_data, data.provide_label, inputs_need_grad=True)
    module.init_params()
    module.init_optimizer()
    with pytest.raises(UsageError, match=r"step.*given gradients.*make it a mx\.mod\.Module"):
        module.update()
    with pytest.raises(UsageError, match="training step"):
        module.get_input_grads()


def test_what_is_refused() -> None:
    net, shapes = two_headed_net()
    module = planned(net, label_names=["early_label", "late_label"])
    labels = [("early_label", (4, 2)), ("late_label", (4,))]
    with pytest.raises(ArgumentError, match=r"'features_output' is no loss.*BlockGrad"):
        module.bind(list(shapes.items()), labels)
    module.bind(list(shapes.items()), labels, for_training=False)

    network = NETWORKS["residual"]
    data = batches(network)
    module = planned(network[0], group2ctxs={"one": mx.cpu(0)})
    with pytest.raises(ArgumentError, match="group2ctxs"):
        module.bind(data.provide_data, data.provide_label)


@pytest.mark.parametrize("context", ["cpu", [], (), 3, mx.cpu, [mx.cpu(), "gpu"]])
def test_what_is_no_context(context: Any) -> None:
    """MXNet's Module fails, too: some of these when it is made, others when it is bound."""
    network = NETWORKS["residual"]
    data = batches(network)

    def train(kind: Any, source: Any, *more: Any) -> None:
        module = kind(source, *more, context=context)
        module.bind(data.provide_data, data.provide_label)

    def generated(_: int) -> Any:
        return network[0], ["data"], ["softmax_label"]

    with pytest.raises((TypeError, AttributeError, IndexError)):
        train(mx.mod.Module, network[0])
    with pytest.raises(ArgumentError, match=r"must be a context such as mx\.gpu\(0\), or a list"):
        train(Module, network[0])
    with pytest.raises(ArgumentError, match=r"must be a context such as mx\.gpu\(0\), or a list"):
        train(BucketingModule, generated, 8)


def test_a_training_step_without_backward() -> None:
    """Gradients and statistics are those of it: MXNet's would be those of the step before."""
    network = NETWORKS["residual"]
    module = planned(network[0])
    data = batches(network)
    module.bind(data.provide_data, data.provide_label)
    module.init_params()
    module.init_optimizer()
    batch = data.next()
    module.forward_backward(batch)
    module.forward(batch, is_train=True)
    with pytest.raises(UsageError, match=r"backward\(\) was not called"):
        module.update()
    advice = "BatchNorm's statistics.* those of inference; a mirror plan"
    with pytest.warns(UserWarning, match=advice):
        module.forward(batch, is_train=True)
    module.backward()
    module.update()


def test_only_symbols_are_trained() -> None:
    with pytest.raises(ArgumentError, match=r"HybridSequential.*TrainStep"):
        planned(mx.gluon.nn.HybridSequential())


class Interrupted:
    """A strategy whose user presses Ctrl-C at first."""

    presses = 1

    def solve(self, problem: Problem) -> Outcome:
        if self.presses:
            self.presses -= 1
            raise KeyboardInterrupt
        return Outcome(Status.FEASIBLE, Schedule.unplanned(problem.graph))


def test_an_interrupt_leaves_the_module_as_it_was() -> None:
    network = NETWORKS["residual"]
    data = batches(network)
    module = planned(network[0], strategy=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        module.bind(data.provide_data, data.provide_label)
    assert not module.binded
    assert module.symbol is network[0]
    module.bind(data.provide_data, data.provide_label)
    assert module.plan is not None


def test_a_step_whose_making_was_interrupted_lacks_no_backward() -> None:
    """Nothing was trained: the next batch of that shape warns of nothing."""
    network = NETWORKS["residual"]
    data = batches(network)
    strategy = Interrupted()
    strategy.presses = 0
    module = planned(network[0], strategy=strategy)
    module.bind(data.provide_data, data.provide_label)
    module.init_params()
    module.init_optimizer()
    module.forward_backward(data.next())
    nrows, *shape = data.provide_data[0].shape
    larger = mx.io.DataBatch([mx.nd.ones((2 * nrows, *shape))], [mx.nd.zeros(2 * nrows)])
    strategy.presses = 1
    with pytest.raises(KeyboardInterrupt):
        module.forward_backward(larger)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        module.forward_backward(larger)
    module.update()


@pytest.mark.long
def test_an_impossible_budget_leaves_the_module_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.planning.least.SEARCH_SECONDS", 0.5)
    network = NETWORKS["residual"]
    data = batches(network)
    module = planned(network[0], budget="1 kB")
    with pytest.raises(BudgetError) as caught:
        module.bind(data.provide_data, data.provide_label)
    assert caught.value.lowest_nbytes
    assert not module.binded
    assert module.symbol is network[0]


def test_what_no_packed_step_can_train_is_not_put_down_to_updates_within() -> None:
    data = mx.sym.Variable("data")
    terms = [
        mx.sym.FullyConnected(data, mx.sym.Variable("w"), num_hidden=3, no_bias=True)
        for _ in range(2)
    ]
    net = mx.sym.SoftmaxOutput(terms[0] + terms[1], name="softmax")
    module = Module(net, realisation="updating")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TraceError, match="two different variables are both named 'w'"):
            module.bind([("data", (2, 4))], [("softmax_label", (2,))])
