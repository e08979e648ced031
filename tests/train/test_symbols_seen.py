"""What of a script sees Symbols in a planned step, where it would see arrays: a warning says so."""

from __future__ import annotations

import functools
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import CPU, SOFTMAX, vectors
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


def trained(net: Any, x: Any, y: Any) -> None:
    with autograd.record():
        loss = SOFTMAX(net(x), y)
    loss.backward()


@pytest.mark.parametrize("kind", ["kept", "everything"])
def test_an_attribute_that_a_loss_may_read(kind: str) -> None:
    net = Keeping(kind)
    net.initialize(ctx=CPU)
    with pytest.warns(UserWarning, match=rf"block 'net_?' keeps what it has computed \({kind}\)"):
        trained(planned(net, **OPTIONS), *vectors())


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


class Rows(gluon.HybridBlock):
    """Computes something ``of`` what a layer makes of its input."""

    def __init__(self, of: Callable[[Any, Any], Any], prefix: str = "net_") -> None:
        super().__init__(prefix=prefix)
        self._of = of
        with self.name_scope():
            self.body = nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self._of(F, self.body(x))


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
    net = Rows(lambda f, x: x / 2 if asks(f, x) else x)
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
    "a mode": lambda f, x: x if f.__name__ != "numpy" and "a" in ("a", "b") else -x,
}


@pytest.mark.parametrize("of", NO_QUESTIONS.values(), ids=NO_QUESTIONS)
def test_no_questions_for_arrays(of: Callable[[Any, Any], Any]) -> None:
    net = Rows(of)
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
    net = Rows(lambda f, x: x)
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


def length(F: Any, x: Any) -> Any:  # noqa: N803
    return x / len(x)


def guessed_length(F: Any, x: Any) -> Any:  # noqa: N803
    try:
        return x / len(x)
    except Exception:
        return x


ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "x[0]": lambda f, x: f.broadcast_sub(x, f.expand_dims(x[0], axis=0)),
    "x[-1]": lambda f, x: f.broadcast_sub(x, f.expand_dims(x[-1], axis=0)),
    "x[:1]": lambda f, x: f.broadcast_sub(x, x[:1]),
    "for": lambda f, x: f.stack(*[f.softmax(row, axis=0) for row in x]),
    "zip": lambda f, x: f.stack(*[a * b for a, b in zip(x, 2 * x, strict=True)]),
    "*": lambda f, x: f.stack(*x),
}


@pytest.mark.parametrize("of", [length, guessed_length, *ROWS.values()])
def test_what_an_array_has_of_rows_is_refused(of: Any) -> None:
    """A Symbol has it of its one output: another network would be trained."""
    methods = [getattr(mx.sym.Symbol, name) for name in ("__len__", "__iter__", "__getitem__")]
    net = Rows(of)
    net.initialize(ctx=CPU)
    trained(net, *vectors())
    what = r"the len\(\)" if of in (length, guessed_length) else "rows"
    place = rf"{of.__code__.co_name} \({__file__}:\d+\)"
    with pytest.raises(TraceError, match=f"{place} asks for {what} of 'net_dense0_fwd'"):
        trained(planned(net, **OPTIONS), *vectors())
    assert [getattr(mx.sym.Symbol, m.__name__) for m in methods] == methods


def test_rows_are_refused_to_a_loss_in_the_plan() -> None:
    net = nn.Dense(10)
    net.initialize(ctx=CPU)
    net.hybridize()
    step = TrainStep(net, lambda scores, y: SOFTMAX(scores, y) / len(y), **OPTIONS)
    with pytest.raises(TraceError, match=r"asks for the len\(\) of 'memplan_label0'"):
        step(*vectors())


class ByForward(Rows):
    """MXNet calls its graph with what ``forward`` makes of arrays."""

    def forward(self, x: Any) -> Any:
        return super().forward(x * len(x))


def test_rows_are_refused_to_a_forward_of_the_scripts() -> None:
    net = ByForward(lambda f, x: x)
    net.initialize(ctx=CPU)
    net.hybridize()
    with pytest.raises(TraceError, match=r"forward \(.*\) asks for the len\(\)"):
        trained(planned(net, **OPTIONS), *vectors())


