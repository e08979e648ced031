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
from memplan.mxnet.realise.estimate import onednn_kernels, processor
from memplan.mxnet.realise.estimate.onednn_kernels import Kernel, kernels
from memplan.mxnet.realise.estimate.processor import has_avx512
from memplan.planning.realisation import trace

# Channels, filters, the dimensions of a picture, and what a convolution is called with.
CASES: dict[str, tuple[int, int, tuple[int, ...], dict[str, Any]]] = {
    "plain": (16, 24, (9, 9), {"kernel": (3, 3), "pad": (1, 1)}),
    "channels of no block": (12, 16, (9, 9), {"kernel": (3, 3), "pad": (1, 1)}),
    "a point": (16, 16, (9, 9), {"kernel": (1, 1), "stride": (2, 2)}),
    "points, as strides fit": (16, 24, (8, 8), {"kernel": (1, 1), "stride": (2, 2)}),
    "points, uneven strides": (16, 16, (8, 9), {"kernel": (1, 1), "stride": (2, 1)}),
    "points, groups": (32, 32, (8, 8), {"kernel": (1, 1), "stride": (2, 2), "num_group": 2}),
    "points, no block": (16, 20, (8, 8), {"kernel": (1, 1), "stride": (2, 2)}),
    "points of a signal": (16, 16, (12,), {"kernel": (1,), "stride": (2,)}),
    "dilated points": (16, 16, (9, 9), {"kernel": (1, 1), "dilate": (2, 2)}),
    "dilated points, strided": (
        *(16, 16, (8, 8)),
        {"kernel": (1, 1), "dilate": (2, 2), "stride": (2, 2)},
    ),
    "dilated points, groups": (
        32,
        32,
        (9, 9),
        {"kernel": (1, 1), "dilate": (2, 2), "num_group": 2},
    ),
    "dilated points, half a block": (24, 24, (9, 9), {"kernel": (1, 1), "dilate": (2, 2)}),
    "dilated points of a volume": (16, 16, (4, 8, 8), {"kernel": (1, 1, 1), "dilate": (2, 2, 2)}),
    "points of a volume": (16, 16, (4, 8, 8), {"kernel": (1, 1, 1), "stride": (2, 2, 2)}),
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

# The same turned round: a Deconvolution of so many channels to so many.
TURNED_ROUND = {
    "turned round": (16, 32, (9, 9), {"kernel": (4, 4), "stride": (2, 2), "pad": (1, 1)}),
    "turned round, half a block": (24, 16, (9, 9), {"kernel": (2, 2), "stride": (2, 2)}),
    "turned round, to colours": (16, 3, (9, 9), {"kernel": (4, 4), "stride": (2, 2)}),
    "turned round, a long code": (
        *(16, 32, (14, 14)),
        {"kernel": (16, 16), "stride": (8, 8), "pad": (4, 4)},
    ),
    "turned round, groups of eight": (32, 32, (7, 7), {"kernel": (2, 2), "num_group": 4}),
    "turned round, to eight channels": (16, 8, (9, 9), {"kernel": (4, 4), "stride": (2, 2)}),
    "turned round, points to eight channels": (16, 8, (9, 9), {"kernel": (1, 1)}),
    "turned round, dilated points": (
        *(16, 40, (9, 9)),
        {"kernel": (1, 1), "stride": (2, 2), "dilate": (2, 2), "adj": (1, 1)},
    ),
    "turned round, half a block, depthwise": (24, 24, (9, 9), {"kernel": (3, 3), "num_group": 24}),
}

# What AVX-512 computes otherwise.
CASES |= {
    "half a block": (24, 40, (9, 9), {"kernel": (3, 3), "pad": (1, 1)}),
    "half a block, wide": (24, 40, (28, 28), {"kernel": (11, 11)}),
    "four blocks, dilated": (64, 64, (40, 40), {"kernel": (3, 3), "pad": (8, 8), "dilate": (8, 8)}),
    "one block, dilated": (16, 16, (40, 40), {"kernel": (3, 3), "pad": (8, 8), "dilate": (8, 8)}),
    "beyond the picture": (16, 16, (9, 9), {"kernel": (1, 1), "pad": (1, 1)}),
    "eight channels": (8, 32, (9, 9), {"kernel": (3, 3), "pad": (1, 1)}),
    "groups of four": (16, 16, (9, 9), {"kernel": (3, 3), "pad": (1, 1), "num_group": 4}),
    "a group for each colour": (3, 24, (9, 9), {"kernel": (3, 3), "num_group": 3}),
    "groups of colours": (6, 32, (9, 9), {"kernel": (3, 3), "num_group": 2}),
    "half a block, depthwise": (24, 24, (9, 9), {"kernel": (3, 3), "pad": (1, 1), "num_group": 24}),
    "strides that do not fit": (32, 32, (40, 40), {"kernel": (5, 5), "stride": (3, 3)}),
    "a long code": (16, 128, (60, 60), {"kernel": (15, 15), "pad": (7, 7)}),
}

RUN = """
import json, sys
import mxnet as mx
for name, (op, channels, nfilter, shape, options) in json.loads(sys.argv[1]).items():
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    data = mx.nd.ones((2, channels, *shape))
    sides = (nfilter, channels) if op == "Convolution" else (channels, nfilter)
    weight = mx.nd.ones((sides[0], sides[1] // options.get("num_group", 1), *options["kernel"]))
    data.attach_grad(), weight.attach_grad()
    print("\\nCASE " + name, flush=True)
    with mx.autograd.record():
        out = getattr(mx.nd, op)(data, weight, num_filter=nfilter, no_bias=True, **options)
    out.backward()
    mx.nd.waitall()
"""

# What oneDNN says of a kernel: which it is, what it computes, whether in layouts of its own.
LINE = re.compile(
    r",(?:de)?convolution,([^,]*),(forward_training|backward_data|backward_weights),"
    r"\w*src_f32::blocked:(\w+):\S* \S+ \S+ \w*dst_f32::blocked:(\w+):"
)
KINDS = ("forward_training", "backward_data", "backward_weights")


@pytest.fixture(autouse=True)
def _avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_kernels, "has_avx512", lambda: False)


