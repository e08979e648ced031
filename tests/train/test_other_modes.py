"""Parts of a step in other modes than that of training, of which Symbols know nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import assert_equal, gradients
from helpers.blocks import CPU
from memplan.errors import TraceError
from memplan.mxnet.gluon import TrainStep, planned

QUICKLY: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}
Part = Callable[[Any, Any, Any], Any]


def by_set_training(part: Part, *args: Any) -> Any:
    before = autograd.set_training(False)
    try:
        return part(*args)
    finally:
        autograd.set_training(before)


def within(scope: Callable[[], Any]) -> Callable[..., Any]:
    def computed(part: Part, *args: Any) -> Any:
        with scope():
            return part(*args)

    return computed


SCOPES: dict[str, Callable[..., Any]] = {
    "predict_mode": within(autograd.predict_mode),
    "pause": within(autograd.pause),
    "record": within(lambda: autograd.record(train_mode=False)),
    "set_training": by_set_training,
}


class Normed(gluon.HybridBlock):
    """A norm that sets the mode itself."""

    def __init__(self) -> None:
        super().__init__(prefix="normed_")
        with self.name_scope():
            self.norm = nn.BatchNorm(in_channels=6)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        with autograd.predict_mode():
            return self.norm(x)


class OtherInTraining(mx.operator.CustomOp):
    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self.assign(out_data[0], req[0], in_data[0] * (2 if is_train else 3))


@mx.operator.register("other_in_training")
class OtherInTrainingProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> OtherInTraining:
        return OtherInTraining()


class Net(gluon.HybridBlock):
    """A ``part`` of a dense layer's output, which ``scope`` computes."""

    def __init__(self, part: Part, scope: Callable[..., Any] = SCOPES["predict_mode"]) -> None:
        super().__init__(prefix="net_")
        self.part, self.scope = part, scope
        with self.name_scope():
            self.dense, self.norm = nn.Dense(6, in_units=6), nn.BatchNorm(in_channels=6)
            self.fixed = nn.BatchNorm(in_channels=6, use_global_stats=True)
            self.lstm = gluon.rnn.LSTM(6, input_size=6)
            self.single = gluon.rnn.LSTM(6, input_size=6, dropout=0.3)
            self.dropping = gluon.rnn.LSTM(6, 2, input_size=6, dropout=0.3)
            self.normed = Normed()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.dense(x)
        return x + self.scope(self.part, self, F, x)


def loop_of(body: Callable[[Any, Any], Any]) -> Part:
    def loop(net: Any, F: Any, x: Any) -> Any:  # noqa: N803
        outputs, _ = F.contrib.foreach(lambda d, s: (body(F, d) + s, s), x, F.zeros((6,)))
        return outputs

    return loop


def normed(net: Any, F: Any, x: Any) -> Any:  # noqa: N803
    return net.norm(x)


PREDICTED: dict[str, Part] = {
    "Dropout": lambda net, f, x: f.Dropout(x),
    "LeakyReLU": lambda net, f, x: f.LeakyReLU(x, act_type="rrelu")[0],
    "RNN": lambda net, f, x: net.dropping(f.expand_dims(x, axis=0)).reshape((-1, 6)),
    "Custom": lambda net, f, x: f.Custom(x, op_type="other_in_training"),
    "Dropout, in a loop": loop_of(lambda f, x: f.Dropout(x)),
}
ALIKE: dict[str, Part] = {
    "dense": lambda net, f, x: f.softmax(net.dense(f.relu(x))),
    "global": lambda net, f, x: net.fixed(x),
    "always": lambda net, f, x: f.Dropout(x, mode="always"),
    "nothing dropped": lambda net, f, x: f.Dropout(x, p=0),
    "leaky": lambda net, f, x: f.LeakyReLU(x, act_type="leaky"),
    "lstm": lambda net, f, x: net.lstm(f.expand_dims(x, axis=0)).reshape((-1, 6)),
    "random": lambda net, f, x: f.random.uniform_like(x),
    "one layer": lambda net, f, x: net.single(f.expand_dims(x, axis=0)).reshape((-1, 6)),
    "loop": loop_of(lambda f, x: f.tanh(x)),
    "unused": lambda net, f, x: (net.norm(x), x)[1],
}


def begun(net: Any) -> Any:
    mx.random.seed(1)
    net.initialize(mx.init.Xavier(), ctx=CPU)
    return net


def batch() -> Any:
    return mx.nd.arange(24, ctx=CPU).reshape((4, 6)) / 20


def trained(net: Any) -> Any:
    mx.random.seed(2)
    with autograd.record():
        loss = (net(batch()) ** 2).sum()
    loss.backward()
    return gradients(net) | {
        "loss": loss.asnumpy(),
        "moving": net.norm.running_mean.data().asnumpy(),
    }


@pytest.mark.parametrize("scope", SCOPES)
def test_a_norm_is_refused_in_every_scope(scope: str) -> None:
    message = r"op 'net_batchnorm0_fwd' \(BatchNorm\).* is called in predict mode.*use_global_stats"
    with pytest.raises(TraceError, match=message):
        trained(planned(begun(Net(normed, SCOPES[scope])), **QUICKLY))


