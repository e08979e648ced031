"""By which kernels oneDNN computes convolutions: what is read in its source, and what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import mxnet as mx
import pytest

from helpers.paths import ROOT
from memplan.mxnet.realise import onednn_kernels
from memplan.mxnet.realise.onednn_kernels import Kernel, kernels
from memplan.planning.realisation import trace

# Channels, filters, the dimensions of a picture, and what a convolution is called with.
CASES: dict[str, tuple[int, int, tuple[int, ...], dict[str, Any]]] = {
    "plain": (16, 24, (9, 9), {"kernel": (3, 3), "pad": (1, 1)}),
    "channels of no block": (12, 16, (9, 9), {"kernel": (3, 3), "pad": (1, 1)}),
    "a point": (16, 16, (9, 9), {"kernel": (1, 1), "stride": (2, 2)}),
    "dilated": (16, 16, (9, 9), {"kernel": (3, 3), "pad": (2, 2), "dilate": (2, 2)}),
    "much padding": (16, 16, (9, 9), {"kernel": (3, 3), "pad": (4, 4), "dilate": (4, 4)}),
    "large": (16, 16, (6, 6), {"kernel": (7, 7), "pad": (3, 3)}),
    "wide": (16, 16, (3, 18), {"kernel": (1, 15), "pad": (0, 7)}),
    "uneven strides": (16, 16, (9, 9), {"kernel": (3, 3), "pad": (1, 1), "stride": (2, 1)}),
    "strided": (16, 16, (9, 9), {"kernel": (3, 3), "pad": (1, 1), "stride": (2, 2)}),
    "colours": (3, 16, (9, 9), {"kernel": (3, 3), "pad": (1, 1)}),
    "colours, much padding": (3, 16, (9, 9), {"kernel": (9, 9), "pad": (4, 4)}),
    "grey": (1, 16, (9, 9), {"kernel": (3, 3), "pad": (1, 1)}),
    "seven channels": (7, 16, (9, 9), {"kernel": (3, 3), "pad": (1, 1)}),
    "groups": (32, 32, (9, 9), {"kernel": (3, 3), "pad": (1, 1), "num_group": 4}),
    "small groups": (32, 32, (9, 9), {"kernel": (3, 3), "pad": (1, 1), "num_group": 8}),
    "depthwise": (16, 16, (9, 9), {"kernel": (3, 3), "pad": (1, 1), "num_group": 16}),
    "wide, depthwise": (16, 16, (9, 9), {"kernel": (5, 5), "pad": (2, 2), "num_group": 16}),
    "dilated, depthwise": (
        *(16, 16, (9, 9)),
        {"kernel": (3, 3), "pad": (2, 2), "dilate": (2, 2), "num_group": 16},
    ),
    "a signal": (16, 16, (12,), {"kernel": (3,), "pad": (1,)}),
    "a strided signal": (16, 16, (12,), {"kernel": (3,), "pad": (1,), "stride": (2,)}),
    "a volume": (16, 16, (4, 8, 8), {"kernel": (3, 3, 3), "pad": (1, 1, 1)}),
    "slices": (16, 16, (4, 8, 8), {"kernel": (1, 3, 3), "pad": (0, 1, 1)}),
    "a strided volume": (16, 16, (4, 8, 8), {"kernel": (2, 2, 2), "stride": (2, 2, 2)}),
    "a depthwise volume": (16, 16, (4, 8, 8), {"kernel": (1, 3, 3), "num_group": 16}),
}

RUN = """
import json, sys
import mxnet as mx
for name, (channels, nfilter, shape, options) in json.loads(sys.argv[1]).items():
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    data = mx.nd.ones((2, channels, *shape))
    weight = mx.nd.ones((nfilter, channels // options.get("num_group", 1), *options["kernel"]))
    data.attach_grad(), weight.attach_grad()
    with mx.autograd.record():
        out = mx.nd.Convolution(data, weight, num_filter=nfilter, no_bias=True, **options)
    mx.nd.waitall()
    print("\\nCASE " + name, flush=True)
    out.backward()
    mx.nd.waitall()
"""

LINE = re.compile(r",convolution,([^,]*),(backward_data|backward_weights),")


@pytest.fixture(autouse=True)
def _avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_kernels, "has_avx512", lambda: False)


def kernels_of(name: str, op: str = "Convolution") -> onednn_kernels.Kernels:
    channels, nfilter, shape, options = CASES[name]
    if op == "Deconvolution":
        channels, nfilter = nfilter, channels
    call = getattr(mx.sym, op)(
        mx.sym.Variable("data"), num_filter=nfilter, no_bias=True, name="call", **options
    )
    traced = trace(mx.sym.MakeLoss(call), shapes={"data": (2, channels, *shape)})
    return kernels(next(node for node in traced.nodes if node.name == "call"))


def test_gradients_are_products_of_matrices_where_onednn_says_so() -> None:
    environment = dict(os.environ, DNNL_VERBOSE="1", DNNL_MAX_CPU_ISA="AVX2")
    command = [sys.executable, "-c", RUN, json.dumps(CASES)]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    said: dict[str, dict[str, bool]] = {}
    for part in run.stdout.split("\nCASE ")[1:]:
        name, _, text = part.partition("\n")
        said[name] = {kind: "gemm" in kernel for kernel, kind in LINE.findall(text)}
    told = {}
    for name in CASES:
        _, of_data, of_weight = kernels_of(name)
        told[name] = {"backward_data": not of_data.data, "backward_weights": of_weight.has_columns}
    assert told == said


@pytest.mark.parametrize("is_input", [True, False])
def test_few_channels_have_columns_for_their_gradient_if_an_op_made_them(is_input: bool) -> None:
    """Of what a network is given no gradient is computed."""
    data = mx.sym.Variable("data")
    pictures = data if is_input else mx.sym.tanh(data)
    call = mx.sym.Convolution(pictures, num_filter=16, kernel=(3, 3), no_bias=True, name="call")
    traced = trace(mx.sym.MakeLoss(call), shapes={"data": (2, 3, 9, 9)})
    of_data = kernels(next(node for node in traced.nodes if node.name == "call")).of_data
    assert of_data == Kernel(False, False, has_columns=not is_input)


@pytest.mark.parametrize(
    ("name", "data", "output"),
    [
        ("plain", True, True),
        ("much padding", False, False),
        ("colours", False, True),
        ("colours, much padding", False, False),
        ("seven channels", False, True),
        ("small groups", False, False),
        ("depthwise", True, True),
        ("a depthwise volume", False, False),
    ],
)
def test_layouts_that_a_convolution_wants(name: str, data: bool, output: bool) -> None:
    forward = kernels_of(name).forward
    assert (forward.data, forward.output) == (data, output)


@pytest.mark.parametrize("name", ["plain", "dilated", "a volume", "uneven strides"])
def test_avx512_has_kernels_for_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_kernels, "has_avx512", lambda: True)
    assert set(kernels_of(name)) == {Kernel(True, True)}


def test_a_deconvolution_is_the_gradient_of_a_convolution() -> None:
    forward, of_data, _ = kernels_of("a strided volume", "Deconvolution")
    assert (forward.data, of_data.data) == (False, True)


def test_other_processors_are_taken_for_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    flags = {
        "avx2 avx512f": False,
        "avx512f avx512bw avx512dq avx512vl avx2": True,
        None: False,
    }
    for text, answer in flags.items():

        def read_text(*_: object, text: str | None = text, **__: object) -> str:
            if text is None:
                raise OSError("there is no /proc")
            return f"model name\t: x\nflags\t\t: fpu {text} sse\n"

        monkeypatch.setattr("pathlib.Path.read_text", read_text)
        onednn_kernels.has_avx512.cache_clear()
        assert onednn_kernels.has_avx512() is answer
    onednn_kernels.has_avx512.cache_clear()
