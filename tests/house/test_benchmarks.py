"""The scripts in benchmarks/ compute what they say, and run, on something small."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import memplan
from helpers.graphs import unit_chain
from helpers.networks import residual_net
from helpers.paths import ROOT
from helpers.planning import NEVER_SECONDS
from helpers.script import printed_by
from memplan.errors import BudgetError
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies import Outcome, Status, create

MODULES = (
    *("allocation", "curves", "memonger_examples", "table2", "this_process", "training"),
    "updates",
)
SCRIPTS = [
    path
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """Modules of benchmarks/."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield SimpleNamespace(**{name: import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_help_says_what_a_script_does(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert not ended.value.code
    tree = ast.parse(path.read_text(encoding="utf-8"))
    first_line = (ast.get_docstring(tree) or "").splitlines()[0]
    assert " ".join(first_line.split()) in " ".join(capsys.readouterr().out.split())


BUSY = "import time\nwhile time.process_time() < {}: pass\n"


def test_seconds_of_the_processor_are_those_of_all_that_a_process_has_started(
    scripts: SimpleNamespace,
) -> None:
    """A child that runs, one that has ended, and the child of a child."""
    busy = BUSY.format(0.1)
    code = f"""{busy}
import subprocess, sys
subprocess.run([sys.executable, "-c", {busy!r}], check=True)
print(flush=True)
sys.stdin.read()
"""

    def of_others() -> float:
        return float(scripts.this_process.processor_seconds() - time.process_time())

    before = of_others()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running = of_others()
    assert running - before > 0.15
    assert of_others() - before > 0.15