def kernels_of(name: str, op: str = "Convolution") -> onednn_kernels.Kernels:
    channels, nfilter, shape, options = (CASES | TURNED_ROUND)[name]
    data = mx.sym.tanh(mx.sym.Variable("data"))  # of what a network is given there is no gradient
    call = getattr(mx.sym, op)(data, num_filter=nfilter, no_bias=True, name="call", **options)
    traced = trace(mx.sym.MakeLoss(call), shapes={"data": (2, channels, *shape)})
    return kernels(next(node for node in traced.nodes if node.name == "call"))


@pytest.mark.long
@pytest.mark.parametrize("processor", ["AVX2", "AVX512_CORE"])
def test_kernels_are_those_that_onednn_names(
    processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if processor == "AVX512_CORE" and not has_avx512():
        pytest.skip("this processor has no AVX-512")
    monkeypatch.setattr(onednn_kernels, "has_avx512", lambda: processor != "AVX2")
    cases = {name: ("Convolution", *case) for name, case in CASES.items()}
    cases |= {name: ("Deconvolution", *case) for name, case in TURNED_ROUND.items()}
    environment = dict(os.environ, DNNL_VERBOSE="1", DNNL_MAX_CPU_ISA=processor)
    command = [sys.executable, "-c", RUN, json.dumps(cases)]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    said: dict[str, dict[str, Kernel]] = {}
    for part in run.stdout.split("\nCASE ")[1:]:
        name, _, text = part.partition("\n")
        said[name] = {}
        for kernel, kind, *layouts in LINE.findall(text):
            data, output = (any(letter.isdigit() for letter in layout) for layout in layouts)
            said[name][kind] = Kernel(data, output, "gemm" in kernel)
    told = {
        name: dict(zip(KINDS, kernels_of(name, case[0]), strict=True))
        for name, case in cases.items()
    }
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


def test_a_deconvolution_is_the_gradient_of_a_convolution() -> None:
    forward, of_data, _ = kernels_of("a strided volume", "Deconvolution")
    assert (forward.data, of_data.data) == (False, True)


# Which of the three are products of matrices: the deconvolution, the gradients of its data and of
# its weight.
@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("turned round, a long code", (False, False, True)),
        ("turned round, groups of eight", (False, False, False)),
        ("turned round, to eight channels", (True, False, False)),
        ("turned round, points to eight channels", (True, False, True)),
        ("turned round, dilated points", (True, True, True)),
        ("turned round, half a block", (True, True, True)),
        ("turned round, half a block, depthwise", (True, True, True)),
    ],
)
def test_a_deconvolution_that_avx512_cannot_round_up_is_computed_with_avx2(
    name: str, products: tuple[bool, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn_kernels, "has_avx512", lambda: True)
    found = kernels_of(name, "Deconvolution")
    assert tuple(kernel.has_columns for kernel in found) == products


@pytest.mark.parametrize("has_avx512", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "dilated points",
        "dilated points, strided",
        "dilated points, half a block",
        "dilated points of a volume",
    ],
)
def test_points_have_no_columns_for_the_gradient_of_their_weight_however_dilated(
    name: str,
    has_avx512: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(onednn_kernels, "has_avx512", lambda: has_avx512)
    assert not kernels_of(name).of_weight.has_columns


def test_other_processors_are_taken_for_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {
        "avx2 avx512f": False,
        "avx512f avx512bw avx512dq avx512vl avx2": True,
        None: False,
    }
    for text, answer in flags.items():
        _say(monkeypatch, None if text is None else f"model name\t: x\nflags\t\t: fpu {text} sse\n")
        assert has_avx512.__wrapped__() is answer


def test_onednn_may_be_told_to_use_no_avx512_in_capital_letters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _say(monkeypatch, "flags\t: avx512f avx512bw avx512dq avx512vl avx2")
    told = {"AVX2": False, "AVX2_VNNI": False, "avx2": True, "AVX512_CORE": True, "": True}
    for text, answer in told.items():
        monkeypatch.setenv("DNNL_MAX_CPU_ISA", text)
        assert has_avx512.__wrapped__() is answer


@pytest.mark.parametrize(
    ("text", "nbytes"), [("512K\n", 512 << 10), ("?", 1 << 20), (None, 1 << 20)]
)
def test_the_cache_is_as_large_as_linux_says(
    text: str | None, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _say(monkeypatch, text)
    assert processor.cache_nbytes.__wrapped__(2) == nbytes


@pytest.mark.parametrize(
    ("vendor", "first", "second"),
    [("GenuineIntel", 48 << 10, 2 << 20), ("AuthenticAMD", 32 << 10, 512 << 10)],
)
def test_onednn_asks_intels_processors_for_their_caches_and_no_others(
    vendor: str, first: int, second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _say(monkeypatch, f"vendor_id : {vendor}\n")
    monkeypatch.setattr(processor, "cache_nbytes", {1: 48 << 10, 2: 2 << 20}.get)
    told = [processor.cache_nbytes_of_onednn.__wrapped__(level) for level in (1, 2)]
    assert told == [first, second]


@pytest.mark.parametrize(
    ("sharing", "siblings", "ncores"), [("0-3,8-11", "0,8", 4), ("0", "0", 1), ("", "", 1)]
)
def test_onednn_counts_the_part_that_a_core_has_of_a_cache(
    sharing: str, siblings: str, ncores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = {"shared_cpu_list": sharing, "thread_siblings_list": siblings}
    monkeypatch.setattr(processor, "_read", lambda path: lists.get(path.name, "GenuineIntel"))
    monkeypatch.setattr(processor, "cache_nbytes", {3: 24 << 20}.get)
    assert processor.cache_nbytes_of_onednn.__wrapped__(3) == (24 << 20) // ncores


def _say(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    """Have Linux say ``text`` of the processor; None: nothing."""

    def read_text(*_: object, **__: object) -> str:
        if text is None:
            raise OSError("there is no /proc")
        return text

    monkeypatch.setattr("pathlib.Path.read_text", read_text)
