"""What of a script sees Symbols in a planned step, where it would see arrays: a warning says so."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

from helpers.blocks import CPU, SOFTMAX, Computing, trained, vectors
from memplan.errors import TraceError
from memplan.mxnet.gluon import TrainStep, planned

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


class Keeping(gluon.HybridBlock):
    """Scores, and what a penalty is computed of, which it keeps in an attribute ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__(prefix="net_")
        self.kind, self.kept = kind, None
        self.everything: list[Any] = []
        with self.name_scope():
            self.body, self.scores = nn.Dense(12, activation="tanh"), nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.body(x)
        if self.kind == "kept":
            self.kept = x
        elif self.kind == "everything":
            self.everything.append({"x": (x,)})
        return self.scores(x)


@pytest.mark.parametrize("kind", ["kept", "everything"])
def test_an_attribute_that_a_loss_may_read(kind: str) -> None:
    net = Keeping(kind)
    net.initialize(ctx=CPU)
    with pytest.warns(UserWarning, match=rf"block 'net_?' keeps what it has computed \({kind}\)"):
        trained(planned(net, **OPTIONS), *vectors())


class Cached(Keeping):
    """It computes with what its first call has computed, in all later ones."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        if self.kept is None:
            self.kept = self.body(x)
        return self.scores(self.kept)


def test_a_step_with_a_loss_tells_of_attributes_that_the_block_itself_reads() -> None:
    """MXNet trains by the batch of the first call, a planned step by its own."""
    for net, is_told in ((Cached("nothing"), True), (Keeping("kept"), False)):
        net.initialize(ctx=CPU)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            TrainStep(net, SOFTMAX, **OPTIONS)(*vectors())
        texts = [str(one.message) for one in told if "keeps what it has" in str(one.message)]
        assert bool(texts) == is_told


class Returning(Keeping):
    """It returns what all its calls have computed, unless it ``begins`` anew."""

    def __init__(self, begins: bool) -> None:
        super().__init__("nothing")
        self.begins = begins

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        self.everything = [] if self.begins else self.everything
        self.everything.append(super().hybrid_forward(F, x))
        return self.everything


def test_what_earlier_calls_have_computed_is_no_part_of_a_later_step() -> None:
    losses: list[Any] = []

    def total(outputs: Any, labels: Any) -> Any:
        return sum(SOFTMAX(output, labels) for output in outputs)

    def growing(outputs: Any, labels: Any) -> Any:
        losses.append(total(outputs, labels))
        return sum(losses)

    for begins, loss in ((True, total), (False, total), (True, growing)):
        net = Returning(begins)
        net.initialize(ctx=CPU)
        step = TrainStep(net, loss, **OPTIONS)
        step(*vectors())
        if begins and loss is total:
            step(*vectors())
            continue
        with pytest.raises(TraceError, match=r"an earlier call has.* in everything of 'net_?'"):
            step(*vectors())


def test_a_hook_of_a_layer() -> None:
    net = Keeping("nothing")
    net.body.register_forward_hook(lambda block, inputs, outputs: None)
    net.initialize(ctx=CPU)
    with pytest.warns(UserWarning, match="hooks of block 'net_dense0' get no arrays"):
        trained(planned(net, **OPTIONS), *vectors())


class OfArrays(Keeping):
    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return super().hybrid_forward(F, x / 2 if F is mx.nd else x)


class OfClass(Keeping):
    def forward(self, x: Any) -> Any:
        return super().forward(x / 2 if isinstance(x, mx.nd.NDArray) else x)


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize(("kind", "name"), [(OfArrays, "hybrid_forward"), (OfClass, "forward")])
def test_a_block_that_asks_for_arrays(kind: Any, name: str, hybridized: bool) -> None:
    """It computes something else in a plan, unless MXNet makes its graph of the same."""
    net = kind("nothing")
    net.initialize(ctx=CPU)
    net.hybridize(hybridized)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained(planned(net, **OPTIONS), *vectors())
    expected = [] if kind is OfArrays and hybridized else [f"{name} of block 'net' asks whether"]
    found = [str(w.message) for w in said if "asks whether" in str(w.message)]
    assert [text[: len(begin)] for text, begin in zip(found, expected, strict=True)] == expected


def is_module(F: Any) -> bool:  # noqa: N803
    return F is mx.nd


def has_shape(x: Any) -> bool:
    try:
        return x.shape is not None
    except AttributeError:
        return False


def is_list(F: Any, x: Any) -> bool:  # noqa: N803
    parts = F.split(x, num_outputs=2)
    return isinstance(parts, list)


helper = types.ModuleType("helper")
vars(helper)["asks_for_arrays"] = is_module

QUESTIONS: dict[str, Callable[[Any, Any], bool]] = {
    "name": lambda f, x: f.__name__ == "mxnet.ndarray",
    "part of the name": lambda f, x: "ndarray" in f.__name__,
    "end of the name": lambda f, x: f.__name__.endswith("ndarray"),
    "other way round": lambda f, x: mx.nd is f,
    "one of": lambda f, x: f in (mx.nd,),
    "hasattr": lambda f, x: hasattr(x, "shape"),
    "getattr": lambda f, x: getattr(x, "context", None) is not None,
    "of a Symbol": lambda f, x: not hasattr(x, "list_arguments"),
    "list": lambda f, x: isinstance(f.split(x, num_outputs=2), list),
    "list with a name": is_list,
    "a function": lambda f, x: is_module(f),
    "a function of a module": lambda f, x: helper.asks_for_arrays(f),
    "part of a function": functools.partial(lambda f, x, number: is_module(f), number=2),
    "a function of attributes": lambda f, x: has_shape(x),
}


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("asks", QUESTIONS.values(), ids=QUESTIONS)
def test_questions_for_arrays(asks: Callable[[Any, Any], bool], hybridized: bool) -> None:
    net = Computing(lambda f, x: x / 2 if asks(f, x) else x)
    net.initialize(ctx=CPU)
    net.hybridize(hybridized)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained(planned(net, **OPTIONS), *vectors())
    found = [str(w.message) for w in said if "asks whether" in str(w.message)]
    assert len(found) == (not hybridized), found


NO_QUESTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "a list of inputs": lambda f, x: f.concat(*x) if isinstance(x, list | tuple) else x,
    "parts": lambda f, x: f.concat(*[part * 2 for part in f.split(x, num_outputs=2)], dim=1),
    "a default": lambda f, x: x * getattr(f, "scale", 1) if x is not None else x,
    "a function of NumPy's": lambda f, x: x * float(np.prod((1, 2))),
    "a mode": lambda f, x: x if f.__name__ != "numpy" and "a" in ("a", "b") else -x,
}


@pytest.mark.parametrize("of", NO_QUESTIONS.values(), ids=NO_QUESTIONS)
def test_no_questions_for_arrays(of: Callable[[Any, Any], Any]) -> None:
    net = Computing(of)
    net.initialize(ctx=CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(planned(net, **OPTIONS), *vectors())
    assert not hasattr(mx.sym.Symbol, "__getattr__")


def test_the_function_of_a_lambda_block_asks() -> None:
    net = nn.HybridSequential()
    net.add(nn.Dense(10), nn.HybridLambda(lambda F, x: x / 2 if is_module(F) else x))  # noqa: N803
    net.initialize(ctx=CPU)
    with pytest.warns(UserWarning, match="hybrid_forward of block .*lambda.* asks whether"):
        trained(planned(net, **OPTIONS), *vectors())


def test_a_function_that_the_block_does_not_call_asks_nothing() -> None:
    net = Computing(lambda f, x: x)
    net.metric = is_module
    net.initialize(ctx=CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(planned(net, **OPTIONS), *vectors())


def test_a_loss_that_asks_for_an_attribute_of_arrays() -> None:
    net = nn.Dense(10)
    net.initialize(ctx=CPU)
    step = TrainStep(net, lambda out, y: SOFTMAX(out / 2 if has_shape(out) else out, y), **OPTIONS)
    with pytest.warns(UserWarning, match=rf"has_shape \({__file__}:\d+\) asks whether"):
        step(*vectors())


def halved_arrays(out: Any, y: Any, *, by: float = 2) -> Any:
    return SOFTMAX(out / by if isinstance(out, mx.nd.NDArray) else out, y)


class Halved:
    def __call__(self, out: Any, y: Any) -> Any:
        return self.of(out, y)

    def of(self, out: Any, y: Any) -> Any:
        return SOFTMAX(out / 2 if isinstance(out, mx.nd.NDArray) else out, y)


LOSSES = {
    "halved_arrays": halved_arrays,
    "partial": functools.partial(halved_arrays, by=4),
    "Halved": Halved(),
    "of": Halved().of,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_asks_what_it_gets(name: str) -> None:
    net = nn.Dense(10)
    net.initialize(ctx=CPU)
    step = TrainStep(net, LOSSES[name], **OPTIONS)
    with pytest.warns(UserWarning, match=rf"the loss {name}\(\) asks whether"):
        step(*vectors())


@pytest.mark.parametrize("way", ["a hybridized block", "a loss in the plan", "hooks of the block"])
def test_what_sees_what_it_saw_is_not_warned_of(way: str) -> None:
    net = Keeping("nothing" if way == "hooks of the block" else "kept")
    net.initialize(ctx=CPU)
    x, y = vectors()
    if way == "hooks of the block":
        net.register_forward_hook(lambda block, inputs, outputs: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if way == "a loss in the plan":
            TrainStep(net, lambda scores, y: [SOFTMAX(scores, y), net.kept], **OPTIONS)(x, y)
            return
        if way == "a hybridized block":
            net.hybridize()
        trained(planned(net, **OPTIONS), x, y)
