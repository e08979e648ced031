"""What a TrainStep refuses, and how it says so."""

from __future__ import annotations

import copy
import fractions
import re
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import assert_equal, gradients, train_step, trained
from helpers.blocks import CPU, SOFTMAX, Computing, conv_net, images, vectors
from helpers.strategies import Counting
from memplan.errors import ArgumentError, BudgetError, TraceError
from memplan.mxnet import Module
from memplan.mxnet.gluon import TrainStep, planned


class Looks(gluon.HybridBlock):
    """Looks at a value, and cannot be hybridized."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return x * x.shape[0]


class Broadcasts(gluon.HybridBlock):
    """Multiplies two shapes as arrays can, and cannot be hybridized."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.dense(x * x.mean(axis=0))


class Sparse(gluon.HybridBlock):
    """Has a sparse parameter."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        self.table = self.params.get("table", shape=(30, 4), stype="row_sparse")


class Twins(gluon.HybridBlock):
    """Has two layers of one name, which MXNet trains if they are initialised one by one."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        self.first, self.second = (nn.Dense(4, in_units=6, prefix="twin_") for _ in range(2))
        self.first.initialize(ctx=CPU)
        self.second.initialize(ctx=CPU)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.first(x) * self.second(x)


def with_gradient() -> Any:
    x, y = images(8)
    x.attach_grad()
    return x, y


def elsewhere() -> Any:
    return tuple(array.copyto(mx.cpu(1)) for array in images(8))


def half_elsewhere() -> Any:
    x, y = images(8)
    return x, y.copyto(mx.cpu(1))


def labels_not_split() -> Any:
    x, y = images(8)
    return gluon.utils.split_and_load(x, [mx.cpu(0), mx.cpu(1)]), y


def brain_floats() -> Any:
    x, y = images(8)
    return x.astype(np.dtype([("bfloat16", np.uint16)])), y


def frozen() -> Any:
    net = conv_net()
    net.collect_params().setattr("grad_req", "null")
    return net


def no_loss(outputs: Any, labels: Any) -> Any:
    return None


def closure(outputs: Any, labels: Any) -> Any:
    return SOFTMAX(outputs, labels) * mx.sym.Variable("hidden")


@pytest.mark.parametrize(
    ("block", "batch", "loss", "error", "message"),
    [
        (nn.Sequential, images, SOFTMAX, ArgumentError, "HybridSequential"),
        (conv_net, images, "softmax", ArgumentError, "'softmax'"),
        (conv_net, images, [], ArgumentError, "loss must be"),
        (Looks, images, SOFTMAX, TraceError, "Looks 'looks.*' cannot be called with Symbols"),
        (Broadcasts, images, SOFTMAX, ArgumentError, r"write F.broadcast_mul\(a, b\)"),
        (conv_net, images, no_loss, TraceError, "must be Symbols"),
        (conv_net, images, closure, ArgumentError, r"'hidden'.* as a Block.*\(outputs, \*labels"),
        (
            conv_net,
            images,
            [SOFTMAX, SOFTMAX],
            ArgumentError,
            "one label each, got losses: 2, outputs: 1, labels: 1",
        ),
        (Sparse, images, SOFTMAX, ArgumentError, "'net_table' is sparse.*stype='default'"),
        (frozen, images, SOFTMAX, ArgumentError, "nothing to train.* call the block itself"),
        (conv_net, brain_floats, SOFTMAX, ArgumentError, "bfloat16"),
        (
            conv_net,
            with_gradient,
            SOFTMAX,
            ArgumentError,
            r"detach.*attach_grad\(grad_req='null'\)",
        ),
        (conv_net, elsewhere, SOFTMAX, ArgumentError, r"on cpu\(1\).*'net_conv0_weight'"),
        (conv_net, half_elsewhere, SOFTMAX, ArgumentError, "one context"),
        (conv_net, labels_not_split, SOFTMAX, ArgumentError, "split the labels"),
        (conv_net, lambda: (3, 4), SOFTMAX, ArgumentError, "got int"),
        (conv_net, lambda: ((), None), SOFTMAX, ArgumentError, "no arrays"),
        (conv_net, lambda: (vectors()[0], None), SOFTMAX, TraceError, "label"),
        (conv_net, vectors, SOFTMAX, ArgumentError, "memplan_input0.*do not fit"),
    ],
)
def test_errors(block: Any, batch: Any, loss: Any, error: Any, message: str) -> None:
    net = block()
    net.initialize(ctx=CPU)
    made = batch(8) if batch is images else batch()
    with pytest.raises(error, match=message):
        train_step(net, loss)(*made)


def detached(F: Any, x: Any) -> Any:  # noqa: N803
    return x * x.detach()


def remembering(F: Any, x: Any, shape: Any = None) -> Any:  # noqa: N803
    return x / shape[0]


def looking_loss(scores: Any, y: Any) -> Any:
    return SOFTMAX(scores, y) / y.shape[0]


