"""What the object of a Custom op keeps, where a Module binds anew to keep its budget: as MXNet's.

An executor of MXNet's has one object for an op, in training and inference, and so have buckets.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mxnet as mx
import numpy as np
import pytest

from helpers.let_go import is_let_go
from memplan.errors import BudgetError
from memplan.mxnet import BucketingModule, Module
from memplan.mxnet.realise.kept_operators import KeptOperators

S = mx.sym
#: Room for the training step, or for inference, and not for both.
TIGHT: dict[str, Any] = {"budget": "100%", "strategy": "store_all"}


class Counting(mx.operator.CustomOp):
    """Multiplies by a number that grows whenever this very object runs."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.factor, self.by = 1.0, by

    def forward(self, is_train: Any, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self.factor += self.by
        self.assign(out_data[0], req[0], in_data[0] * self.factor)

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        self.assign(in_grad[0], req[0], out_grad[0] * self.factor)


class Slow(mx.operator.CustomOp):
    """Takes its time in inference, and notes when it begins and ends."""

    notes: ClassVar[list[str]] = []

    def forward(self, is_train: Any, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self.notes.append("begin")
        if not is_train:
            time.sleep(0.1)
        self.assign(out_data[0], req[0], in_data[0])
        self.notes.append("end")

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("slow")
class SlowProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Slow:
        return Slow()


@mx.operator.register("counting")
class CountingProp(mx.operator.CustomOpProp):
    def __init__(self, by: str = "1") -> None:
        super().__init__()
        self.by = float(by)

    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Counting:
        return Counting(self.by)


@mx.operator.register("counting_by_another")
class CountingByAnotherProp(CountingProp):
    """Runs a Custom op, of which nobody knows, before it makes its own."""

    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Counting:
        mx.nd.Custom(mx.nd.ones(1), op_type="counting").wait_to_read()
        return super().create_operator(ctx, in_shapes, in_dtypes)


def network(*, trained: bool = True) -> mx.sym.Symbol:
    """Two Custom ops of one name; an explicit step has only such that are not ``trained``."""
    count = functools.partial(S.Custom, op_type="counting", name="counts")
    x = count(S.Variable("data"), by="0.5")
    for i in range(5):
        x = S.tanh(S.FullyConnected(x, num_hidden=16, name=f"hidden{i}"))
    last = count(x if trained else S.BlockGrad(x), by="0.25")
    scores = S.FullyConnected(last if trained else x, num_hidden=3, name="scores")
    outputs = [S.SoftmaxOutput(scores, name="softmax"), *([] if trained else [last])]
    return S.Group(outputs)


def batch(size: int, key: int = 0) -> Any:
    random = np.random.default_rng(size)
    data, label = random.normal(size=(size, 5)), random.integers(0, 3, size)
    result = mx.io.DataBatch([mx.nd.array(data)], [mx.nd.array(label)], bucket_key=key)
    result.provide_data, result.provide_label = shapes(size)
    return result


def shapes(size: int) -> tuple[Any, Any]:
    return [("data", (size, 5))], [("softmax_label", (size,))]


def bound(module: Any, size: int) -> Any:
    module.bind(*shapes(size))
    mx.random.seed(2)
    module.init_params(mx.init.Uniform(0.3))
    module.init_optimizer(optimizer_params={"learning_rate": 0.1})
    return module


def outputs(module: Any) -> list[np.ndarray]:
    mx.nd.waitall()  # or the mode of MXNet's next run is that of a Custom op which has not run yet
    return [output.asnumpy() for output in module.get_outputs()]


def trained(module: Any, steps: Sequence[Any], inferred: int) -> Iterator[list[np.ndarray]]:
    """The outputs of training ``steps``, and of so many runs of inference between them."""
    for of_step in steps:
        module.forward_backward(of_step)
        yield outputs(module)
        module.update()
        for _ in range(inferred):
            module.forward(of_step, is_train=False)
            yield outputs(module)


def assert_same(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for of_ours, of_theirs in zip(ours, theirs, strict=True):
        assert all(map(np.array_equal, of_ours, of_theirs))


@pytest.mark.parametrize(
    ("realisation", "is_trained"), [("packed", True), ("updating", True), ("explicit", False)]
)
def test_inference_of_the_same_shapes_leaves_the_object(realisation: str, is_trained: bool) -> None:
    """And runs the same object."""
    net = network(trained=is_trained)

    def run(module: Any) -> list[Any]:
        return list(trained(bound(module, 64), [batch(64)] * 3, 2))

    assert_same(run(Module(net, realisation=realisation, **TIGHT)), run(mx.mod.Module(net)))


def test_every_bucket_has_an_object_while_they_are_bound_in_turn() -> None:
    def generated(_: int) -> Any:
        return network(), ["data"], ["softmax_label"]

    def run(make: Callable[..., Any], **options: Any) -> list[Any]:
        module = bound(make(generated, default_bucket_key=64, **options), 64)
        return list(trained(module, [batch(size, size) for size in (64, 128, 64, 128, 64)], 0))

    ours = run(BucketingModule, strategy="store_all", realisation="packed")
    assert_same(ours, run(mx.mod.BucketingModule))


@pytest.mark.long
def test_objects_of_shapes_that_were_left_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """MXNet makes new ones at a return."""
    made: list[weakref.ref[Counting]] = []
    init = Counting.__init__

    def noted(self: Counting, by: float) -> None:
        made.append(weakref.ref(self))
        init(self, by)

    monkeypatch.setattr(Counting, "__init__", noted)
    module = bound(Module(network(), realisation="packed", strategy="store_all"), 64)
    for size in (64, 32, 16, 8, 64):
        list(trained(module, [batch(size)], 1))
        assert is_let_go(lambda: sum(ref() is not None for ref in made) <= 4)


@pytest.mark.long
def test_an_op_may_run_another_within(tmp_path: Path) -> None:
    """With MXNET_ENGINE_TYPE=NaiveEngine it does so in the thread that asked for its own object."""
    code = """
        import mxnet as mx
        import test_kept_operators as t
        from memplan.mxnet import Module

        class Outer(t.Counting):
            def forward(self, is_train, req, in_data, out_data, aux):
                inner = mx.nd.Custom(in_data[0], op_type="counting")
                super().forward(is_train, req, [inner], out_data, aux)

        @mx.operator.register("outer")
        class OuterProp(t.CountingProp):
            def create_operator(self, *arguments):
                return Outer(self.by)

        net = t.S.Custom(t.S.Variable("data"), op_type="outer")
        net = t.S.SoftmaxOutput(t.S.FullyConnected(net, num_hidden=3), name="softmax")
        ours = list(t.trained(t.bound(Module(net, realisation="packed"), 8), [t.batch(8)] * 2, 1))
        theirs = list(t.trained(t.bound(mx.mod.Module(net), 8), [t.batch(8)] * 2, 1))
        t.assert_same(ours, theirs)
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = {**os.environ, "MXNET_ENGINE_TYPE": "NaiveEngine"}
    environment["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.long
def test_a_refusal_of_other_shapes_leaves_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.planning.least.SEARCH_SECONDS", 0.1)
    module = bound(Module(network(), realisation="packed", **TIGHT), 64)
    ours = list(trained(module, [batch(64)] * 2, 1))
    with pytest.raises(BudgetError):
        module.forward_backward(batch(4096))
    ours += trained(module, [batch(64)] * 2, 1)
    assert_same(ours, list(trained(bound(mx.mod.Module(network()), 64), [batch(64)] * 4, 1)))


@pytest.mark.long
def test_training_waits_for_inference_which_runs_the_same_object() -> None:
    """It has room of its own, so that the engine would run both at a time."""
    x = S.FullyConnected(S.Variable("data"), num_hidden=3, name="scores")
    net = S.SoftmaxOutput(S.Custom(x, op_type="slow"), name="softmax")
    module = bound(Module(net, realisation="packed"), 8)
    for _ in range(2):
        module.forward(batch(8), is_train=False)
        module.forward_backward(batch(8))
    mx.nd.waitall()
    assert Slow.notes == ["begin", "end"] * 4


def test_an_op_of_the_users_may_bind_others_where_it_is_made() -> None:
    net = S.Custom(S.Variable("x"), op_type="counting_by_another", name="outer")
    kept, results = KeptOperators(), []
    for _ in range(2):
        with kept.for_ops([("outer", 0)]):
            executor = net.bind(mx.cpu(), {"x": mx.nd.ones(1)}, grad_req="null")
        results.append(executor.forward()[0].asscalar())
    assert results == [2, 3]
