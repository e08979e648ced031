"""Plans as files: made on one machine, trained by on another."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mxnet as mx
from mxnet.base import MXNetError

from memplan.errors import ArgumentError, MemplanError
from memplan.mxnet.trace.build import Trace, trace
from memplan.planning.plan import Footprint, Plan
from memplan.step.schedule import Schedule
from memplan.strategies import Status

FORMAT = "memplan.plan/1"

# Fields of a plan that are made of objects; the others are numbers and strings.
_MADE = ("status", "symbol", "schedule", "trace", "footprint", "unplanned")


def plan_text(plan: Plan) -> str:
    """``plan`` as JSON: the network and all that is known of it; read back by :func:`load_plan`."""
    traced, graph = plan.trace, plan.schedule.graph
    fields = {field.name for field in dataclasses.fields(plan)}.difference(_MADE)
    data = {
        "format": FORMAT,
        **{name: getattr(plan, name) for name in sorted(fields)},
        "status": plan.status.name,
        "footprint": dataclasses.asdict(plan.footprint),
        "unplanned": dataclasses.asdict(plan.unplanned),
        "network": traced.symbol.tojson(remove_amp_cast=False),
        "symbol": plan.symbol.tojson(remove_amp_cast=False),
        "shapes": {name: list(shape) for name, shape in traced.shapes.items()},
        "dtypes": dict(traced.dtypes),
        "grad_req": dict(traced.grad_req),
        "seconds": [op.seconds for op in graph.ops],
        "ops": [op.name for op in graph.ops],
        "schedule": json.loads(plan.schedule.to_json()),
    }
    return json.dumps(data, allow_nan=False)


def is_plan(path: Path) -> bool:
    """Does the file hold a plan, rather than a Symbol?"""
    start = f'{{"format": "{FORMAT}"'.encode()
    try:
        with path.open("rb") as file:
            return file.read(len(start)) == start
    except OSError:
        return False


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan whose :func:`plan_text` is in ``path``.

    The network is traced anew and the schedule checked against it. Raises ArgumentError where the
    file holds no plan, or one that this version of memplan traces otherwise.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, not {FORMAT!r}")
        return _plan(data)
    except OSError as error:
        raise ArgumentError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (MemplanError, MXNetError, KeyError, TypeError, ValueError, AttributeError) as error:
        reason = str(error) or type(error).__name__
        raise ArgumentError(
            f"{str(path)!r} holds no plan that can be used: {reason}. Make it anew: memplan plan "
            "NETWORK --realisation explicit (or packed) -o FILE"
        ) from error


def _plan(data: Mapping[str, Any]) -> Plan:
    traced = _trace(data)
    graph = traced.graph.with_seconds(data["seconds"])
    made = {
        "status": Status[data["status"]],
        "symbol": mx.sym.load_json(data["symbol"]),
        "schedule": Schedule.from_json(graph, json.dumps(data["schedule"])),
        "trace": traced,
        "footprint": Footprint(**data["footprint"]),
        "unplanned": Footprint(**data["unplanned"]),
    }
    plain = {field.name for field in dataclasses.fields(Plan)}.difference(_MADE)
    return Plan(**made, **{name: data[name] for name in plain})


def _trace(data: Mapping[str, Any]) -> Trace:
    """The trace of the network with the ops of the plan, which depend on the kind of device."""
    for device_type in ("cpu", "gpu"):
        traced = trace(
            mx.sym.load_json(data["network"]),
            shapes=data["shapes"],
            type_dict=data["dtypes"],
            grad_req=data["grad_req"],
            realisation=data["realisation"],
            device_type=device_type,
        )
        if [op.name for op in traced.graph.ops] == data["ops"]:
            return traced
    raise ValueError("the network has other ops here than where the plan was made")
