"""What devices are called in tables of costs, which hold for one kind of device each."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
from pathlib import Path

import mxnet as mx

from memplan.errors import CostError


def device_name(ctx: mx.Context) -> str:
    """The device behind ``ctx`` as cost tables name it: "cpu(AMD EPYC)", "gpu(Tesla T4)"."""
    name = _gpu_model(ctx.device_id) if ctx.device_type == "gpu" else _cpu_model()
    return f"{ctx.device_type}({name})"


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if found := re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE):
            return found[1]
    return platform.processor() or platform.machine()


def _gpu_model(device_id: int) -> str:
    """What the driver calls a GPU, counted by CUDA_VISIBLE_DEVICES, as nvidia-smi does not."""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CostError(f"mx.gpu({device_id}) cannot be used: {error}") from error
    if (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), device_id)
        or cuda.cuDeviceGetName(name, len(name), device)
    ):
        raise CostError(f"mx.gpu({device_id}) cannot be used: the driver knows no such device")
    return name.value.decode()
