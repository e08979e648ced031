"""The examples run, and what they assert holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import memplan
from helpers.paths import ROOT
from helpers.script import printed_by

EXAMPLES = ROOT / "examples"
LOSS = re.compile(r"loss: ([\d.]+) to ([\d.]+)")
FITS = re.compile(r"^Fits in (.*): (.*) at (\+[\d.]+%) time \(unplanned: (.*)\)$", re.MULTILINE)


def run(name: str, arguments: str) -> str:
    """What the example prints; its checks must hold."""
    return printed_by(f"examples/{name}.py", *arguments.split())


@pytest.mark.long
def test_resnet() -> None:
    sizes = "--stages 1 2 --filters 8 --batch 8 --size 64 --seconds 2 --steps 3 --repeats 2"
    printed = run("resnet", f"{sizes} --budget 88%")
    rows = dict(re.findall(r"^(\S.*?)  +(\S.*)$", printed, re.MULTILINE))
    unplanned, planned = map(float, re.findall(r"([\d.]+) MiB", rows["whole step"]))
    assert 0 < planned <= 0.88 * unplanned + 0.1
    assert re.fullmatch(r"\+\d+\.\d%", rows["overhead, predicted"])
    assert re.fullmatch(r"[+-]\d+\.\d%", rows["overhead, measured"])
    for step in (1, 2, 3):
        first, second = rows[f"loss of step {step}"].split()
        assert first == second
    assert rows["loss of step 1"] != rows["loss of step 3"]


# Most of these small steps is code, which no plan lowers: the budgets leave room for it.
TRAINED = {
    "lstm": "--steps 12 --layers 1 --hidden 32 --batch 32 --updates 12 --budget 97% --seconds 5",
    "unet": "--size 96 --levels 2 --filters 4 --updates 8 --budget 86% --seconds 2",
    "transformer": "--layers 2 --width 32 --length 32 --updates 8 --budget 85% --seconds 2",
    "fine_tuning": "--units 4 --filters 8 --batch 8 --size 32 --updates 8 --budget 80% --seconds 2",
    "mixed_precision": "--layers 4 --filters 8 --size 32 --updates 8 --budget 80% --seconds 2",
}


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str) -> None:
    printed = run(name, TRAINED[name])
    fits = FITS.findall(printed)
    assert fits, "the memory table is missing"
    for budget, planned, _, unplanned in fits:
        nbytes = memplan.util.nbytes.parse_budget
        assert nbytes(planned, 0) <= nbytes(budget, 0)
        assert nbytes(planned, 0) < nbytes(unplanned, 0)
    first, last = map(float, LOSS.search(printed).groups())
    assert last < first


@pytest.mark.long
def test_own_strategy() -> None:
    printed = run("own_strategy", "--network mobilenet0.25 --batch 8 --size 64")
    assert re.search(r"^cheap_ops +[\d.]+ MiB +feasible", printed, re.MULTILINE)
    assert re.search(r"^CheapOps ", printed, re.MULTILINE)


@pytest.mark.long
def test_profile_and_plan(tmp_path: Path) -> None:
    """Measured in one process, planned in another; a table of another network is refused."""
    costs, planned = tmp_path / "costs.json", tmp_path / "planned.json"
    sizes = "--shape 4 3 64 64"
    printed = run("profile_and_plan", f"measure {sizes} --costs {costs}")
    device = memplan.CostTable.load(costs).device
    assert f"measured on {device}: {costs}" in printed
    sizes += " --seconds 2 --budget 80%"
    printed = run("profile_and_plan", f"plan {sizes} --costs {costs} --out {planned}")
    assert f"costs measured on {device}" in printed
    assert "force_mirroring" in planned.read_text()


def test_every_example_is_in_the_index_and_run() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    index = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"\((\w+)\.py\)", index)) == names
    assert names == {*TRAINED, "resnet", "own_strategy", "profile_and_plan"}
