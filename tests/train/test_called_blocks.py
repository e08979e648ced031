"""Blocks that are called otherwise than by arrays alone: with a ``__call__`` of their own."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

from memplan.errors import ArgumentError, TraceError, UsageError
from memplan.mxnet.gluon import TrainStep, planned
from memplan.mxnet.train.arrays.nesting import leaves, per_context

REALISATIONS = ["packed", "explicit"]


class Halving(nn.HybridBlock):  # type: ignore[misc]
    """Halves its input before Gluon sees it."""

    def __init__(self) -> None:
        super().__init__(prefix="halving_")
        with self.name_scope():
            self.hidden, self.scores = nn.Dense(5, in_units=6), nn.Dense(3, in_units=5)

    def __call__(self, x: Any, mask: Any = None) -> Any:
        return super().__call__(x * 0.5, mask)

    def hybrid_forward(self, F: Any, x: Any, mask: Any) -> Any:  # noqa: N803
        hidden = F.tanh(self.hidden(x))
        return self.scores(hidden if mask is None else hidden * mask)


def trained(block: Any, calls: list[tuple[Any, ...]]) -> list[np.ndarray]:
    """What the block returns in training steps by these inputs, and its weights after them."""
    trainer = mx.gluon.Trainer(block.collect_params(), "sgd", {"learning_rate": 0.5})
    arrays = []
    for inputs in calls:
        with autograd.record():
            outputs = list(leaves(block(*inputs)))
            loss = outputs[0].square().mean()
        loss.backward()
        trainer.step(1)
        arrays += outputs
    arrays += [p.data() for p in block.collect_params().values()]
    return [array.asnumpy() for array in arrays]


def initialized(block: Any) -> Any:
    mx.random.seed(1)
    block.initialize(mx.init.Xavier(), force_reinit=True)
    return block


def check_equal(block: Any, other: Any, calls: list[tuple[Any, ...]]) -> None:
    expected = trained(initialized(block), calls)
    for array, wanted in zip(trained(initialized(other), calls), expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize("realisation", REALISATIONS)
def test_what_a_call_does_to_the_inputs_is_done_once(realisation: str) -> None:
    batch, mask = mx.nd.random.normal(shape=(4, 6)), mx.nd.random.normal(shape=(4, 5))
    other = planned(Halving(), realisation=realisation, strategy="chen_sqrt")
    check_equal(Halving(), other, [(batch,), (batch, mask), (batch,)])
    assert len(other.planned_step.plans) == 2


@pytest.mark.parametrize("realisation", REALISATIONS)
@pytest.mark.parametrize("hybridized", [False, True])
def test_a_recurrent_layer_returns_states_where_it_was_given_some(
    realisation: str, hybridized: bool
) -> None:
    """They are made by its ``__call__`` where it is given none."""
    layers = [mx.gluon.rnn.LSTM(6, input_size=4, prefix="lstm_") for _ in range(2)]
    for layer in layers if hybridized else []:
        layer.hybridize()
    batch = mx.nd.random.normal(shape=(5, 3, 4))
    states = [mx.nd.random.normal(shape=(1, 3, 6)) for _ in range(2)]
    other = planned(layers[1], realisation=realisation, strategy="chen_sqrt")
    calls = [(batch,), (batch,)] if hybridized else [(batch,), (batch, states), (batch,)]
    check_equal(layers[0], other, calls)
    assert other(batch).shape == (5, 3, 6)


def test_a_step_calls_the_block_itself() -> None:
    """Its own inputs come from the caller, not from a ``__call__``."""
    batch, block, other = mx.nd.random.normal(shape=(4, 6)), Halving(), Halving()
    step = TrainStep(initialized(block), strategy="chen_sqrt", realisation="packed")
    with autograd.record():
        expected = initialized(other)(batch)
    np.testing.assert_array_equal(step.forward(batch).asnumpy(), expected.asnumpy())


def layers(count: int) -> nn.HybridSequential:
    block = nn.HybridSequential(prefix="layers_")
    with block.name_scope():
        for n in range(count):
            block.add(nn.Dense(5, in_units=5, activation="relu" if n % 2 else "tanh"))
    return block


def test_a_slice_of_a_planned_block_is_a_block_that_is_not_planned() -> None:
    """HybridSequential makes it by the class of the block that is sliced."""
    batch, block, other = mx.nd.random.normal(shape=(4, 5)), layers(3), layers(3)
    planned(other, realisation="packed", strategy="chen_sqrt")
    check_equal(block[:2], other[:2], [(batch,), (batch,)])
    assert type(other[:2]) is nn.HybridSequential
    check_equal(block, other, [(batch,), (batch,)])
    assert other.planned_step.plans


class Answer(NamedTuple):
    """What some blocks return."""

    scores: Any
    others: Any


class Several(nn.HybridBlock):  # type: ignore[misc]
    """Returns tuples, a list and a named tuple."""

    def __init__(self) -> None:
        super().__init__(prefix="several_")
        with self.name_scope():
            self.scores = nn.Dense(3, in_units=5)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        scores = self.scores(x)
        return Answer(scores, (F.tanh(scores), [F.relu(scores)])), F.sigmoid(scores)


def kinds(value: Any) -> Any:
    """The types of what is nested."""
    return type(value), list(map(kinds, value)) if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("hybridized", [False, True])
def test_a_block_returns_tuples_and_lists_as_without_a_plan(hybridized: bool) -> None:
    batch, block, other = mx.nd.random.normal(shape=(4, 5)), Several(), Several()
    planned(other, realisation="packed", strategy="chen_sqrt")
    returned = []
    for each in (block, other):
        initialized(each).hybridize(hybridized)
        with autograd.record():
            returned.append(each(batch))
    assert kinds(returned[1]) == kinds(returned[0])
    assert type(returned[1]) is (list if hybridized else tuple)
    check_equal(block, other, [(batch,), (batch,)])


def test_a_step_returns_tuples_as_the_loss_does() -> None:
    block = initialized(Several())
    step = TrainStep(
        block, lambda out: Answer(out[0].scores, out[0].others), keep_outputs=True, strategy="evict"
    )
    assert isinstance(step(mx.nd.random.normal(shape=(4, 5))), Answer)
    assert isinstance(step.outputs[0].others, tuple)


def factor_of(value: Any) -> int:
    """Another one for a named tuple, another tuple and a list."""
    return 3 if isinstance(value, Answer) else 2 if isinstance(value, tuple) else 1


class Asking(nn.HybridBlock):  # type: ignore[misc]
    """Asks what its second input is."""

    def __init__(self) -> None:
        super().__init__(prefix="asking_")
        with self.name_scope():
            self.scores = nn.Dense(5, in_units=5)

    def hybrid_forward(self, F: Any, x: Any, pair: Any) -> Any:  # noqa: N803
        return self.scores(x) * pair[0] * pair[1] * factor_of(pair)


def pairs() -> list[Any]:
    two = [mx.nd.random.normal(shape=(4, 5)) for _ in range(2)]
    return [two, tuple(two), Answer(*two), two]


@pytest.mark.parametrize("hybridized", [False, True])
def test_a_block_gets_tuples_and_lists_as_without_a_plan(hybridized: bool) -> None:
    batch, block, other = mx.nd.random.normal(shape=(4, 5)), Asking(), Asking()
    planned(other, realisation="packed", strategy="chen_sqrt")
    block.hybridize(hybridized)
    other.hybridize(hybridized)
    check_equal(block, other, [(batch, pair) for pair in pairs()])


@pytest.mark.parametrize("hybridized", [False, True])
def test_a_loss_gets_tuples_and_lists_as_without_a_plan(hybridized: bool) -> None:
    def loss(scores: Any, pair: Any) -> Any:
        return (scores * pair[0] * factor_of(pair) - pair[1]).square().mean(axis=1)

    batch, block = mx.nd.random.normal(shape=(4, 5)), initialized(Asking())
    block.hybridize(hybridized)
    step = TrainStep(block, loss, realisation="packed", strategy="chen_sqrt")
    for pair in pairs():
        with autograd.record():
            expected = loss(block(batch, pair), pair)
        losses = step((batch, pair), pair)
        np.testing.assert_array_equal(losses.asnumpy(), expected.asnumpy())


@pytest.mark.parametrize("kind", [list, Answer._make, tuple])
def test_what_is_split_over_contexts_is_put_together_alike(kind: Any) -> None:
    parts = [[mx.nd.zeros(1, ctx) for ctx in (mx.cpu(0), mx.cpu(1))] for _ in range(2)]
    split = per_context(kind(parts), None)
    assert split is not None
    assert [kinds(batch) for batch, _ in split] == [kinds(kind([*parts[0]]))] * 2


def test_a_call_with_a_number_trains_unplanned_and_says_so() -> None:
    """MXNet's own blocks take numbers where they are not hybridized."""

    class Scaled(nn.HybridBlock):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(prefix="scaled_")
            with self.name_scope():
                self.scores = nn.Dense(3, in_units=5)

        def hybrid_forward(self, F: Any, x: Any, factor: Any) -> Any:  # noqa: N803
            return F.tanh(self.scores(x) * factor)

    batch, other = mx.nd.random.normal(shape=(4, 5)), planned(Scaled(), strategy="chen_sqrt")
    with pytest.warns(UserWarning, match=r"called with more than arrays \(float\)"):
        check_equal(Scaled(), other, [(batch, 0.5), (batch, 2.0)])
    assert not other.planned_step.plans


