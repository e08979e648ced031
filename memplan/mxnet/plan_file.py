"""Plans as files: made on one machine, trained by on another."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mxnet as mx
from mxnet.base import MXNetError

from memplan.errors import ArgumentError, MemplanError
from memplan.memory.blocks import allocate
from memplan.memory.packing import Packing, check_packing
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.environment import onednn_is_enabled
from memplan.mxnet.trace.user_operators import missing_operator, unregistered_operator
from memplan.planning.plan import Footprint, Plan
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies import Status
from memplan.util.files import damage, read_json
from memplan.util.numbers import is_whole, shown
from memplan.util.records import plain_fields

FORMAT = "memplan.plan/4"

DEVICE_TYPES = ("cpu", "gpu")

# By what share the same seconds may differ once added up, in another order or by another machine.
ROUNDING = 1e-9

# Fields of a plan that are made of objects; the others are numbers and strings.
_MADE = frozenset("status schedule trace packing footprint unplanned".split())

# What JSON holds for those of a file's fields that are looked into.
_KINDS: Mapping[str, Any] = {
    "status": str,
    **dict.fromkeys(("footprint", "unplanned", "shapes", "dtypes", "grad_req", "schedule"), dict),
    "packing": dict | None,
}

# What is raised by data that is no plan, or one of other ops.
_DAMAGED = (MemplanError, MXNetError, LookupError, TypeError, ValueError, AttributeError)

_OTHER_KERNELS = (
    ". It was made with MXNET_MKLDNN_ENABLED={}, which is not so here, and MXNet computes other "
    "ops then"
)


def plan_text(plan: Plan) -> str:
    """``plan`` as JSON: the network and all that is known of it; read back by :func:`load_plan`.

    ArgumentError for what is no plan.
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(f"plan must be a Plan, got an object of type {type(plan).__name__}")
    traced, graph = plan.trace, plan.schedule.graph
    fields = {field.name for field in dataclasses.fields(plan)}.difference(_MADE)
    data = {
        "format": FORMAT,
        **{name: getattr(plan, name) for name in sorted(fields)},
        "status": plan.status.name,
        "footprint": dataclasses.asdict(plan.footprint),
        "unplanned": dataclasses.asdict(plan.unplanned),
        "network": symbol_json.text_of(traced.symbol),
        # MXNet cannot write the backward op of user code, which packed steps alone have.
        "symbol": None if traced.form.in_one_array else symbol_json.text_of(plan.symbol),
        "shapes": {name: list(shape) for name, shape in traced.shapes.items()},
        "dtypes": dict(traced.dtypes),
        "grad_req": dict(traced.grad_req),
        "numpy_shapes": traced.numpy_shapes,
        "device_type": traced.device_type,
        "onednn": plan.trace.by_onednn,
        "seconds": [op.seconds for op in graph.ops],
        "ops": [op.name for op in graph.ops],
        "schedule": json.loads(plan.schedule.to_json()),
        "packing": None,
    }
    if plan.packing is not None:
        data["packing"] = {
            "nbytes": plan.packing.nbytes,
            "bound_nbytes": plan.packing.bound_nbytes,
            "offsets": plan.packing.rows,
        }
    return json.dumps(data, allow_nan=False)


def is_plan(path: Path) -> bool:
    """Does the file hold a plan, rather than a Symbol?

    Of any version, damaged, or written anew by what formats JSON: :func:`load_plan` says so then.
    Raises ArgumentError for a pipe, as what is read here could not be read again.
    """
    try:
        is_read_twice = path.is_file() or path.is_dir() or not path.exists()
    except OSError:  # such as too long a name
        return False
    if not is_read_twice:
        raise ArgumentError(
            f"{str(path)!r} is no regular file, and can be read only once; as it may hold a plan "
            "or a Symbol, write it to a file first"
        )
    try:
        return re.search(rb'"format"\s*:\s*"memplan\.plan/', path.read_bytes()) is not None
    except (OSError, ValueError):  # a name with a zero byte
        return False


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan whose :func:`plan_text` is in ``path``.

    The network is traced anew and the schedule checked against it. Raises ArgumentError where there
    is no file, or it holds no plan, or one that this version of memplan traces otherwise.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"path must be the name of a plan file, got {shown(path)}")
    data, path = None, Path(os.fsdecode(path))
    try:
        data = read_json(path)
        if not isinstance(data, dict) or "format" not in data:
            raise ValueError("it names no format")
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, not {FORMAT!r}")
        return _plan(data)
    except OSError as error:
        raise ArgumentError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except _DAMAGED as error:
        missing = missing_operator(error)
        if missing is not None:
            raise ArgumentError(
                f"{str(path)!r} plans for the Custom op {missing!r}, which is not defined here; "
                "import the module that defines it first"
            ) from error
        if (unknown := unregistered_operator(error)) is not None:
            raise ArgumentError(
                f"{str(path)!r} plans for the operator {unknown!r}, which this MXNet does not "
                f"have; if a library brings it, call mx.library.load with the library first"
            ) from error
        kernels = _other_kernels(data) if isinstance(data, dict) else ""
        raise ArgumentError(
            f"{str(path)!r} holds no plan that can be used: {damage(error)}{kernels}. Make it "
            "anew: memplan plan NETWORK --realisation explicit (or packed) -o FILE"
        ) from error