@pytest.mark.parametrize("which", ["the block", "a child"])
@pytest.mark.parametrize("before", [True, False])
def test_a_hybridized_block_has_outputs_without_a_plan_too(which: str, before: bool) -> None:
    def of(F: Any, x: Any) -> Any:  # noqa: N803
        return F.concat(*x, dim=1) / len(x) + x[0]

    gradients = []
    for plan in (False, True):
        mx.random.seed(1)
        net = part = Rows(of, "part_")
        if which == "a child":
            net = Rows(lambda f, x, part=part: part(x) * 2)
            net.part = part
        net.initialize(ctx=CPU)
        part.hybridize()
        x, y = vectors()
        if before:
            net(x)
        if plan:
            planned(net, **OPTIONS)
        trained(net, x, y)
        gradients.append([p.grad() for p in net.collect_params().values()])
    assert all((a == b).asnumpy().all() for a, b in zip(*gradients, strict=True))


def of_several(F: Any, x: Any) -> Any:  # noqa: N803
    parts = F.split(x, num_outputs=2)
    first, second = parts
    return F.concat(*parts, *[part * len(parts) for part in parts], parts[0] * first - second)


def of_all(F: Any, x: Any) -> Any:  # noqa: N803
    return x[:] + x[:] * 2


def of_list(way: Callable[[Any], list[Any]]) -> Callable[[Any, Any], Any]:
    """Computes of what an operator of two outputs returns, called as a function and as a method."""

    def of(F: Any, x: Any) -> Any:  # noqa: N803
        pairs = F.split(x, num_outputs=2), x.split(num_outputs=2, axis=1)
        return F.concat(x, *(part * part for parts in pairs for part in way(parts)))

    return of


LISTS: dict[str, Callable[[Any], list[Any]]] = {
    "[-1]": lambda parts: [parts[-1]],
    "[:-1]": lambda parts: parts[:-1],
    "[::-1]": lambda parts: parts[::-1],
    "[1:2]": lambda parts: [parts[1:2][0]],
    "+": lambda parts: parts + list(parts),
    "pop": lambda parts: [parts.pop()],
    "isinstance": lambda parts: parts if isinstance(parts, list) else [],
}


@pytest.mark.parametrize("of", [of_several, of_all, *map(of_list, LISTS.values())])
def test_what_arrays_have_alike_is_not_refused(of: Any) -> None:
    gradients = []
    for plan in (False, True):
        mx.random.seed(1)
        net = Rows(of)
        net.initialize(ctx=CPU)
        trained(planned(net, **OPTIONS) if plan else net, *vectors())
        gradients.append(net.body.weight.grad())
    assert (gradients[0] == gradients[1]).asnumpy().all()


def test_a_loss_gets_lists_of_operators() -> None:
    def loss(scores: Any, y: Any) -> Any:
        return SOFTMAX(scores, y) + scores.split(num_outputs=2, axis=1)[-1].mean(axis=1)

    x, y = vectors()
    net = nn.Dense(10)
    net.initialize(ctx=CPU)
    step, expected = TrainStep(net, loss, **OPTIONS), loss(net(x), y)
    for _ in range(2):  # the second time it is called apart from the block
        assert (step(x, y) == expected).asnumpy().all()


def test_rows_are_what_a_script_makes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(symbol: Any, index: int) -> Any:
        return mx.sym.take(symbol, mx.sym.full((1,), index), 0)

    monkeypatch.setattr(mx.sym.Symbol, "__getitem__", row)
    net = Rows(lambda f, x: f.broadcast_mul(x, f.expand_dims(f.reshape(x[0], (-1,)), 0)))
    net.initialize(ctx=CPU)
    trained(planned(net, **OPTIONS), *vectors())
    assert mx.sym.Symbol.__getitem__ is row


def test_symbols_of_another_thread_are_not_refused() -> None:
    found = []

    def of(F: Any, x: Any) -> Any:  # noqa: N803
        thread = threading.Thread(target=lambda: found.append(len(mx.sym.Variable("z"))))
        thread.start()
        thread.join()
        return x

    net = Rows(of)
    net.initialize(ctx=CPU)
    planned(net, **OPTIONS).planned_step.plan((4, 6))
    assert found == [1]


def test_symbols_are_left_as_they_were_by_ctrl_c() -> None:
    method = mx.sym.Symbol.__len__

    def of(F: Any, x: Any) -> Any:  # noqa: N803
        assert mx.sym.Symbol.__len__ is not method
        raise KeyboardInterrupt

    net = Rows(of)
    net.initialize(ctx=CPU)
    with pytest.raises(KeyboardInterrupt):
        TrainStep(net, **OPTIONS).plan((4, 6))
    assert mx.sym.Symbol.__len__ is method
