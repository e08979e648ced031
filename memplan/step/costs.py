"""What ops cost in seconds: by a roofline of the device, or from a table of measurements."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from memplan.errors import ArgumentError, CostError
from memplan.step.graph import UPDATE, Op, TrainingGraph
from memplan.util.files import damage, read_json, unwritten, write_text
from memplan.util.numbers import is_finite, is_whole, plain, shown

FORMAT = "memplan.costs/1"

PREFIX = "roofline:"


@dataclass(frozen=True)
class Roofline:
    """A device that computes at one speed, moves bytes at another, and does both at a time.

    ``flops_per_second`` and ``bytes_per_second`` are the vendor's peaks, of which ops reach the
    fractions ``flops_efficiency`` and ``bytes_efficiency``; ``launch_seconds`` is spent on every
    op, however small. After Williams, Waterman, Patterson 2009. Raises ArgumentError for a speed
    that is not positive or an efficiency outside (0, 1].
    """

    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float = 0.0
    flops_efficiency: float = 1.0
    bytes_efficiency: float = 1.0

    def __post_init__(self) -> None:
        for field_ in fields(self):
            object.__setattr__(self, field_.name, plain(getattr(self, field_.name)))
        for name in ("flops_per_second", "bytes_per_second"):
            value = getattr(self, name)
            if not is_finite(value) or value == 0:
                raise ArgumentError(f"{name} must be positive and finite, got {shown(value)}")
        for name in ("flops_efficiency", "bytes_efficiency"):
            value = getattr(self, name)
            if not is_finite(value) or not 0 < value <= 1:
                raise ArgumentError(f"{name} must be in (0, 1], got {shown(value)}")
        for what in ("flops", "bytes"):
            if getattr(self, f"{what}_per_second") * getattr(self, f"{what}_efficiency") == 0:
                raise ArgumentError(f"{what}_per_second times {what}_efficiency rounds to zero")
        if not is_finite(self.launch_seconds):
            raise ArgumentError(
                f"launch_seconds must be >= 0 and finite, got {shown(self.launch_seconds)}"
            )

    def seconds(self, op: Op) -> float:
        """Seconds of ``op``: the longer of computing and moving its bytes, and the launch."""
        computing = op.flops / (self.flops_per_second * self.flops_efficiency)
        moving = op.traffic_nbytes / (self.bytes_per_second * self.bytes_efficiency)
        return max(computing, moving) + self.launch_seconds


def _gpu(tflops: float, gb_per_second: float, flops_efficiency: float) -> Roofline:
    return Roofline(
        flops_per_second=tflops * 1e12,
        bytes_per_second=gb_per_second * 1e9,
        launch_seconds=5e-6,
        flops_efficiency=flops_efficiency,
        bytes_efficiency=0.8,
    )


# Peaks for float32 as MXNet 1.9.1 computes it: on cores for it up to Turing; from Ampere on in
# TF32, which it asks of cuBLAS (src/operator/linalg.h) and cuDNN uses unasked. NVIDIA's data
# sheets: V100 SXM2 15.7 TFLOPS, 900 GB/s; T4 8.1, 320; A100 80GB SXM 156 (TF32), 2039; H100 SXM
# 494 (TF32 without sparsity), 3350; H200 SXM 494, 4800. MXNet 1.9.1 has no binary for the last
# two: they are there to plan for.
#
# Efficiencies are set so that ResNet-50's step comes near what NVIDIA measured with MXNet
# (DeepLearningExamples, MxNet/Classification/RN50v1.5, container 20.12): V100 384 images per
# second at batch 96 (here 382), A100 1022 at batch 256 in TF32 (1068); on the T4, for which they
# give inference only, 429 at batch 128 (421, of the forward pass). H100 and H200 take the A100's.
# One number for all shapes of an op: measure (memplan.profile) where a plan depends on seconds.
#
# "cpu" is one Intel Xeon Platinum 8280 (ark.intel.com): 28 cores at 2.7 GHz with two AVX-512 FMA
# units each, six channels of DDR4-2933; the clock falls under AVX-512.
ROOFLINES: Mapping[str, Roofline] = MappingProxyType(
    {
        "v100": _gpu(15.7, 900, flops_efficiency=0.8),
        "t4": _gpu(8.1, 320, flops_efficiency=0.65),
        "a100": _gpu(156, 2039, flops_efficiency=0.25),
        "h100": _gpu(494, 3350, flops_efficiency=0.25),
        "h200": _gpu(494, 4800, flops_efficiency=0.25),
        "cpu": Roofline(28 * 2.7e9 * 64, 141e9, 5e-6, flops_efficiency=0.5, bytes_efficiency=0.7),
    }
)


@dataclass(frozen=True)
class CostTable:
    """Measured seconds of ops on one device, by :attr:`memplan.step.graph.Op.signature`.

    ``device`` names it: "cpu(Intel Xeon ...)", "gpu(Tesla V100-SXM2-16GB)". ``shapes`` are the
    input shapes of the network that was measured; a table rarely fits another batch size.
    ``workspace_nbytes``: what operators took beside what they read and write, by realisation.
    Raises CostError for seconds that are negative or not finite.
    """

    device: str
    seconds: Mapping[str, float]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    workspace_nbytes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not self.device:
            raise CostError(f"device must name what was measured, got {shown(self.device)}")
        for name in ("seconds", "shapes", "workspace_nbytes"):
            values = getattr(self, name)
            if not isinstance(values, Mapping):
                raise CostError(f"{name} must be a mapping, got {shown(values)}")
            object.__setattr__(self, name, {key: _plain(value) for key, value in values.items()})
        for signature, seconds in self.seconds.items():
            if not is_finite(seconds):
                raise CostError(f"{shown(seconds)} seconds for the op {signature}")
        for name, shape in self.shapes.items():
            if not isinstance(shape, tuple) or not all(map(is_whole, shape)):
                raise CostError(f"the shape of {name!r} must be integers, got {shown(shape)}")
        for realisation, nbytes in self.workspace_nbytes.items():
            if not is_whole(nbytes):
                raise CostError(f"{shown(nbytes)} bytes of workspace for {realisation}")

    def to_json(self) -> str:
        """The table as JSON, which :meth:`load` reads from a file."""
        data = {
            "format": FORMAT,
            "device": self.device,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "seconds": dict(self.seconds),
            "workspace_nbytes": dict(self.workspace_nbytes),
        }
        return json.dumps(data, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to ``path`` as JSON, all of it or nothing; CostError if it cannot be."""
        try:
            write_text(path, self.to_json())
        except (OSError, TypeError, ValueError) as error:
            raise CostError(
                f"the costs cannot be written to {str(path)!r}: {unwritten(error)}"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostTable:
        """The table that :meth:`save` wrote; CostError, naming the file, if it is not one."""
        try:
            data = read_json(Path(path))
            if not isinstance(data, dict):
                raise CostError(f"it holds {shown(data)}")
            if data["format"] != FORMAT:
                raise CostError(f"its format is {data['format']!r}, not {FORMAT!r}")
            workspace = data.get("workspace_nbytes", {})
            return cls(data["device"], data["seconds"], data["shapes"], workspace)
        except OSError as error:
            raise CostError(
                f"the costs in {str(path)!r} cannot be read: {error.strerror}. "
                f"Write them with {how_to_profile()}"
            ) from error
        except (CostError, KeyError, TypeError, ValueError) as error:
            raise CostError(
                f"{str(path)!r} is no table of costs: {damage(error)}. "
                f"Write a new one with {how_to_profile()}"
            ) from error


def _plain(value: Any) -> Any:
    """A number, or a shape of such, of Python's types; anything else as it is."""
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else plain(value)


Costs = Roofline | CostTable | str | os.PathLike[str]


def how_to_profile(realisation: str | None = None) -> str:
    """The call that writes a table of costs: for the graph of a ``realisation``, if that is known.

    Each realisation has ops of its own, which a table for another one lacks.
    """
    its_ops = "" if realisation is None else f"realisation={realisation!r}, "
    return f"memplan.profile(net, ctx=..., {its_ops}data=(32, 3, 224, 224)).save('costs.json')"


def with_costs(
    graph: TrainingGraph,
    costs: Costs,
    *,
    device: str | None = None,
    realisation: str | None = None,
) -> TrainingGraph:
    """``graph`` with the ``seconds`` that ``costs`` gives each op.

    Updates of parameters cost nothing here: they take as long behind the unplanned step.
    ``costs`` is a Roofline, the name of one ("roofline:v100"), a CostTable, or the path of a
    saved one (``*.json``). A table of another device than ``device`` ("gpu(Tesla T4)", or "gpu" for
    any) is refused. Raises CostError where the table lacks ops, which says how to measure those of
    the ``realisation``, ArgumentError for other costs or an unknown name.
    """
    model = _resolve(costs)
    if isinstance(model, Roofline):
        of_ops = [0.0 if op.kind == UPDATE else model.seconds(op) for op in graph.ops]
        return graph.with_seconds(of_ops)
    if device is not None and device not in (model.device, model.device.split("(")[0]):
        raise CostError(
            f"the costs were measured on {model.device}, but the network will run on {device}; "
            f"measure them there with {how_to_profile(realisation)}"
        )
    seconds = {op.signature: 0.0 for op in graph.ops if op.kind == UPDATE} | {**model.seconds}
    missing = [op.name for op in graph.ops if op.signature not in seconds]
    if missing:
        shapes = ", ".join(f"{name}={shape}" for name, shape in model.shapes.items())
        raise CostError(
            f"the costs measured on {model.device} (with {shapes or 'unknown shapes'}) lack "
            f"{len(missing)} of {len(graph.ops)} ops, among them "
            f"{', '.join(map(repr, missing[:3]))}; measure this network, with its shapes, dtypes "
            f"and grad_req, with {how_to_profile(realisation)}"
        )
    return graph.with_seconds([seconds[op.signature] for op in graph.ops])


def check_costs(costs: Costs) -> None:
    """ArgumentError for what are no costs, and for a roofline that there is not."""
    _resolve(costs)


def _resolve(costs: Costs) -> Roofline | CostTable:
    if isinstance(costs, Roofline):
        return costs
    if isinstance(costs, str) and costs.startswith(PREFIX):
        name = costs.removeprefix(PREFIX)
        if name not in ROOFLINES:
            choices = ", ".join(PREFIX + roofline for roofline in ROOFLINES)
            raise ArgumentError(f"there is no roofline {shown(name)}; the choices are {choices}")
        return ROOFLINES[name]
    table = table_of(costs)
    if table is None:
        raise ArgumentError(
            f"costs must be a Roofline, a name like '{PREFIX}v100', a CostTable or the path of a "
            f"saved one (*.json), got {shown(costs)}"
        )
    return table


def table_of(costs: Costs | None) -> CostTable | None:
    """The table that ``costs`` are or name."""
    if isinstance(costs, str | os.PathLike) and (path := os.fsdecode(costs)).endswith(".json"):
        return CostTable.load(path)
    return costs if isinstance(costs, CostTable) else None
