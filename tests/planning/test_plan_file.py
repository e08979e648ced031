"""Damaged plan files: every value, changed to something else, is refused or changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mxnet as mx
import pytest

import memplan
from helpers.amounts import long_except
from helpers.networks import residual_net
from helpers.planning import quick
from memplan.errors import ArgumentError
from memplan.mxnet.plan_file import load_plan, plan_text

# Of every kind that JSON has, and numbers that are too large, too small or no numbers.
OTHER = [None, True, -1, 0.5, 10**400, float("nan"), "x", "", [], [[]], {}, {"x": 1}]

Place = tuple[str | int, ...]


@pytest.fixture(scope="module", params=long_except(["explicit", "packed"], ["packed"]))
def text(request: pytest.FixtureRequest) -> str:
    return text_by(request.param)


def text_by(realisation: str, strategy: str = "checkpoint_last") -> str:
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="first")
    net = mx.sym.Activation(net, act_type="tanh", name="tanh")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3), name="softmax")
    plan = memplan.plan(
        net,
        realisation=realisation,
        strategy=strategy,
        max_overhead=math.inf,
        costs="roofline:cpu",
        data=(16, 4),
    )
    return plan_text(plan)


def places(data: Any, place: Place = ()) -> Iterator[Place]:
    """Where values stand: all of an object, the first and last of a list."""
    if place:
        yield place
    if isinstance(data, dict):
        for name in data:
            yield from places(data[name], (*place, name))
    elif isinstance(data, list) and data:
        for index in sorted({0, len(data) - 1}):
            yield from places(data[index], (*place, index))


def changed(data: Any, place: Place, value: Any) -> Any:
    data = copy.deepcopy(data)
    inner = data
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    return data


def loaded(path: Path, data: Any) -> str | None:
    """The plan in a file with ``data``, as text again; None if it is refused."""
    path.write_text(json.dumps(data), encoding="utf-8")
    try:
        return plan_text(load_plan(path))
    except ArgumentError:
        return None


# Values that say of a plan how it was made: nothing can tell that they were others.
TOLD = (
    "strategy",
    "costs",
    "numpy_shapes",
    "budget_nbytes",
    "planning_seconds",
    "bound_in_order",
    "cut_by_clock",
    "alternative",
    "status",
)
MEASURED = ("allocated_nbytes", "reserve_nbytes", "match_range")
MEASURED += ("optimizer_nbytes", "workspace_nbytes", "workspace_source")


def is_told(place: Place) -> bool:
    return (
        place[0] in (*TOLD, "unplanned")
        or "bound" in str(place[0])
        or place[-1] in MEASURED
        or place[0] == "seconds"
    )


@pytest.mark.long
def test_every_value_that_is_changed_is_refused_or_changes_nothing(
    text: str, tmp_path: Path
) -> None:
    path, data = tmp_path / "plan.json", json.loads(text)
    assert loaded(path, data) == text
    kept = []
    refused = 0
    for place in places(data):
        for value in OTHER:
            if (found := loaded(path, changed(data, place, value))) is None:
                refused += 1
            elif found != text:
                kept.append((place, value))
    wrong = [(place, value) for place, value in kept if not is_told(place)]
    assert not wrong
    # Of what is told, only values of the right kind are taken.
    for place, value in kept:
        before = data
        for step in place:
            before = before[step]
        number = isinstance(value, int | float) and isinstance(before, int | float)
        assert number or type(value) is type(before) or None in (value, before), (place, value)
    assert refused > 800


@pytest.mark.parametrize(
    "change", [{"allocated_nbytes": 1}, {"allocated_nbytes": 2**30 + 1}, {"match_range": 0}]
)
@pytest.mark.parametrize("realisation", ["mirror", "explicit"])
def test_a_promise_that_blocks_do_not_keep(
    realisation: str, change: dict[str, int], tmp_path: Path
) -> None:
    path, data = tmp_path / "plan.json", json.loads(text_by(realisation, "chen_sqrt"))
    assert loaded(path, data) is not None
    data["footprint"] |= change
    assert loaded(path, data) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"budget_nbytes": 1}, "it holds [0-9]+ bytes, and its budget is 1"),
        ({"lower_bound_overhead": 5.0}, "its overhead is 0.*, and its lower bound 5.0"),
        ({"status": "INFEASIBLE"}, "it is a plan, and its status is 'INFEASIBLE'"),
    ],
)
def test_claims_that_its_own_figures_deny(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    network = residual_net(batch=2, size=16, units=2, filters=8)
    plan = quick(network, realisation="packed", budget=0.8)
    path, data = tmp_path / "plan.json", json.loads(plan_text(plan))
    assert 0 < data["lower_bound_overhead"] <= plan.overhead
    assert loaded(path, data) == plan_text(plan)
    path.write_text(json.dumps(data | change), encoding="utf-8")
    with pytest.raises(ArgumentError, match=reason):
        load_plan(path)


def test_an_unplanned_step_may_be_over_its_budget_and_says_so(tmp_path: Path) -> None:
    """So it is where ``unseen="unplanned"`` runs it."""
    path, data = tmp_path / "plan.json", json.loads(text_by("explicit", "store_all"))
    path.write_text(json.dumps(data | {"budget_nbytes": 1}), encoding="utf-8")
    assert str(load_plan(path)).startswith("Does not fit in 1 B: ")


def test_seconds_that_another_order_added_up(tmp_path: Path) -> None:
    path, data = tmp_path / "plan.json", json.loads(text_by("explicit"))
    seconds = sum(data["seconds"])
    data["lower_bound_overhead"] = data["footprint"]["seconds"] / seconds - 1 + 1e-15
    data["footprint"]["seconds"] *= 1 + 1e-15
    assert loaded(path, data) is not None


def test_the_bound_of_a_packing_is_kept(tmp_path: Path) -> None:
    path, data = tmp_path / "plan.json", json.loads(text_by("packed", "chen_sqrt"))
    peak_nbytes = data["footprint"]["peak_nbytes"]
    assert data["packing"]["bound_nbytes"] > peak_nbytes
    path.write_text(json.dumps(data), encoding="utf-8")
    assert load_plan(path).packing.bound_nbytes == data["packing"]["bound_nbytes"]
    assert loaded(path, changed(data, ("packing", "bound_nbytes"), 2**40)) is None
    del data["packing"]["bound_nbytes"]
    path.write_text(json.dumps(data), encoding="utf-8")
    assert load_plan(path).packing.bound_nbytes == peak_nbytes


def test_what_would_cost_less_is_kept(tmp_path: Path) -> None:
    path, plan = tmp_path / "plan.json", dataclasses.replace(convolved(), alternative="another way")
    path.write_text(plan_text(plan), encoding="utf-8")
    assert str(load_plan(path)).endswith("another way.")
    data = json.loads(plan_text(plan))
    del data["alternative"]
    path.write_text(json.dumps(data), encoding="utf-8")
    assert load_plan(path).alternative == ""


def test_a_plan_for_a_gpu_is_loaded_without_one(tmp_path: Path) -> None:
    """Long sums have the same names there, and other hand-overs."""
    data = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=64, name="first")
    halves = [mx.sym.tanh(data * (n + 1)) for n in range(6)]
    net = mx.sym.SoftmaxOutput(mx.sym.concat(*halves, dim=1), name="softmax")
    plan = memplan.plan(
        net,
        realisation="explicit",
        strategy="checkpoint_last",
        max_overhead=math.inf,
        ctx=mx.gpu(0),
        costs="roofline:v100",
        data=(16, 4),
    )
    assert loaded(tmp_path / "plan.json", json.loads(plan_text(plan))) == plan_text(plan)


@pytest.mark.parametrize("names_device", [True, False], ids=["names its device", "of old"])
@pytest.mark.parametrize("realisation", ["packed", "updating"])
def test_a_packed_plan_for_a_gpu_is_loaded_without_one(
    realisation: str, names_device: bool, tmp_path: Path
) -> None:
    """A CPU has the same ops, and some of them need room of their own there."""
    plan = convolved(realisation=realisation, ctx=mx.gpu(0))
    data = json.loads(plan_text(plan))
    if not names_device:
        del data["device_type"]
    assert loaded(tmp_path / "plan.json", data) == plan_text(plan)


def test_a_plan_for_a_gpu_of_what_a_cpu_cannot_run(tmp_path: Path) -> None:
    """Explicit steps refuse LRN on a CPU."""
    net = mx.sym.LRN(
        mx.sym.Convolution(mx.sym.Variable("data"), num_filter=4, kernel=(3, 3)), nsize=3
    )
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3), name="softmax")
    plan = memplan.plan(
        net,
        realisation="explicit",
        strategy="store_all",
        ctx=mx.gpu(0),
        costs="roofline:v100",
        data=(2, 3, 8, 8),
    )
    data = json.loads(plan_text(plan))
    del data["device_type"]
    assert loaded(tmp_path / "plan.json", data) == plan_text(plan)


def test_a_plan_made_for_other_kernels_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without oneDNN, MXNet's own operators take other room."""
    path = tmp_path / "plan.json"
    with monkeypatch.context() as patch:
        patch.setenv("MXNET_MKLDNN_ENABLED", "0")
        path.write_text(plan_text(convolved(realisation="packed")), encoding="utf-8")
    with pytest.raises(ArgumentError, match="made with MXNET_MKLDNN_ENABLED=0, which is not so"):
        load_plan(path)