def test_an_argument_that_has_a_name_only_is_kept() -> None:
    class Scaled(Halving):
        def __call__(self, x: Any, mask: Any) -> Any:
            return self.forward(x, mask=mask, factor=2.0)

        def forward(self, x: Any, mask: Any, *, factor: float = 1.0) -> Any:
            return super().forward(x * factor, mask)

    batch, mask = mx.nd.random.normal(shape=(4, 6)), mx.nd.random.normal(shape=(4, 5))
    other = planned(Scaled(), realisation="packed", strategy="chen_sqrt")
    with pytest.warns(UserWarning, match=r"called with more than arrays \(factor\)"):
        check_equal(Scaled(), other, [(batch, mask), (batch, mask)])


def test_a_forward_is_called_by_the_names_of_its_arguments() -> None:
    class Named(Halving):
        def __call__(self, x: Any, mask: Any = None) -> Any:
            return self.forward(x * 0.5, mask=mask)

        def forward(self, x: Any, factor: Any = None, mask: Any = None) -> Any:
            assert factor is None
            return super().forward(x, mask)

    batch, mask = mx.nd.random.normal(shape=(4, 6)), mx.nd.random.normal(shape=(4, 5))
    other = planned(Named(), realisation="packed", strategy="chen_sqrt")
    check_equal(Named(), other, [(batch, mask), (batch, mask)])
    assert other.planned_step.plans


