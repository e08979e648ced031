"""Classes of a script's that hear of the classes that are derived from them."""

from __future__ import annotations

import abc
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.mxnet.gluon import planned

Block = Any
X = mx.nd.arange(24).reshape((4, 6)) / 7


class Told(gluon.HybridBlock):
    """Wants an argument, and names that differ."""

    models: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, task: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        assert cls.__name__ not in Told.models
        Told.models[cls.__name__] = cls
        cls.task = task


class Registering(type):
    """Has the names of all that it makes."""

    models: ClassVar[dict[str, type]] = {}

    def __new__(mcs, name: str, bases: Any, own: Any, *, task: str) -> Any:
        assert name not in mcs.models
        return super().__new__(mcs, name, bases, own)

    def __init__(cls, name: str, bases: Any, own: Any, *, task: str) -> None:
        super().__init__(name, bases, own)
        Registering.models[name] = cls
        cls.task = task

    def mro(cls) -> list[type]:
        return super().mro()


class Abstract(Registering, abc.ABCMeta):
    """Both."""


class _Layers:
    """Calls its bases as a script does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with self.name_scope():
            self.out = nn.Dense(3, in_units=6)

    def hybrid_forward(self, f: Any, x: Any) -> Any:
        return f.tanh(self.out(x))

    def __repr__(self) -> str:
        return f"my {super().__repr__()}"


class OfBase(_Layers, Told, task="tanh"):
    pass


class OfMeta(_Layers, gluon.HybridBlock, metaclass=Registering, task="tanh"):
    pass


class OfBoth(_Layers, gluon.HybridBlock, metaclass=Abstract, task="tanh"):
    def __init_subclass__(cls, **options: Any) -> None:
        raise AssertionError("nothing is derived from it")


class OfSlots(_Layers, gluon.HybridBlock):
    __slots__ = ("of_a_script",)

    def __init_subclass__(cls, **options: Any) -> None:
        raise AssertionError("nothing is derived from it")


KINDS = [OfBase, OfMeta, OfBoth, OfSlots]


def trained(kind: Callable[..., Block], *, plan: bool) -> tuple[Block, list[Any]]:
    net = kind(prefix="net_")
    net.initialize(mx.init.One())
    if plan:
        planned(net, strategy="chen_sqrt")
    with autograd.record():
        loss = net(X)
    loss.backward()
    assert bool(plan) == (plan and bool(net.planned_step.plans))
    return net, [loss.asnumpy(), *(p.grad().asnumpy() for p in net.collect_params().values())]


@pytest.mark.parametrize("kind", KINDS)
def test_no_class_hears_of_that_of_a_planned_block(kind: Any) -> None:
    registered = dict(Told.models), dict(Registering.models)
    (_, expected), (net, results) = (trained(kind, plan=plan) for plan in (False, True))
    assert all(map(np.array_equal, expected, results))
    assert (Told.models, Registering.models) == registered
    assert isinstance(net, kind)
    assert issubclass(type(net), kind)
    assert not issubclass(nn.Dense, type(net))
    assert repr(net).startswith(f"my {kind.__name__}(")
    assert getattr(net, "task", "tanh") == "tanh"


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_one_class_are_planned_each(kind: Any) -> None:
    one, other = (trained(kind, plan=True)[0] for _ in range(2))
    assert isinstance(one, type(other))
    assert not issubclass(type(one), type(other))
    assert issubclass(type(one), kind)
    assert not issubclass(nn.Dense, kind)
    assert not isinstance(nn.Dense(3), type(one))
    made = type(one)(prefix="made_")
    assert type(made) is kind


def test_a_copy_of_such_a_block_has_its_class() -> None:
    net, _ = trained(OfBase, plan=True)
    assert type(pickle.loads(pickle.dumps(net.out))) is nn.Dense
    made, args, *_ = net.__reduce_ex__(4)
    assert type(made(*args)) is OfBase


def test_a_class_that_a_script_derives_from_it_is_heard_of() -> None:
    net, _ = trained(OfBase, plan=True)
    try:
        derived = type("Derived", (type(net),), {}, task="more")
        assert Told.models["Derived"] is derived
        assert derived.task == "more"
    finally:
        del Told.models["Derived"]