def _other_kernels(data: Mapping[str, Any]) -> str:
    """That MXNet had other kernels where the plan was made, if it had; a GPU has one kind."""
    made_with = data.get("onednn")
    if data.get("device_type") != "cpu" or made_with not in (True, False):
        return ""
    return "" if made_with == onednn_is_enabled() else _OTHER_KERNELS.format(int(made_with))


def _plan(data: Mapping[str, Any]) -> Plan:
    """The plan as it is on the device that it was made for.

    Ops depend on the kind of device, and may be others under the same names. Files of earlier
    versions do not name it: it is the first on which all that they say holds.
    """
    for name, kind in _KINDS.items():
        if name in data and not isinstance(data[name], kind):
            raise ValueError(f"{name!r} cannot be {shown(data[name])}")
    device_type = data.get("device_type")
    if device_type not in (None, *DEVICE_TYPES):
        raise ValueError(f"'device_type' cannot be {shown(device_type)}")
    errors: list[Exception] = []
    for possible in DEVICE_TYPES if device_type is None else (device_type,):
        try:
            return _plan_on(possible, data)
        except _DAMAGED as error:
            errors.append(error)
    raise errors[0]


def _plan_on(device_type: str, data: Mapping[str, Any]) -> Plan:
    """The plan, traced for a device of this kind."""
    names = {field.name for field in dataclasses.fields(Plan)}.difference(_MADE)
    # Files of earlier versions have no alternative.
    plain = plain_fields(Plan, {"alternative": "", **data}, sorted(names))
    traced = _traced(data, device_type)
    schedule = _schedule(traced, data)
    footprint = _footprint(data["footprint"])
    figures = (traced.graph.fixed_nbytes, simulate(schedule).peak_nbytes)
    if (footprint.fixed_nbytes, footprint.peak_nbytes) != figures or not math.isclose(
        footprint.seconds, schedule.seconds, rel_tol=ROUNDING
    ):
        raise ValueError("its footprint is not that of its schedule")
    if not traced.form.in_one_array:
        _check_blocks(traced, schedule, footprint)
    plan = Plan(
        status=Status[data["status"]],
        schedule=schedule,
        trace=traced,
        footprint=footprint,
        unplanned=_footprint(data["unplanned"]),
        packing=_packing(traced, schedule, footprint, data["packing"]),
        **plain,
    )
    _check_symbol(plan, data["symbol"])
    _check_claims(plan)
    return plan


def _check_claims(plan: Plan) -> None:
    """ValueError where the figures of the plan are not what they say of each other.

    An unplanned step may be over the budget: where training meets shapes that it does not plan for.
    """
    is_over = plan.budget_nbytes is not None and plan.total_nbytes > plan.budget_nbytes
    if is_over and plan.schedule != Schedule.unplanned(plan.schedule.graph):
        raise ValueError(
            f"it holds {plan.total_nbytes} bytes, and its budget is {plan.budget_nbytes}"
        )
    if (plan.lower_bound_overhead or 0.0) > plan.overhead + ROUNDING:
        raise ValueError(
            f"its overhead is {plan.overhead}, and its lower bound {plan.lower_bound_overhead}"
        )
    if plan.status not in (Status.OPTIMAL, Status.FEASIBLE):
        raise ValueError(f"it is a plan, and its status is {plan.status.name!r}")