def test_the_child_that_plans_counts_in_memongers_examples(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Planning takes three seconds here, all of them in the child."""
    spent = [2.0]

    def search_plan(cost: int) -> int:
        spent[0] += 3.0
        return cost

    program = tmp_path / "example.py"
    program.write_text("import memonger\nold_cost = 2\nnew_cost = memonger.search_plan(1)\n")
    monkeypatch.setattr(memplan, "search_plan", search_plan)
    monkeypatch.setitem(sys.modules, "memonger", None)
    monkeypatch.setattr(scripts.memonger_examples, "processor_seconds", lambda: spent[0])
    assert scripts.memonger_examples.row(program) == ["example.py", "2", "1", "3", "3"]


def test_a_network_without_any_plan_has_a_row(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    unplanned = SimpleNamespace(allocated_nbytes=100 << 20)
    memonger = SimpleNamespace(unplanned=unplanned, fixed_nbytes=0, overhead=0.25)
    refused = SimpleNamespace(rows=[SimpleNamespace(plan=None)] * 4)
    planner = SimpleNamespace(plan=lambda *_, **__: memonger, compare=lambda *_, **__: refused)
    monkeypatch.setattr(scripts.allocation, "memplan", planner)
    monkeypatch.setattr(scripts.allocation.networks, "network", lambda _: None)
    cells = scripts.allocation.row("vgg16", "packed", NEVER_SECONDS)
    assert cells == ["vgg16", "100", "1868", "25.0%", *["-"] * 11]


def test_the_unplanned_step_is_told_where_every_budget_is_refused(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BudgetError("no plan fits", proved=False, lowest_nbytes=3_000_000)

    monkeypatch.setitem(scripts.updates.NETWORKS, "small", residual_net)
    monkeypatch.setattr(scripts.updates, "memplan", SimpleNamespace(plan=refuse))
    refused = r"no plan \(least 3\)"
    row = scripts.updates.row("small", NEVER_SECONDS)
    assert re.fullmatch(rf"\| small \| \d+( \| {refused}){{4}} \|", row)


def test_the_ratio_is_that_of_neighbouring_steps(scripts: SimpleNamespace) -> None:
    """Not that of the medians of each side, which here is 1; and who begins alternates."""
    order = []

    def steps(name: str, *seconds: float) -> Callable[[], float]:
        left = list(seconds)

        def run() -> float:
            order.append(name)
            return left.pop(0)

        return run

    first, second = steps("first", 9.0, 1.0, 2.0, 3.0), steps("second", 1.0, 3.0, 1.0, 2.0)
    assert scripts.training.paired_ratio(first, second, 3) == pytest.approx(2.0 / 3.0)
    assert order[2:] == ["first", "second", "second", "first", "first", "second"]


def test_the_curve_is_of_plans_that_no_other_one_beats(scripts: SimpleNamespace) -> None:
    def row(mb: int, overhead: float) -> Any:
        unplanned = SimpleNamespace(total_nbytes=15 << 20, allocated_nbytes=12 << 20)
        plan = SimpleNamespace(total_nbytes=(3 + mb) << 20, overhead=overhead, unplanned=unplanned)
        return SimpleNamespace(plan=plan)

    rows = [row(9, 0.1), row(7, 0.2), row(8, 0.3), row(9, 0.4), SimpleNamespace(plan=None)]
    assert scripts.curves.undominated(rows) == [(7.0, 20.0), (9.0, 10.0)]


def test_the_picture_is_drawn(scripts: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs memplan[plot]")
    curves = {"mirror (a)": [(7.0, 20.0), (9.0, 10.0)], "explicit (b)": []}
    panel = scripts.curves.Panel("net", 12.0, (8.0, 30.0), curves)
    scripts.curves.draw([panel, panel], tmp_path / "made" / "picture.png")
    assert (tmp_path / "made" / "picture.png").read_bytes()[1:4] == b"PNG"


def test_without_matplotlib_the_extra_is_named(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(scripts.curves.DependencyError, match=r"memplan\[plot\]"):
        scripts.curves.draw([], tmp_path / "picture.png")


@pytest.mark.long
def test_growth_of_a_process_is_compared_with_its_promise() -> None:
    options = ("--networks", "lstm", "--budgets", "0.9", "--realisations", "packed,mirror")
    printed = printed_by("benchmarks/process_memory.py", *options, "--strategy", "auto:effort=0.1")
    [row] = [line.strip("| ").split(" | ") for line in printed.splitlines()[2:]]
    assert (row[0], row[3], len(row)) == ("lstm", "90%", 10)
    for ratio in (row[2], row[5], row[8]):
        assert 0.5 < float(ratio) < 10
    for cell in (row[4], row[7]):
        assert float(cell) > 0  # the bits are the same


@pytest.mark.long
def test_explicit_steps_are_timed() -> None:
    small = ("--size", "32", "--batch", "2", "--pairs", "1", "mobilenet0_25")
    printed = printed_by("benchmarks/training.py", "unplanned", *small)
    assert re.search(r"^\| mobilenet0_25 \| \d+\.\d \| \d+\.\d{3} \|", printed, re.MULTILINE)
    planned = ("planned", "--strategy", "store_all", "--shares", "2", "--time-limit", "3")
    printed = printed_by("benchmarks/training.py", *planned, *small)
    assert re.search(r"^\| mobilenet0_25 \| 200% \| \d+ of \d+ \| \d+\.\d%", printed, re.MULTILINE)


def test_the_geometric_mean(scripts: SimpleNamespace) -> None:
    assert scripts.table2.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert scripts.table2.geometric_mean([3.0]) == pytest.approx(3.0)


def test_every_option_is_one_that_a_strategy_has(scripts: SimpleNamespace) -> None:
    table2: ModuleType = scripts.table2
    names = {name.split(",")[0] for name in table2.STRATEGIES}
    strategies = [create(name, realisation="explicit") for name in names]
    assert all(any(hasattr(strategy, key) for strategy in strategies) for key in table2.KIND)


def test_a_strategy_is_compared_with_the_optimum(scripts: SimpleNamespace) -> None:
    """And counts at the budgets that it meets only."""
    table2: ModuleType = scripts.table2
    graph = unit_chain(8)
    names = ("chen_sqrt", table2.ROUNDING, "checkmate")
    options = {"time_limit": NEVER_SECONDS, "solver": "HIGHS"}
    cells = [table2.measure(graph, nbytes, names, options) for nbytes in (20, 28)]
    assert [cell.proved for cell in cells] == [True, True]
    assert [cell.ratio("checkmate") for cell in cells] == pytest.approx([1.0, 1.0])
    ratio = cells[1].ratio("chen_sqrt")
    assert ratio is not None
    assert ratio > 1.0
    assert cells[0].ratio("chen_sqrt") is None
    lines = table2.table([("chain", cells)], names).splitlines()
    assert lines[2:4] == ["| optimum proved | 2 of 2 |", f"| chen_sqrt | {ratio:.3f} (1) |"]
    assert lines[-1] == "| checkmate | 1.000 (2) |"


def test_budgets_lie_between_the_least_and_the_unplanned_peak(scripts: SimpleNamespace) -> None:
    graph = unit_chain(8)
    found = scripts.table2.budgets(graph, 3, 1.0)
    peak = simulate(Schedule.unplanned(graph)).peak_nbytes
    assert len(found) == 3
    assert 0 < found[0] < found[1] < found[2] < peak


@pytest.mark.parametrize("bound", [0.0, 1e9], ids=["too much memory", "false bound"])
def test_what_cannot_be_true_is_noticed(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, bound: float
) -> None:
    graph = unit_chain(8)
    unplanned = Schedule.unplanned(graph)
    budget = simulate(unplanned).peak_nbytes - (not bound)
    outcome = Outcome(Status.FEASIBLE, unplanned, bound)
    monkeypatch.setattr(scripts.table2, "solve", lambda *_: outcome)
    with pytest.raises(AssertionError):
        scripts.table2.measure(graph, budget, ["liar"], {})


@pytest.mark.long
def test_gaps_between_plans_and_bounds(tmp_path: Path) -> None:
    graph = unit_chain(8)
    file = tmp_path / "chain.json"
    file.write_text(graph.to_json(), encoding="utf-8")
    options = ("--budgets", "80,20", "--seconds", "600", "--memory", "live", str(file))
    lines = printed_by("benchmarks/gaps.py", *options).splitlines()
    assert lines[0] == "| network | ops | 80% | 20% |"
    cells = lines[2].strip("| ").split(" | ")
    assert cells[1] == str(len(graph.ops))
    assert re.fullmatch(r"\d+\.\d\d, proved, auto, \d+ s", cells[2])
    assert cells[3].startswith("none: proved")
    assert lines[-1].startswith("2 plans: 0 neither found nor excluded, 1 proved; gap 0.00 points")


@pytest.mark.long
def test_updates_within_the_step_save_what_they_promise() -> None:
    printed = printed_by("benchmarks/updates.py", "--process")
    cells = [line.strip("| ").split(" | ") for line in printed.splitlines()[3:]]
    (_, packed, packed_grown), (_, updating, updating_grown) = cells
    saved = int(packed) - int(updating)
    assert saved > 140
    assert int(packed_grown) - int(updating_grown) > saved / 2


@pytest.mark.long
def test_small_steps_that_update_are_timed_beside_mxnets_own() -> None:
    printed = printed_by("benchmarks/update_times.py", "--pairs", "1", "perceptron")
    name, _, *ratios, _ = printed.splitlines()[-1].strip("| ").split(" | ")
    assert name == "perceptron"
    assert all(float(ratio) > 0.0 for ratio in ratios)
    assert len(ratios) == 3
