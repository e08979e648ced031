"""What a script writes, before ``backward``, into what a planned block has returned."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from memplan.mxnet.gluon import planned

NDArray = Any


class Layers(gluon.HybridBlock):
    """Returns what its last op computes, and that of the op before it."""

    def __init__(self, last: str) -> None:
        super().__init__(prefix="net_")
        self.last = last
        with self.name_scope():
            self.first, self.second = (gluon.nn.Dense(4, in_units=k) for k in (5, 4))

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        hidden = F.exp(self.first(x))
        # What lies between is recomputed by "chen_sqrt", from the hidden one.
        return getattr(F, self.last)(self.second(F.tanh(F.sin(hidden) * hidden))), hidden


class States(gluon.HybridBlock):
    """Returns the states of an LSTM beside its output."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.lstm = gluon.rnn.LSTM(4, input_size=5)

    def hybrid_forward(self, F: Any, x: Any, h: Any, c: Any) -> Any:  # noqa: N803
        y, (h, c) = self.lstm(x, [h, c])
        return y, h, c


def assign(array: NDArray) -> None:
    array[1:] = 0.25


def assign_to_detached(array: NDArray) -> None:
    detached = array.detach()
    detached[:, 1] = 0.25


def assign_to_reshaped(array: NDArray) -> None:
    array.reshape((-1,))[2:5] = 0.25


def subtract_in_place(array: NDArray) -> None:
    detached = array.detach()
    detached -= detached.mean()


def clip(array: NDArray) -> None:
    mx.nd.clip(array, 0.2, 0.4, out=array)


def copy_into(array: NDArray) -> None:
    mx.nd.full(array.shape, 0.25).copyto(array)


def by_numpy(array: NDArray) -> None:
    detached = array.as_np_ndarray().detach()
    detached += 1


def write_copy(array: NDArray) -> None:
    copy = array.detach().copy()
    copy[:] = 0


def nothing(array: NDArray) -> None:
    pass


WRITES = [assign, assign_to_detached, assign_to_reshaped, subtract_in_place, clip, copy_into]


def made(block: gluon.HybridBlock, **options: Any) -> gluon.HybridBlock:
    """The ``block`` from a seed, hybridized, and planned by ``options``, if any."""
    mx.random.seed(3)
    block.initialize(mx.init.Xavier())
    block.hybridize()
    return planned(block, **options) if options else block


def trained(
    net: gluon.HybridBlock,
    place: int,
    write: Callable[[NDArray], None],
    *inputs: NDArray,
    after: bool = False,
) -> tuple[list[np.ndarray[Any, Any]], list[str]]:
    """The gradients where a script writes into the output at a ``place``, and what warnings say.

    It writes before ``backward``, or ``after`` it.
    """
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            with autograd.record():
                outputs = net(*inputs)
                loss = sum(mx.nd.cos(3 * output).sum() for output in outputs)
            if not after:
                write(outputs[place])
            loss.backward()
            if after:
                write(outputs[place])
    gradients = [p.grad().asnumpy() for p in net.collect_params().values()]
    return gradients, [str(warning.message) for warning in found]


def batch(*shape: int) -> NDArray:
    return mx.nd.array(np.random.default_rng(5).normal(size=shape))


STORE = {"strategy": "store_all", "realisation": "packed"}
AGAIN = {"strategy": "chen_sqrt", "realisation": "packed"}


@pytest.mark.parametrize("write", [*WRITES, by_numpy])
def test_backward_reads_what_was_written_into_an_output(write: Callable[[NDArray], None]) -> None:
    expected, _ = trained(made(Layers("softmax")), 0, write, batch(3, 5))
    unwritten, _ = trained(made(Layers("softmax")), 0, nothing, batch(3, 5))
    assert not np.array_equal(expected[0], unwritten[0])
    for options in (STORE, AGAIN):
        found, told = trained(made(Layers("softmax"), **options), 0, write, batch(3, 5))
        assert not told
        assert all(map(np.array_equal, expected, found))


