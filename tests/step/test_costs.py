"""Rooflines, tables of measured costs, and putting them on a graph."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memplan.errors import ArgumentError, CostError
from memplan.step.costs import ROOFLINES, CostTable, Roofline, with_costs
from memplan.step.graph import Op, Tensor, TrainingGraph

TABLE = CostTable("cpu(Some CPU)", {"conv": 0.25, "relu": 0.5}, {"data": (8, 3, 4, 4)})


@pytest.fixture
def graph() -> TrainingGraph:
    ops = (
        Op("conv0", "Convolution", (), (0,), flops=6_000, traffic_nbytes=10, signature="conv"),
        Op("relu0", "Activation", (0,), (1,), flops=10, traffic_nbytes=4_000, signature="relu"),
        Op("conv1", "Convolution", (1,), (2,), flops=6_000, traffic_nbytes=10, signature="conv"),
    )
    tensors = tuple(Tensor(op.name, 40, 10) for op in ops)
    return TrainingGraph(ops, tensors, heads=(2,), nforward=3)


def seconds(graph: TrainingGraph) -> list[float]:
    return [op.seconds for op in graph.ops]


def test_roofline_takes_the_longer_of_computing_and_moving(graph: TrainingGraph) -> None:
    roofline = Roofline(1_000, 100, launch_seconds=0.5)
    assert seconds(with_costs(graph, roofline)) == [6.5, 40.5, 6.5]


def test_roofline_efficiency(graph: TrainingGraph) -> None:
    roofline = Roofline(1_000, 100, flops_efficiency=0.5, bytes_efficiency=0.25)
    assert seconds(with_costs(graph, roofline)) == [12, 160, 12]


@pytest.mark.parametrize(
    "bad",
    [
        {"flops_per_second": 0},
        {"flops_per_second": math.inf},
        {"bytes_per_second": -1},
        {"launch_seconds": -1e-6},
        {"launch_seconds": math.nan},
        {"bytes_per_second": "900"},
        {"flops_per_second": 10**400},
        {"bytes_efficiency": None},
        {"flops_efficiency": 0},
        {"bytes_efficiency": 1.1},
        {"flops_per_second": 5e-324, "flops_efficiency": 0.4},
        {"bytes_per_second": 5e-324, "bytes_efficiency": 0.4},
    ],
)
def test_a_roofline_names_its_bad_field(bad: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        Roofline(**{"flops_per_second": 1.0, "bytes_per_second": 1.0, **bad})


@pytest.mark.parametrize("name", ROOFLINES)
def test_named_rooflines(graph: TrainingGraph, name: str) -> None:
    assert with_costs(graph, f"roofline:{name}") == with_costs(graph, ROOFLINES[name])
    assert min(seconds(with_costs(graph, f"roofline:{name}"))) > 0


def test_an_unknown_roofline_lists_the_choices(graph: TrainingGraph) -> None:
    with pytest.raises(ArgumentError, match=r"'k80'.*roofline:v100.*roofline:cpu"):
        with_costs(graph, "roofline:k80")


@pytest.mark.parametrize("costs", ["v100", "costs.csv", "", Path("costs"), 1.0, None])
def test_other_costs_are_refused(graph: TrainingGraph, costs: object) -> None:
    with pytest.raises(ArgumentError, match="costs must be") as caught:
        with_costs(graph, costs)  # type: ignore[arg-type]
    assert repr(costs) in str(caught.value)


def test_table(graph: TrainingGraph) -> None:
    costed = with_costs(graph, TABLE)
    assert seconds(costed) == [0.25, 0.5, 0.25]
    assert costed.seconds == 1.0
    assert seconds(graph) == [0.0, 0.0, 0.0]


def test_table_of_the_right_device(graph: TrainingGraph) -> None:
    assert with_costs(graph, TABLE, device="cpu(Some CPU)").seconds == 1.0


def test_table_of_another_device(graph: TrainingGraph) -> None:
    with pytest.raises(CostError, match=r"cpu\(Some CPU\).*gpu\(Tesla T4\).*memplan\.profile"):
        with_costs(graph, TABLE, device="gpu(Tesla T4)")


def test_a_roofline_may_stand_for_any_device(graph: TrainingGraph) -> None:
    assert with_costs(graph, "roofline:v100", device="gpu(Tesla V100)").seconds > 0


def test_missing_ops_are_named(graph: TrainingGraph) -> None:
    table = CostTable("cpu(Some CPU)", {"relu": 0.5}, {"data": (16, 3, 4, 4)})
    with pytest.raises(CostError, match=r"2 of 3 ops.*'conv0', 'conv1'.*profile") as caught:
        with_costs(graph, table)
    assert "data=(16, 3, 4, 4)" in str(caught.value)
    with pytest.raises(CostError, match=r"profile\(net, ctx=..., realisation='packed', data="):
        with_costs(graph, table, realisation="packed")


@pytest.mark.parametrize("as_type", [str, Path])
def test_save_and_load(graph: TrainingGraph, tmp_path: Path, as_type: type) -> None:
    path = as_type(tmp_path / "costs.json")
    TABLE.save(path)
    assert CostTable.load(path) == TABLE
    assert with_costs(graph, path) == with_costs(graph, TABLE)


def test_a_path_may_be_one_of_bytes(graph: TrainingGraph, tmp_path: Path) -> None:
    class OfBytes:
        def __fspath__(self) -> bytes:
            return bytes(tmp_path / "costs.json")

    TABLE.save(tmp_path / "costs.json")
    assert with_costs(graph, OfBytes()).seconds == 1.0  # type: ignore[arg-type]


def test_saving_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text("old", encoding="utf-8")
    TABLE.save(path)
    assert CostTable.load(path) == TABLE
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_save_keeps_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "costs.json"
    TABLE.save(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memplan.util.files.os.replace", full)
    with pytest.raises(CostError, match=r"costs\.json.*No space left"):
        CostTable("gpu(Tesla T4)", {}).save(path)
    assert CostTable.load(path) == TABLE
    assert list(tmp_path.iterdir()) == [path]


def test_saving_into_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="nowhere"):
        TABLE.save(tmp_path / "nowhere" / "costs.json")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CostError, match=r"costs\.json.*No such file.*memplan\.profile"):
        CostTable.load(tmp_path / "costs.json")


@pytest.mark.parametrize("wrong", [5, b"costs.json", "\0"])
def test_what_is_no_path(wrong: Any) -> None:
    with pytest.raises(CostError, match="cannot be written to"):
        TABLE.save(wrong)
    with pytest.raises(CostError, match="is no table of costs"):
        CostTable.load(wrong)


GOOD = {"format": "memplan.costs/1", "device": "cpu(Some CPU)", "shapes": {}, "seconds": {}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[]",
        "3",
        "{}",
        json.dumps(GOOD)[:-5],
        json.dumps(GOOD | {"format": "memplan.step.graph/1"}),
        json.dumps({name: GOOD[name] for name in ("format", "device", "shapes")}),
        json.dumps(GOOD | {"device": ""}),
        json.dumps(GOOD | {"device": 7}),
        json.dumps(GOOD | {"seconds": [1, 2]}),
        json.dumps(GOOD | {"seconds": 1}),
        json.dumps(GOOD | {"seconds": {"conv": "fast"}}),
        json.dumps(GOOD | {"seconds": {"conv": -1}}),
        json.dumps(GOOD | {"seconds": {"conv": math.nan}}),
        json.dumps(GOOD | {"seconds": {"conv": 10**400}}),
        json.dumps(GOOD | {"seconds": {"conv": True}}),
        '{"seconds": ' * 100_000,
        json.dumps(GOOD | {"shapes": {"data": 8}}),
        json.dumps(GOOD | {"shapes": {"data": [8, "x"]}}),
        json.dumps(GOOD | {"shapes": []}),
    ],
)
def test_a_damaged_or_foreign_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CostError, match=r"costs\.json' is no table of costs.*memplan\.profile"):
        CostTable.load(path)


@pytest.mark.parametrize("value", [None, [1.0], "x", 5])
@pytest.mark.parametrize("name", ["seconds", "shapes", "workspace_nbytes"])
def test_a_table_is_made_of_mappings(tmp_path: Path, name: str, value: Any) -> None:
    arguments: Any = {"device": "cpu(x)", "seconds": {}, name: value}
    with pytest.raises(CostError, match=f"^{name} must be a mapping, got"):
        CostTable(**arguments)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(GOOD | {name: value}), encoding="utf-8")
    with pytest.raises(CostError, match=f"no table of costs: {name} must be a mapping, got"):
        CostTable.load(path)


def test_numpys_numbers_become_pythons(tmp_path: Path) -> None:
    shapes: Any = {"data": [np.int64(8), 3]}
    table = CostTable("cpu(x)", {"a": np.float32(0.5)}, shapes, {"packed": np.int32(7)})  # type: ignore[dict-item]
    assert table == CostTable("cpu(x)", {"a": 0.5}, {"data": (8, 3)}, {"packed": 7})
    table.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == table
    assert Roofline(np.float32(2), np.int64(3)) == Roofline(2.0, 3)
    assert type(Roofline(np.float32(2), 3).flops_per_second) is float
    with pytest.raises(CostError, match="True seconds for the op a"):
        CostTable("cpu(x)", {"a": np.bool_(True)})
    with pytest.raises(
        CostError, match=r"device must name what was measured, got array\(\[1, 2\]\)"
    ):
        CostTable(np.array([1, 2]), {})  # type: ignore[arg-type]


def test_what_a_file_lacks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    for name in ("format", "device", "seconds", "shapes"):
        data = {other: value for other, value in GOOD.items() if other != name}
        path.write_text(json.dumps(data), encoding="utf-8")
        with pytest.raises(CostError, match=f"no table of costs: it lacks '{name}'"):
            CostTable.load(path)


def test_a_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(CostError, match=r"costs\.json"):
        CostTable.load(path)


def test_the_good_file_is_good(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(GOOD), encoding="utf-8")
    assert CostTable.load(path).device == "cpu(Some CPU)"