@pytest.mark.parametrize("name", PREDICTED)
def test_operators_that_ask_for_the_mode_are_refused(name: str) -> None:
    op = name.partition(",")[0]
    with pytest.raises(TraceError, match=rf"\({op}\) in the step of block 'net' is called in pred"):
        trained(planned(begun(Net(PREDICTED[name])), **QUICKLY))


@pytest.mark.filterwarnings(
    "ignore:block 'net' is not hybridized, and a planned step runs its loop"
)
@pytest.mark.parametrize("name", ALIKE)
def test_what_computes_the_same_in_both_modes_is_planned(name: str) -> None:
    one, other = Net(ALIKE[name]), Net(ALIKE[name])
    assert_equal(trained(begun(one)), trained(planned(begun(other), **QUICKLY)))


def stopped(net: Any, F: Any, x: Any) -> Any:  # noqa: N803
    return F.stop_gradient(net.norm(x))


class BesideLoop(gluon.HybridBlock):
    """Calls a layer in predict mode, of which nothing reads the result, and again in a loop."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.norm, self.drop = nn.BatchNorm(in_channels=6), nn.Dropout(0.5)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        with autograd.predict_mode():
            self.drop(x)
        return loop_of(lambda _, d: self.drop(d))(self, F, self.norm(x))


@pytest.mark.filterwarnings(
    "ignore:block 'net' is not hybridized, and a planned step runs its loop"
)
def test_what_nothing_reads_is_not_taken_for_one_in_a_loop() -> None:
    one, other = begun(BesideLoop()), begun(BesideLoop())
    assert_equal(trained(one), trained(planned(other, **QUICKLY)))


def test_a_norm_in_training_mode_is_planned() -> None:
    one, other = (begun(Net(stopped, within(autograd.train_mode))) for _ in range(2))
    assert_equal(trained(one), trained(planned(other, **QUICKLY)))


def in_training(part: Part, *args: Any) -> Any:
    with autograd.pause(train_mode=True):
        return part(*args)


@pytest.mark.parametrize("part", [stopped, loop_of(lambda f, x: f.BatchNorm(f.Dropout(x)))])
def test_a_norm_is_refused_whose_statistics_do_not_move(part: Part) -> None:
    with pytest.raises(TraceError, match=r"is called under autograd.pause\(\): .* statistics"):
        trained(planned(begun(Net(part, in_training)), **QUICKLY))


def test_dropout_under_a_pause_in_training_mode_is_planned() -> None:
    def dropped(net: Any, F: Any, x: Any) -> Any:  # noqa: N803
        return F.stop_gradient(F.Dropout(x))

    one, other = (begun(Net(dropped, in_training)) for _ in range(2))
    assert_equal(trained(one), trained(planned(other, **QUICKLY)))


@pytest.mark.parametrize("cached", [False, True])
def test_a_hybridized_layer_is_called_in_the_mode_of_its_caller(cached: bool) -> None:
    net = begun(Net(normed))
    net.norm.hybridize()
    if cached:
        net(batch())
    with pytest.raises(TraceError, match=r"net_batchnorm0_fwd.*is called in predict mode"):
        trained(planned(net, **QUICKLY))


@pytest.mark.parametrize("of", ["block", "layer"])
def test_what_a_graph_sets_itself_counts_for_nothing(of: str) -> None:
    """MXNet runs it in the mode in which the hybridized block is called."""
    results = []
    for plan in (False, True):
        net = begun(
            Net(normed)
            if of == "block"
            else Net(lambda n, f, x: n.normed(x), within(autograd.train_mode))
        )
        (net if of == "block" else net.normed).hybridize()
        results.append(trained(planned(net, **QUICKLY) if plan else net))
    assert_equal(*results)


class Distilling(gluon.HybridBlock):
    """A loss by a teacher, in predict mode where it ``predicts``; by none where that is None."""

    def __init__(self) -> None:
        super().__init__(prefix="loss_")
        self.predicts: bool | None = True
        with self.name_scope():
            self.teacher = nn.BatchNorm(in_channels=6)

    def hybrid_forward(self, F: Any, outputs: Any, x: Any) -> Any:  # noqa: N803
        if self.predicts is None:
            return (outputs**2).sum()
        with autograd.predict_mode() if self.predicts else autograd.train_mode():
            expected = F.stop_gradient(self.teacher(x))
        return ((outputs - expected) ** 2).sum()


@pytest.mark.parametrize("first", [True, False, None])
def test_a_loss_is_refused_in_the_step_that_predicts(first: bool | None) -> None:
    """In a later step, too, where it is the only thing that is called."""
    net, loss = begun(nn.Dense(6, in_units=6, prefix="net_")), begun(Distilling())
    step = TrainStep(net, loss, **QUICKLY)
    if not first:
        loss.predicts = first
        for _ in range(2):
            step(batch(), batch())
    loss.predicts = True
    with pytest.raises(TraceError, match=r"op 'loss_batchnorm0_fwd' .* is called in predict mode"):
        step(batch(), batch())