def _footprint(data: Mapping[str, Any]) -> Footprint:
    names = [field.name for field in dataclasses.fields(Footprint)]
    return Footprint(**plain_fields(Footprint, data, names))


def _check_blocks(traced: Trace, schedule: Schedule, footprint: Footprint) -> None:
    """ValueError where MXNet's blocks, at the match range of the plan, hold other bytes.

    MXNet says how many whole MiB it allocates, and may have said more than that.
    """
    runs = lower(traced, schedule).schedule if traced.form.spells_out_backward else schedule
    nbytes = allocate(runs, match_range=footprint.match_range).nbytes
    if footprint.allocated_nbytes < nbytes or (footprint.allocated_nbytes - nbytes) % 2**20:
        raise ValueError(
            f"MXNet's blocks hold {nbytes} bytes at the match range {footprint.match_range}, and "
            f"its footprint says {footprint.allocated_nbytes}"
        )


def _packing(
    traced: Trace, schedule: Schedule, footprint: Footprint, data: Mapping[str, Any] | None
) -> Packing | None:
    """Where the tensors of a packed plan lie, checked against its schedule."""
    if (data is None) == traced.form.in_one_array:
        raise ValueError(f"'packing' cannot be {shown(data)}")
    if data is None:
        return None
    # The live bytes are a bound as well, and the one of files that name none.
    bound_nbytes = data.get("bound_nbytes", footprint.peak_nbytes)
    numbers = [data["nbytes"], bound_nbytes, *(number for row in data["offsets"] for number in row)]
    if not all(map(is_whole, numbers)):
        raise ValueError("'packing' has what is no whole number")
    packing = Packing.from_rows(data["nbytes"], data["offsets"], bound_nbytes=bound_nbytes)
    check_packing(lower(traced, schedule).schedule, packing)
    if packing.nbytes != footprint.allocated_nbytes or bound_nbytes > packing.nbytes:
        raise ValueError("its footprint is not that of its packing")
    return packing


def _check_symbol(plan: Plan, text: Any) -> None:
    """ValueError where the ``text`` is of another Symbol than the schedule gives.

    MXNet would train another network than was planned. That of a packed plan is in no file.
    """
    if plan.trace.form.in_one_array:
        return
    # What MXNet's JSON has beside says which version wrote it, and with which shapes.
    parsed = map(symbol_json.parse, (_symbol(text), plan.symbol))
    one, other = ([data[key] for key in ("nodes", "heads")] for data in parsed)
    if one != other:
        raise ValueError("'symbol' is not that of its network and schedule")


def _symbol(text: Any) -> mx.sym.Symbol:
    if not isinstance(text, str):
        raise ValueError(f"{shown(text)} is no Symbol")
    return symbol_json.read(text)


def _schedule(traced: Trace, data: Mapping[str, Any]) -> Schedule:
    seconds = data["seconds"]
    if not isinstance(seconds, list):
        raise ValueError(f"'seconds' cannot be {shown(seconds)}")
    graph = traced.graph.with_seconds(seconds)
    return Schedule.from_json(graph, json.dumps(data["schedule"]))


def _traced(data: Mapping[str, Any], device_type: str) -> Trace:
    """The network with the ops of the plan, on a device of this kind.

    With the shapes of the plan, NumPy's or not, whatever the process has.
    """
    if not isinstance(data["numpy_shapes"], bool):
        raise ValueError(f"'numpy_shapes' cannot be {shown(data['numpy_shapes'])}")
    with mx.util.np_shape(data["numpy_shapes"]):
        traced = trace(
            _symbol(data["network"]),
            shapes=data["shapes"],
            type_dict=data["dtypes"],
            grad_req=data["grad_req"],
            realisation=data["realisation"],
            device_type=device_type,
        )
    shapes = {name: list(shape) for name, shape in traced.shapes.items()}
    values = {"shapes": shapes, "dtypes": traced.dtypes, "grad_req": traced.grad_req}
    for name, value in values.items():
        if value != data[name]:
            raise ValueError(f"{name!r} are not those of its network")
    if [op.name for op in traced.graph.ops] != data["ops"]:
        raise ValueError("the network has other ops here than where the plan was made")
    return traced