@pytest.mark.parametrize(
    ("child", "loss", "message"),
    [
        (Looks, SOFTMAX, r"Looks 'looks.*: hybrid_forward \({}:\d+\) raises Attr.*F.reshape"),
        (
            lambda: Computing(detached),
            SOFTMAX,
            r"Computing 'net' .*: detached \({}:\d+\) raises .*F.BlockGrad",
        ),
        (lambda: Computing(remembering), SOFTMAX, r"remembering \({}:.* call the block on a batch"),
        (
            lambda: nn.Dense(4),
            looking_loss,
            r"looking_loss .*\({}:\d+\) raises .*planned\(block\), whose loss",
        ),
    ],
)
def test_what_cannot_take_symbols_is_named_with_its_line(
    child: Any, loss: Any, message: str
) -> None:
    """The innermost block, and not the one that holds it."""
    net = nn.HybridSequential()
    net.add(nn.Dense(10, prefix="first_"), child())
    net.initialize(ctx=CPU)
    with pytest.raises(TraceError, match=message.format(re.escape(__file__))):
        TrainStep(net, loss)(*vectors())


@pytest.mark.parametrize("loss", [SOFTMAX, None])
def test_batches_on_one_context_are_inputs(loss: Any) -> None:
    """A list is one of batches where each is on a context of its own."""
    net, (x, y) = nn.Dense(10), vectors()
    net.initialize(ctx=CPU)
    step = TrainStep(net, loss)
    call = step.forward if loss is None else step
    with pytest.raises(TraceError, match=r"the 2 arrays, which are on one context, are its inputs"):
        call([x, x], *([] if loss is None else [[y, y]]))


def test_a_loss_of_mxnets_that_lacks_its_label_is_told_nothing_of_symbols() -> None:
    net, (x, _) = nn.Dense(10), vectors()
    net.initialize(ctx=CPU)
    with pytest.raises(TraceError, match=r"label'; if it takes a label, call .*y\)$"):
        TrainStep(net, SOFTMAX)(x)


@pytest.mark.parametrize("x", [[[1.0] * 12] * 2, 3, [None]])
def test_a_batch_size_is_asked_of_arrays(x: Any) -> None:
    """A step with a trainer asks its inputs for it before anything else."""
    net = nn.Dense(10, in_units=12)
    net.initialize(ctx=CPU)
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    for batch_size in (None, 2):
        with pytest.raises(ArgumentError, match="array"):
            train_step(net, SOFTMAX, trainer=trainer)(x, None, batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [0, 0.0, "4", [4], 10**5000], ids=range(5))
def test_what_a_trainer_cannot_divide_by_is_no_batch_size(batch_size: Any) -> None:
    """MXNet's trainer raises an error, too, of another kind; here the step has not run by then."""
    net, _, (x, y) = trained()
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=None)
    with pytest.raises((TypeError, ArithmeticError)):
        trainer.step(batch_size)
    before = {name: p.data().asnumpy() for name, p in net.collect_params().items()}
    with pytest.raises(ArgumentError, match="batch_size must be a number other than 0"):
        train_step(net, trainer=trainer)(x, y, batch_size=batch_size)
    assert_equal(before, {name: p.data().asnumpy() for name, p in net.collect_params().items()})


NO_NUMBERS = ["a", "2", None, 1j, mx.nd.ones(2), 10**5000]
NEAR_ZERO = [5e-324, -1e-310, mx.nd.array([1e-310], dtype="float64")]


@pytest.mark.parametrize(
    ("scale", "message"),
    [(scale, "scale must be a number, got") for scale in NO_NUMBERS]
    + [(scale, "MXNet reads no number so near to 0") for scale in NEAR_ZERO],
    ids=range(len(NO_NUMBERS) + len(NEAR_ZERO)),
)
def test_what_no_gradient_can_be_multiplied_by_is_no_scale(scale: Any, message: str) -> None:
    strategy = Counting([])
    net = conv_net()
    net.initialize(ctx=CPU)
    with pytest.raises(ArgumentError, match=message):
        train_step(net, strategy=strategy)(*images(8), scale=scale)
    assert not strategy.asked


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss", 10**5000, "loss must be a function.* bits"),
        ("realisation", 10**5000, "realisation must be .* bits"),
        ("trainer", 10**5000, "trainer must be a gluon.Trainer.* bits"),
        ("keep_outputs", np.ones(2), r"keep_outputs must be True or False, got array"),
        ("ignore_stale_grad", np.ones(2), r"ignore_stale_grad must be True or False, got array"),
    ],
    ids=range(5),
)
def test_an_argument_of_no_use_is_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TrainStep(nn.Dense(3), **{name: value})


@pytest.mark.parametrize("x", [3, [3], (3, 4), 10**5000, (10**5000, 4)], ids=range(5))
def test_a_step_is_run_on_arrays(x: Any) -> None:
    """Shapes are for plans."""
    net = nn.Dense(10)
    net.initialize(ctx=CPU)
    with pytest.raises(ArgumentError, match=r"inputs and labels must be .* arrays.* got int"):
        TrainStep(net, SOFTMAX)(x, vectors()[1])


