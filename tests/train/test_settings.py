"""Settings of a script in dicts of its own classes, as those whose keys are attributes."""

from __future__ import annotations

import itertools
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

from helpers.block_runs import Values, differences, gradients
from helpers.blocks import CPU, SOFTMAX, vectors
from memplan.mxnet.gluon import TrainStep, planned
from memplan.mxnet.train.blocks.settings import are_set, is_setting, settings

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


class Keys(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Made(dict):
    """Missing keys are made when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        return self.setdefault(name, Made())


class Own(dict):
    """A dict that is that of its own attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__dict__ = self


class Frozen(dict):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("frozen")


class Ambiguous(list):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])


Pair = namedtuple("Pair", "width layers")

# Classes of dicts, of each of which a script has its options.
KINDS: dict[str, Callable[..., Any]] = {"keys": Keys, "made": Made, "own": Own, "frozen": Frozen}


class Configured(gluon.HybridBlock):
    """Some layers, and a list of odd comparison beside them."""

    def __init__(self, config: Any) -> None:
        super().__init__(prefix="net_")
        self.config, self.odd = config, Ambiguous([1, 2])
        with self.name_scope():
            self.body = nn.Dense(12, activation="tanh")
            self.scores = nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.scores(self.body(x) * self.config["scale"]["by"])


def left_by(plan: bool, kind: str, *, hybridized: bool) -> list[Values]:
    """Losses and gradients of steps between which a number in the options changes."""
    mx.random.seed(3)
    config = KINDS[kind](scale=KINDS[kind](by=1.0))
    net = Configured(config)
    net.initialize(mx.init.Xavier(), ctx=CPU)
    x, y = vectors()
    net(x)
    if hybridized:
        net.hybridize()
    loss = gluon.loss.SoftmaxCrossEntropyLoss(weight=config["scale"]["by"])
    net = planned(net, **OPTIONS) if plan else net
    found = []
    for scale in (1.0, 0.5):
        dict.__setitem__(config["scale"], "by", scale)
        with mx.autograd.record():
            losses = loss(net(x), y)
        losses.backward()
        found.append({"loss": losses.asnumpy(), **gradients(net)})
    assert not config.keys() - {"scale"}
    return found


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_with_options_in_a_dict_of_the_scripts_trains_as_without_a_plan(
    kind: str, hybridized: bool
) -> None:
    left = [left_by(plan, kind, hybridized=hybridized) for plan in (False, True)]
    assert not differences(*left)


def test_options_that_are_global_and_those_that_a_loss_reads_may_be_such_a_dict() -> None:
    config = Keys(scale=2.0)

    def loss(scores: Any, labels: Any) -> Any:
        return SOFTMAX(scores, labels) * config.scale

    def scaled(F: Any, x: Any) -> Any:  # noqa: N803
        return x * config.scale

    mx.random.seed(3)
    net = nn.HybridSequential()
    net.add(nn.Dense(12, activation="tanh"), nn.HybridLambda(scaled))
    net.initialize(mx.init.Xavier(), ctx=CPU)
    x, y = vectors()
    step = TrainStep(net, loss, **OPTIONS)
    before = step(x, y).asnumpy()
    config.scale = 1.0
    with mx.autograd.predict_mode():
        expected = loss(net(x), y).asnumpy()
    assert np.array_equal(step(x, y).asnumpy(), expected)
    assert not np.array_equal(before, expected)


class Decaying(mx.lr_scheduler.LRScheduler):
    def __init__(self) -> None:
        super().__init__(base_lr=0.1)
        self.config = Keys(factor=0.5)

    def __call__(self, num_update: int) -> float:
        return float(self.base_lr * self.config.factor**num_update)


def test_a_step_that_updates_takes_the_rates_of_a_scheduler_with_such_a_dict() -> None:
    left = []
    for within in (False, True):
        mx.random.seed(3)
        net = nn.HybridSequential(prefix="net_")
        net.add(nn.Dense(10, in_units=12, prefix="layer_"))
        net.initialize(mx.init.Xavier(), ctx=CPU)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"lr_scheduler": Decaying()})
        step = TrainStep(net, SOFTMAX, trainer=trainer if within else None, **OPTIONS)
        x, y = vectors()
        for _ in range(3):
            step(x, y)
            if not within:
                trainer.step(len(x))
        left.append(net.collect_params()["layer_weight"].data().asnumpy())
        assert trainer._optimizer.num_update == 3
    assert np.array_equal(*left)


