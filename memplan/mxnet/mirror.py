"""Writes a set of flags on a network, so that MXNet's own executor runs the mirrored schedule."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import mxnet as mx

from memplan.mxnet.trace import Trace


def annotate(trace: Trace, flags: AbstractSet[int], *, cudnn: bool = False) -> mx.sym.Symbol:
    """A copy of the traced network whose ops in ``flags`` carry ``force_mirroring``.

    ``mirror_stage`` hints are kept. With ``cudnn``, for training on a GPU, a flagged BatchNorm
    gets momentum √m: cuDNN updates the moving statistics in every forward call, and two updates
    with √m on the same batch equal one with m.
    """
    warn_if_overridden()
    data = json.loads(trace.symbol.tojson(remove_amp_cast=False))
    for op in flags:
        for index in trace.sources[op]:
            attrs = data["nodes"][index].setdefault("attrs", {})
            attrs["__force_mirroring__"] = "True"
            if cudnn and _updates_statistics_in_forward(data["nodes"][index]):
                attrs["momentum"] = repr(math.sqrt(float(attrs.get("momentum", 0.9))))
    return mx.sym.load_json(json.dumps(data))


def _updates_statistics_in_forward(node: Mapping[str, Any]) -> bool:
    """Is this a BatchNorm that MXNet computes with cuDNN when it trains on a GPU?"""
    attrs = node.get("attrs", {})
    return node["op"] == "BatchNorm" and not (
        _is_true(attrs.get("use_global_stats")) or _is_true(attrs.get("cudnn_off"))
    )


def _is_true(value: str | None) -> bool:
    return value in ("True", "true", "1")


def warn_if_overridden() -> None:
    """Warn where MXNET_BACKWARD_DO_MIRROR makes MXNet mirror ops that a plan keeps."""
    if os.environ.get("MXNET_BACKWARD_DO_MIRROR", "0") not in ("0", "false", ""):
        warnings.warn(
            "MXNET_BACKWARD_DO_MIRROR is set: MXNet then also recomputes what a plan keeps, "
            "which undoes the plan. Unset it before binding the planned network.",
            stacklevel=2,
        )