@pytest.mark.parametrize("block", [None, mx.sym.Variable("data"), []])
def test_only_hybrid_blocks_are_planned(block: Any) -> None:
    with pytest.raises(
        ArgumentError, match=f"block must be a HybridBlock.* {type(block).__name__}"
    ):
        planned(block)


@pytest.mark.parametrize(
    "value", [[], {}, 3, np.ones(2), mx.nd.ones(1)], ids=lambda v: str(type(v))
)
@pytest.mark.parametrize(
    ("name", "message"),
    [("realisation", "realisation must be 'auto', 'packed'"), ("unseen", "unseen must be one of")],
)
def test_what_is_no_name_is_no_choice(name: str, message: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=message):
        planned(nn.Dense(3), **{name: value})


@pytest.mark.parametrize("budget", ["foo", "4 parsecs", -1, 1.5, []])
def test_what_is_no_budget_is_an_error_before_the_first_step(budget: Any) -> None:
    net = mx.sym.MakeLoss(mx.sym.Variable("data"))
    for make in (lambda: planned(nn.Dense(3), budget=budget), lambda: Module(net, budget=budget)):
        with pytest.raises(ArgumentError, match=r"^the budget .* cannot be used"):
            make()


def test_a_block_that_is_not_initialised_is_named() -> None:
    strategy = Counting([])
    with pytest.raises(ArgumentError, match=r"'net_.*initialize\(\)"):
        train_step(conv_net(), strategy=strategy)(*images(8))
    assert not strategy.asked


@pytest.mark.parametrize("way", ["planned", "step"])
def test_two_parameters_of_one_name(way: str) -> None:
    block, x = Twins(), mx.nd.ones((2, 6))
    step = train_step(block, None)
    call = step.forward if way == "step" else planned(block, strategy="chen_sqrt")
    with autograd.record(), pytest.raises(ArgumentError, match=r"'twin_weight'.*another prefix"):
        call(x)


@pytest.mark.long
def test_a_budget_that_nothing_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.planning.least.SEARCH_SECONDS", 0.5)
    net = conv_net()
    net.initialize(ctx=CPU)
    with pytest.raises(BudgetError, match="least memory"):
        train_step(net, budget="1KiB")(*images(8))


def test_an_input_that_has_a_gradient_to_pass_on() -> None:
    """It would get none; one that recorded ops have merely read has none to pass on."""
    net, before = conv_net(), gluon.nn.Conv2D(3, 3, padding=1, in_channels=3)
    for block in (net, before):
        block.initialize(ctx=CPU)
    x, y = images(8)
    with autograd.record():
        recorded = before(x)
        with pytest.raises(ArgumentError, match=r"detach\(\) it"):
            train_step(net)(recorded, y)
    step = train_step(net)
    for given in (x, recorded.detach()):
        step(given, y)
    assert len(step.plans) == 1


@pytest.mark.parametrize("way", ["planned", "step"])
@pytest.mark.filterwarnings("ignore:planned block .* autograd knows no array")
def test_a_deep_copy_of_a_trained_block(way: str) -> None:
    """MXNet cannot train one, either, until autograd is told of its parameters."""
    net, step, (x, y) = trained()
    step(x, y)
    copied = copy.deepcopy(net)

    def run() -> None:
        if way == "step":
            train_step(copied)(x, y)
            return
        block = copied if hasattr(copied, "planned_step") else planned(copied, strategy="evict")
        with autograd.record():
            loss = SOFTMAX(block(x), y)
        loss.backward()

    error = mx.MXNetError if way == "planned" else ArgumentError
    with pytest.raises(error, match=r"not in a computational|does not know.*copy\.deepcopy"):
        run()
    for request in ("null", "write"):
        copied.collect_params().setattr("grad_req", request)
    run()
    assert_equal(gradients(net), gradients(copied))


class Projection(gluon.HybridBlock):
    """Completes the shape of its weight itself, which MXNet cannot for this operator."""

    def __init__(self) -> None:
        super().__init__(prefix="projection_")
        self.weight = self.params.get("weight", shape=(0, 5), allow_deferred_init=True)

    def infer_shape(self, x: Any, *_: Any) -> None:
        self.weight.shape = (x.shape[-1], 5)

    def hybrid_forward(self, F: Any, x: Any, weight: Any) -> Any:  # noqa: N803
        return F.dot(x, weight)


def test_a_shape_that_only_the_block_infers() -> None:
    net, x = Projection(), mx.nd.ones((2, 3))
    net.initialize()
    step = TrainStep(net, lambda outputs, _: outputs.sum(), strategy="store_all")
    with pytest.raises(ArgumentError, match=r"known in part only.*call the block on a batch first"):
        step(x, mx.nd.ones(2))
    net(x)
    step(x, mx.nd.ones(2))
    assert net.weight.grad().shape == (3, 5)


def test_what_the_script_has_called_of_pythons_library_is_not_where_it_looks() -> None:
    class Divides(gluon.HybridBlock):  # type: ignore[misc]
        def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
            return x * fractions.Fraction(x)

    net = Divides()
    with pytest.raises(TraceError, match=r"hybrid_forward \(.*test_gluon_errors.py:\d+\) raises"):
        TrainStep(net, SOFTMAX)(*vectors())