VALUES: list[Any] = [
    *(kind(a=1, b=kind(c=2.0), items=2, values=3) for kind in KINDS.values()),
    OrderedDict(a=1, b=[2, (3,)]),
    defaultdict(list, a=[1]),
    Counter("aab"),
    Pair(1, [2]),
    Pair(1, 2),
    {"nan": [float("nan"), np.float32("nan")]},
    [True, -0.0, None, "word", {"a": (np.int64(1), {"b": []})}],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_copy_of_a_setting_is_of_its_class_and_has_what_it_had(value: Any) -> None:
    now = {"value": value}
    found = settings(now)
    assert type(found["value"]) is type(value)
    assert repr(found["value"]) == repr(value)
    assert are_set(now, found)


def test_a_copy_of_a_setting_stays_as_it_was_when_that_changes_deep_within() -> None:
    values: list[Any] = [Own(a=Own(b=1)), Keys(a=Keys(b=1)), {"a": Pair({"b": 1}, 2)}]
    for value in values:
        now = {"value": value}
        found = settings(now)
        part = value["a"][0] if isinstance(value["a"], Pair) else value["a"]
        part["b"] = 2
        kept = found["value"]["a"]
        assert not are_set(now, found)
        assert (kept[0] if isinstance(kept, Pair) else kept)["b"] == 1


class Rate(float):
    """A number with more beside it."""


class Slotted(dict):
    __slots__ = ("factor",)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and self.factor == other.factor

    __hash__ = None  # type: ignore[assignment]


class Named(tuple):
    """Numbers with more beside them."""


def slotted() -> Slotted:
    made = Slotted(a=1)
    made.factor = [2.0]
    return made


def test_what_a_copy_of_a_setting_has_beside_its_parts_stays_as_it_was() -> None:
    record = np.zeros((), dtype=[("scale", "f4")])[()]
    rate, named = Rate(0.5), Named((1, 2))
    rate.more, named.more = [1], [1]  # type: ignore[attr-defined]
    now = {"record": record, "rate": [rate], "named": (named,), "slotted": [slotted()]}
    found = settings(now)
    assert are_set(now, found)
    record["scale"] = 2.0
    rate.more.append(2)  # type: ignore[attr-defined]
    named.more.append(2)  # type: ignore[attr-defined]
    now["slotted"][0].factor.append(3.0)
    assert found["record"]["scale"] == 0.0
    assert found["rate"][0].more == [1]
    assert found["named"][0].more == [1]
    assert found["slotted"][0].factor == [2.0]
    assert not are_set(now, found)


def test_a_copy_of_a_setting_has_attributes_as_it_had() -> None:
    own = settings({"own": Own(a=Own(b=1))})["own"]
    assert own.a is own["a"]
    assert own.a.b == 1
    whole = Keys(part=Keys(b=1))
    object.__setattr__(whole.part, "whole", whole)
    kept = settings({"whole": whole})["whole"]
    assert object.__getattribute__(kept.part, "whole") is kept
    assert settings({"made": defaultdict(list, a=[1])})["made"]["missing"] == []


def test_order_counts_where_the_class_says_so() -> None:
    ordered = OrderedDict(a=1, b=2)
    found = settings({"ordered": ordered})
    ordered.move_to_end("a")
    assert not are_set({"ordered": ordered}, found)
    assert [*found["ordered"]] == ["a", "b"]


def test_numbers_are_told_apart_as_python_tells_them() -> None:
    nan = float("nan")
    for one, other in itertools.product([1, True, 1.0, np.float32(1)], repeat=2):
        assert are_set({"a": one, "b": [one]}, settings({"a": other, "b": [other]}))
    assert are_set({"a": 0.0}, settings({"a": -0.0}))
    assert are_set({"a": nan, "b": [nan]}, settings({"a": nan, "b": [nan]}))
    assert not are_set({"a": float("nan")}, settings({"a": nan}))
    assert not are_set({"a": 1}, settings({"a": "1"}))


def test_what_holds_an_array_is_no_setting_whatever_else_it_holds() -> None:
    numbers = dict.fromkeys(range(9), 1)
    assert is_setting(numbers)
    assert is_setting([*numbers])
    assert not is_setting({**numbers, 9: mx.nd.ones(1)})
    assert not is_setting([*numbers, [np.ones(2)]])
    assert not are_set({"a": {"b": mx.nd.ones(1)}}, settings({"a": {"b": 1}}))


def test_a_vocabulary_is_looked_at_without_a_call_for_each_word() -> None:
    words = {"words": {str(number): number for number in range(1000)}}
    found = settings(words)
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(event))
    try:
        are_the_same = are_set(words, found)
    finally:
        sys.setprofile(None)
    assert are_the_same
    assert len(calls) < 50


def test_a_setting_whose_class_compares_oddly_is_taken_to_have_changed() -> None:
    assert not are_set({"a": Ambiguous([1])}, settings({"a": Ambiguous([1])}))