def convolved(**options: Any) -> memplan.Plan:
    """A plan of a network with a Convolution, which mirroring recomputes."""
    net = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=4, kernel=(3, 3), name="first")
    net = mx.sym.Activation(net, act_type="tanh", name="tanh")
    net = mx.sym.Pooling(net, global_pool=True, pool_type="avg", kernel=(1, 1))
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3), name="softmax")
    given = {"strategy": "memonger", "costs": "roofline:v100", "data": (2, 3, 8, 8)}
    return memplan.plan(net, **given, **options)


def test_a_mirror_plan_for_a_gpu_is_loaded_without_one(tmp_path: Path) -> None:
    """Its Symbol has readers of Convolutions, which a CPU does not need."""
    texts = [plan_text(convolved(ctx=ctx)) for ctx in (mx.cpu(), mx.gpu(0))]
    assert ["_unread" in text for text in texts] == [False, True]
    for text in texts:
        assert loaded(tmp_path / "plan.json", json.loads(text)) == text


@pytest.mark.parametrize("realisation", ["mirror", "explicit"])
def test_a_symbol_of_another_network_or_schedule_is_refused(
    realisation: str, tmp_path: Path
) -> None:
    path, data = tmp_path / "plan.json", json.loads(plan_text(convolved(realisation=realisation)))
    others = [("tanh", {"act_type": "sigmoid"}), ("first", {"__force_mirroring__": "False"})]
    for name, attrs in others:
        symbol = json.loads(data["symbol"])
        [node, *_] = [node for node in symbol["nodes"] if node["name"] == name]
        node["attrs"].update(attrs)
        path.write_text(json.dumps(data | {"symbol": json.dumps(symbol)}), encoding="utf-8")
        with pytest.raises(ArgumentError, match="'symbol' is not that of its network and schedule"):
            load_plan(path)