@pytest.mark.parametrize("infers_before", [False, True])
@pytest.mark.parametrize("realisation", REALISATIONS)
def test_a_forward_calls_the_graph_of_a_hybridized_block(
    realisation: str, infers_before: bool
) -> None:
    class Forward(Halving):
        def forward(self, x: Any, mask: Any = None) -> Any:
            return super().forward(x * 0.5, mask) * 2

    batch, blocks = mx.nd.random.normal(shape=(4, 6)), (Forward(), Forward())
    for block in blocks:
        initialized(block).hybridize()
        if infers_before:
            block(batch)
    other = planned(blocks[1], realisation=realisation, strategy="chen_sqrt")
    check_equal(blocks[0], other, [(batch,), (batch,)])
    assert other.planned_step.plans


def test_a_call_with_a_dict_trains_unplanned_and_says_so() -> None:
    class Named(Halving):
        def __call__(self, batch: Any) -> Any:
            return self.forward(batch)

        def forward(self, batch: Any) -> Any:
            return super().forward(batch["x"], None)

    batch = {"x": mx.nd.random.normal(shape=(4, 6))}
    other = planned(Named(), strategy="chen_sqrt")
    with pytest.warns(UserWarning, match=r"called with more than arrays \(dict\)"):
        check_equal(Named(), other, [(batch,), (batch,)])


