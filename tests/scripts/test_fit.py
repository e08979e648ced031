"""MXNet's image classification: fit with a monitor, checkpoints, a schedule of rates; resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.fitting import wait
from memplan.mxnet import Module

pytestmark = pytest.mark.long


def network() -> Any:
    """A residual network of three units."""
    body = mx.sym.Convolution(
        mx.sym.Variable("data"), num_filter=8, kernel=(3, 3), pad=(1, 1), name="conv"
    )
    for n in range(3):
        found = mx.sym.BatchNorm(body, fix_gamma=False, name=f"bn{n}")
        found = mx.sym.Activation(found, act_type="relu", name=f"relu{n}")
        found = mx.sym.Convolution(
            found, num_filter=8, kernel=(3, 3), pad=(1, 1), no_bias=True, name=f"conv{n}"
        )
        body = body + found
    pooled = mx.sym.Pooling(body, global_pool=True, kernel=(1, 1), pool_type="avg", name="pool")
    scores = mx.sym.FullyConnected(mx.sym.flatten(pooled), num_hidden=5, name="fc")
    return mx.sym.SoftmaxOutput(scores, name="softmax")


def pictures() -> Any:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(24, 3, 16, 16)).astype("float32"), draw.integers(0, 5, 24)
    return mx.io.NDArrayIter(x, y.astype("float32"), batch_size=8)


def fitted(make: Any, folder: Path) -> dict[str, Any]:
    """What two runs of the script leave, the second of which goes on after the first's epochs."""
    prefix, seen = str(folder / "net"), []

    def note(given: Any) -> None:
        wait()
        seen.append(dict(given.eval_metric.get_name_value()))

    for begin, end in ((0, 2), (2, 3)):
        mx.random.seed(5)
        module, params = make(), (None, None)
        if begin:
            params = mx.model.load_checkpoint(prefix, begin)[1:]
        monitor = mx.mon.Monitor(1, lambda array: array.norm(), pattern="conv.*_output|fc_weight")
        module.fit(
            pictures(),
            eval_data=pictures(),
            eval_metric=["acc", "ce"],
            optimizer_params={
                "learning_rate": 0.1,
                "momentum": 0.9,
                "wd": 1e-4,
                "lr_scheduler": mx.lr_scheduler.FactorScheduler(step=3, factor=0.5),
            },
            initializer=mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2),
            arg_params=params[0],
            aux_params=params[1],
            begin_epoch=begin,
            num_epoch=end,
            monitor=monitor,
            batch_end_callback=note,
            epoch_end_callback=mx.callback.do_checkpoint(prefix),
        )
    _, arguments, states = mx.model.load_checkpoint(prefix, 3)
    return {"seen": seen, **{n: a.asnumpy() for n, a in {**arguments, **states}.items()}}


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_equal_to_the_plain_script(realisation: str, tmp_path: Path) -> None:
    def planned() -> Any:
        return Module(network(), realisation=realisation, strategy="chen_sqrt")

    folders = [tmp_path / "plain", tmp_path / "planned"]
    for folder in folders:
        folder.mkdir()
    expected = fitted(lambda: mx.mod.Module(network()), folders[0])
    found = fitted(planned, folders[1])
    assert expected.pop("seen") == found.pop("seen")
    assert not [name for name in expected if not np.array_equal(expected[name], found[name])]
    assert len(expected) == len(found) == 19