@pytest.mark.parametrize("size", [-(10**30), 10**30])
def test_a_shape_that_no_number_of_mxnet_holds(text: str, size: int, tmp_path: Path) -> None:
    data = json.loads(text)
    assert loaded(tmp_path / "plan.json", changed(data, ("shapes", "data", 0), size)) is None


def test_what_is_missing_is_named(text: str, tmp_path: Path) -> None:
    path, data = tmp_path / "plan.json", json.loads(text)
    for name in data.keys() - {"device_type", "onednn", "alternative"}:  # which files of old lack
        less = {other: value for other, value in data.items() if other != name}
        path.write_text(json.dumps(less), encoding="utf-8")
        with pytest.raises(ArgumentError, match=name if name != "format" else "no format"):
            load_plan(path)


@pytest.mark.parametrize("value", [None, [], "x", 3])
@pytest.mark.parametrize(
    "name", "footprint unplanned shapes dtypes grad_req schedule packing status".split()
)
def test_a_field_that_holds_something_else_is_named(
    text: str, name: str, value: Any, tmp_path: Path
) -> None:
    path, data = tmp_path / "plan.json", json.loads(text)
    if name == "packing" and value is None and data[name] is None:
        return
    if name == "status":
        value = [value]
    path.write_text(json.dumps(data | {name: value}), encoding="utf-8")
    with pytest.raises(ArgumentError, match=f"'{name}' cannot be {re.escape(repr(value))}"):
        load_plan(path)


@pytest.mark.parametrize("entry", [[3, 1, 0], [3, 10**6, 0], [4, 0, 0], [-1, 0, 0], ["x", 0]])
@pytest.mark.parametrize("field", ["network", "symbol"])
def test_a_network_that_reads_what_is_not_there(
    text: str, field: str, entry: list[Any], tmp_path: Path
) -> None:
    """On which MXNet itself crashes."""
    path, data = tmp_path / "plan.json", json.loads(text)
    if data[field] is None:  # that of a packed plan is made from its schedule, and not read
        assert loaded(path, data | {field: "[]"}) == text
        return
    network = json.loads(data[field])
    assert network["nodes"][4]["inputs"] == [[3, 0, 0]]
    network["nodes"][4]["inputs"] = [entry]
    assert loaded(path, data | {field: json.dumps(network)}) is None


@pytest.mark.parametrize("text_of_file", ["[" * 10**5, '{"format":' * 10**5, "[]", "3", "\x00"])
def test_text_that_is_no_plan(text_of_file: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text_of_file, encoding="utf-8")
    with pytest.raises(ArgumentError, match="holds no plan that can be used"):
        load_plan(path)


def test_what_is_no_path() -> None:
    with pytest.raises(ArgumentError, match="path must be the name of a plan file, got None"):
        load_plan(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(2.7, 3), "23", ("2", 3), (None, 3), 5])
def test_a_shape_is_made_of_integers(shape: Any) -> None:
    net = mx.sym.MakeLoss(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4))
    with pytest.raises(ArgumentError, match="shape of 'data' must be a tuple of integers"):
        memplan.plan(net, data=shape)


def test_what_is_no_plan_has_no_text() -> None:
    with pytest.raises(ArgumentError, match="plan must be a Plan, got an object of type Symbol"):
        plan_text(mx.sym.Variable("data"))