@pytest.mark.parametrize("last", ["relu", "exp", "sigmoid", "log_softmax", "identity"])
def test_explicit_steps_read_what_was_written_too(last: str) -> None:
    expected, _ = trained(made(Layers(last)), 0, assign, batch(3, 5))
    net = made(Layers(last), strategy="chen_sqrt", realisation="explicit")
    found, told = trained(net, 0, assign, batch(3, 5))
    assert not told
    assert all(map(np.array_equal, expected, found))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_backward_reads_states_that_were_reset(realisation: str, place: int) -> None:
    inputs = batch(3, 2, 5), mx.nd.zeros((1, 2, 4)), mx.nd.zeros((1, 2, 4))
    expected, _ = trained(made(States()), place, assign_to_detached, *inputs)
    net = made(States(), strategy="store_all", realisation=realisation)
    found, told = trained(net, place, assign_to_detached, *inputs)
    assert not told
    assert all(map(np.array_equal, expected, found))


class Pictures(gluon.HybridBlock):
    """Returns the output of a convolution of oneDNN's layout, and what a pooling makes of it."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.conv = gluon.nn.Conv2D(16, 3, in_channels=3)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        pictures = self.conv(x)
        return F.Pooling(pictures, kernel=(2, 2), stride=(2, 2), pool_type="max"), pictures


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
@pytest.mark.parametrize("write", [assign, clip])
def test_what_is_written_keeps_the_layout_that_backward_knows(
    write: Callable[[NDArray], None], realisation: str
) -> None:
    expected, _ = trained(made(Pictures()), 1, write, batch(2, 3, 8, 8))
    net = made(Pictures(), strategy="store_all", realisation=realisation)
    found, _ = trained(net, 1, write, batch(2, 3, 8, 8))
    assert all(map(np.array_equal, expected, found))


class Stopped(gluon.HybridBlock):
    """Returns a tensor through a BlockGrad, which lies in the memory of what ``exp`` has made."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.first = gluon.nn.Dense(4, in_units=5)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        hidden = F.exp(self.first(x))
        stopped = F.BlockGrad(hidden)
        return F.tanh(hidden) * stopped, stopped


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_a_warning_tells_of_a_written_output_whose_memory_is_another_tensors_too(
    realisation: str,
) -> None:
    returned, _ = trained(made(Stopped()), 1, nothing, batch(3, 5))
    net = made(Stopped(), strategy="store_all", realisation=realisation)
    found, told = trained(net, 1, subtract_in_place, batch(3, 5))
    assert any("in the same memory" in text for text in told)
    assert all(map(np.array_equal, returned, found))


def test_a_warning_tells_of_a_written_output_that_is_recomputed_from() -> None:
    """Gradients are those of what was returned; without recomputation MXNet's."""
    returned, _ = trained(made(Layers("relu")), 1, nothing, batch(3, 5))
    expected, _ = trained(made(Layers("relu")), 1, assign, batch(3, 5))
    found, told = trained(made(Layers("relu"), **AGAIN), 1, assign, batch(3, 5))
    assert told
    assert all("write into a copy" in text for text in told)
    assert all(map(np.array_equal, returned[2:], found[2:]))
    kept, told = trained(made(Layers("relu"), **STORE), 1, assign, batch(3, 5))
    assert not told
    assert all(map(np.array_equal, expected, kept))


@pytest.mark.parametrize("write", [write_copy, assign])
def test_a_write_into_a_copy_or_behind_backward_changes_nothing(
    write: Callable[[NDArray], None],
) -> None:
    expected, _ = trained(made(Layers("relu")), 1, nothing, batch(3, 5))
    net = made(Layers("relu"), **AGAIN)
    found, told = trained(net, 1, write, batch(3, 5), after=write is assign)
    assert not told
    assert all(map(np.array_equal, expected, found))