@pytest.mark.parametrize("made", [planned, TrainStep])
def test_a_block_that_returns_a_dict_is_refused(made: Any) -> None:
    class Named(Halving):
        def hybrid_forward(self, F: Any, x: Any, mask: Any) -> Any:  # noqa: N803
            return {"scores": super().hybrid_forward(F, x, mask)}

    batch, call = mx.nd.random.normal(shape=(4, 6)), made(initialized(Named()))
    with autograd.record(), pytest.raises(TraceError, match=r"'halving'.* tuple or list"):
        call(batch)


def test_a_forward_replaced_on_the_object_is_refused() -> None:
    block = layers(2)
    block.forward = lambda x: block[1](block[0](x).square())
    with pytest.raises(ArgumentError, match="forward of block 'layers' was replaced"):
        planned(block)


def test_a_call_whose_gradients_nobody_wants_goes_under_pause() -> None:
    """As the error says of one that is recorded and detached, with the same numbers."""

    def trained_by(block: Any, mode: Any) -> list[np.ndarray]:
        trainer = mx.gluon.Trainer(initialized(block).collect_params(), "sgd")
        for _ in range(2):
            with autograd.record():
                values = block(mx.nd.ones((4, 5)))
                with mode():
                    targets = block(mx.nd.zeros((4, 5))).detach()
                loss = (values - targets).square().mean()
            loss.backward()
            trainer.step(1)
        return [p.data().asnumpy() for p in block.collect_params().values()]

    def noisy() -> Any:
        block = layers(2)
        block.add(nn.BatchNorm(in_channels=5), nn.Dropout(0.3))
        return block

    expected = trained_by(noisy(), nullcontext)
    block = planned(noisy(), realisation="packed", strategy="chen_sqrt")
    with pytest.raises(UsageError, match=r"autograd\.pause\(train_mode=True\)"):
        trained_by(block, nullcontext)
    found = trained_by(block, lambda: autograd.pause(train_mode=True))
    for array, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_a_planned_child_is_replaced_by_another() -> None:
    """As in fine-tuning: MXNet asks whether the new one is of the class of the old one."""
    block, other, batch = Halving(), Halving(), mx.nd.random.normal(shape=(4, 6))
    planned(other.hidden, realisation="packed", strategy="chen_sqrt")
    for each in (block, other):
        each.hidden = nn.Dense(5, in_units=6, prefix="new_")
    check_equal(block, other, [(batch,), (batch,)])
    planned(other.scores)
    with pytest.raises(TypeError, match="Changing attribute type"):
        other.scores = nn.Dropout(0.1)


class WritesInputs(nn.HybridBlock):  # type: ignore[misc]
    """Puts new states into the list that it gets, as GluonNLP's BiLMEncoder does."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=4)

    def hybrid_forward(self, F: Any, x: Any, states: Any) -> Any:  # noqa: N803
        states[0] = F.tanh(self.dense(x) + states[0])
        return states[0] * 2, states


def test_lists_that_a_block_writes_into() -> None:
    """They are the caller's where it is not hybridized, which a step cannot do."""
    found = []
    for is_planned in (False, True):
        mx.random.seed(3)
        net = WritesInputs()
        net.initialize()
        net.hybridize()
        if is_planned:
            planned(net, strategy="chen_sqrt")
        states = [mx.nd.ones((3, 4))]
        for _ in range(2):
            with autograd.record():
                outputs, states = net(mx.nd.ones((3, 4)), states)
                loss = (outputs**2).sum()
            loss.backward()
            states = [state.detach() for state in states]
            found.append((loss.asscalar(), *net.dense.weight.grad().asnumpy().ravel()))
    assert found[:2] == found[2:]
    net.hybridize(active=False)
    with autograd.record(), pytest.raises(TraceError, match="writes into a list"):
        net(mx.nd.ones((3, 4)), states)
