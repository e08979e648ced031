"""The pictures and the reports of plans."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import memplan
from helpers.amounts import examples
from helpers.branches import taking
from helpers.graphs import training_graphs, unit_chain
from helpers.networks import residual_net
from helpers.schedules import random_schedule
from helpers.shown import plan_of, recomputing_chain, renamed
from memplan.errors import ArgumentError, DependencyError
from memplan.planning.comparison import Comparison
from memplan.planning.plan import Attempt
from memplan.step.graph import TrainingGraph
from memplan.step.liveness import at_peak, at_step
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies import Status
from memplan.views.explain import Reasons, memory, why
from memplan.views.layout import forward_layout
from memplan.views.notebook import notebook_html
from memplan.views.pictures import PICTURES, _matrix_cells, overhead_against_memory, plot
from memplan.views.report import report_html, save_report

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">&'\u2028"


@taking(between=20)
@examples(60)
@given(training_graphs(max_forward=12))
def test_no_edge_of_the_layout_runs_through_another_op(
    taken: Counter[str], graph: TrainingGraph
) -> None:
    layout = forward_layout(graph)
    for source, target in layout.edges:
        between = layout.lanes[source + 1 : target]
        taken["between"] += bool(between)
        assert layout.lanes[source] not in between
    assert set(layout.lanes) == set(range(layout.nlanes))


def test_a_cell_of_the_matrix_says_what_a_stage_does_with_an_op() -> None:
    schedule = Schedule.sequence(unit_chain(2), [0, 1, 2, 3, 0, 4])
    assert _matrix_cells(schedule).tolist() == [
        [2, 0, 0, 0, 0],
        [1, 2, 0, 0, 0],
        [0, 1, 2, 0, 0],
        [0, 1, 1, 2, 0],
        [3, 0, 0, 1, 2],
    ]


def test_a_cell_of_the_matrix_takes_a_byte() -> None:
    """There are 100 million of them where there are 10,000 ops."""
    schedule = Schedule.unplanned(unit_chain(500))
    tracemalloc.start()
    try:
        cells = _matrix_cells(schedule)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert cells.nbytes == cells.size
    assert peak < 3 * cells.size


@pytest.mark.parametrize("picture", list(PICTURES))
@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_pictures_are_written(tmp_path: Path, picture: str, ending: str, start: bytes) -> None:
    path = tmp_path / f"picture.{ending}"
    plot(plan_of(recomputing_chain(), budget=10**4), picture, path)
    assert path.read_bytes().startswith(start)


def test_the_picture_of_memory_shows_the_simulated_bytes() -> None:
    plan = plan_of(recomputing_chain(nelements=2**18), budget=5 * 2**20)  # tensors of 1 MiB
    axes = plot(plan).axes[0]
    labels = [line.get_label() for line in axes.lines]
    assert axes.get_ylabel() == "MiB"
    before = axes.lines[labels.index("without a plan")].get_ydata()
    assert max(before) == plan.unplanned.peak_nbytes / 2**20
    assert axes.lines[labels.index("budget: 5.00 MiB")].get_ydata()[0] == 5
    tops = [band.get_paths()[0].vertices[:, 1].max() for band in axes.collections]
    assert max(tops) == plan.total_nbytes / 2**20


def test_overhead_against_memory_takes_comparisons_and_plans() -> None:
    plans = [plan_of(recomputing_chain(), strategy=name) for name in ("one", "two")]
    rows = [Attempt(plan.strategy, None, plan.status, plan, 0.0) for plan in plans]
    rows.append(Attempt("three", 5, Status.NO_PLAN_FOUND, None, 0.0))
    for given_plans in (plans, Comparison(tuple(rows))):
        lines = overhead_against_memory(given_plans).axes[0].lines
        assert [line.get_label() for line in lines] == ["one", "two", "no plan"]
        assert list(lines[0].get_ydata()) == [plans[0].overhead]
    with pytest.raises(ArgumentError, match="no plan to be drawn"):
        overhead_against_memory(Comparison(tuple(rows[2:])))
    for wrong, kind in (([3], "int"), (3, "int"), (np.array(3), "ndarray")):
        with pytest.raises(ArgumentError, match=f"of type {kind}"):
            overhead_against_memory(wrong)  # type: ignore[arg-type]


def test_pictures_that_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_of(recomputing_chain())
    with pytest.raises(ArgumentError, match="'memory', 'matrix', 'network'"):
        plot(plan, "pie")
    with pytest.raises(ArgumentError, match=r"there is no picture \[\]; choose"):
        plot(plan, [])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"written to .*/picture.png: its folder is missing"):
        plot(plan, path=tmp_path / "missing" / "picture.png")
    with pytest.raises(ArgumentError, match=r"written to .*/report.html: its folder is missing"):
        save_report(plan, tmp_path / "missing" / "report.html")
    with pytest.raises(ArgumentError, match="null"):
        save_report(plan, "\0")
    for what_is_no_path in (5, b"picture"):
        with pytest.raises(ArgumentError, match="path: no picture can be written"):
            plot(plan, path=what_is_no_path)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="it names a folder"):
        plan.save_report("missing/")
    with pytest.raises(ArgumentError, match="path: no report can be written to 5: give a name"):
        save_report(plan, 5)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DependencyError, match=r"memplan\[plot\]"):
        plot(plan)


@pytest.mark.parametrize("name", ["there", "there/", "there.png", "missing/", ""])
def test_a_folder_is_no_picture(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one written into it, or beside it."""
    monkeypatch.chdir(tmp_path)
    folders = {tmp_path / "there", tmp_path / "there.png"}
    for folder in folders:
        folder.mkdir()
    with pytest.raises(ArgumentError, match=r"path: no picture can be written.*it names a folder"):
        plot(plan_of(recomputing_chain()), path=name)
    assert set(tmp_path.rglob("*")) == folders


def test_the_report_needs_nothing_from_outside() -> None:
    page = report_html(plan_of(recomputing_chain()))
    assert set(re.findall(r"https?://[^'\"\s]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(?:src|href)\s*=|@import|url\(|\bfetch\(|\bimport\b", page)


def test_no_name_becomes_markup() -> None:
    graph = renamed(unit_chain(3), HOSTILE)
    page = report_html(plan_of(Schedule.unplanned(graph), strategy=HOSTILE), title=HOSTILE)
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert html.escape(HOSTILE) in page
    data = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    assert data["ops"]["name"][1] == data["kinds"][data["ops"]["kind"][1]] == HOSTILE


def test_a_picture_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, path = plan_of(recomputing_chain(), budget=10**4), tmp_path / "picture.png"
    plot(plan, path=tmp_path / "picture")
    whole = path.read_bytes()
    assert whole.startswith(b"\x89PNG")

    def full(figure: Any, file: Any, **_: Any) -> None:
        with contextlib.ExitStack() as opened:
            if isinstance(file, str | os.PathLike):
                file = opened.enter_context(open(file, "wb"))
            file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(ArgumentError, match="no space left"):
        plot(plan, path=path)
    assert path.read_bytes() == whole


def test_a_notebook_shows_a_plan_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = notebook_html(plan_of(recomputing_chain(), strategy=HOSTILE, budget=64))
    root = ElementTree.fromstring(shown)
    assert HOSTILE in "".join(root.itertext())
    roles = [title.text for title in root.iter("title")]
    assert roles == ["in passing", "gradient", "recomputed", "kept", "result"]
    assert not re.search(r"<(?:script|img)|https?:", shown)


@pytest.mark.long
def test_pictures_and_reports_of_mxnets_networks(tmp_path: Path) -> None:
    net, shapes = residual_net()
    for realisation in ("mirror", "explicit"):
        plan = memplan.plan(net, strategy="chen_sqrt", realisation=realisation, **shapes)
        assert plan.peak_nbytes == sum(tensor.nbytes for tensor in at_peak(plan.schedule))
        for picture in PICTURES:
            plot(plan, picture, tmp_path / f"{picture}.png")
        page = save_report(plan, tmp_path / "report.html", others=[plan]).read_text()
        assert "unit0_conv1" in page
        assert "unit0_conv1" in why(plan.schedule, "unit0_conv1")
        ElementTree.fromstring(notebook_html(plan))


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run "
    "--disable-sync --disable-background-networking --disable-component-update "
    "--window-size=1280,1400 --dump-dom"
)


# What a reader does, and what the page then says.
VISIT = """
const said = {};
const at = (id, type, x, y) => {
  const canvas = document.getElementById(id), box = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new PointerEvent(type, {
    clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true}));
  return document.getElementById('tip').textContent;
};
const text = (id) => document.getElementById(id).textContent;
said.peak = text('alive-title');
said.hover = at('timeline', 'pointermove', 0.5, 0.5);
at('timeline', 'pointerdown', 0.5, 0.5);
at('timeline', 'pointerup', 0.5, 0.5);
said.clicked = text('alive-title');
said.tensors = document.querySelectorAll('#tensors tr').length;
document.querySelector('#which button:last-child').click();
said.unplanned = text('alive-title');
const find = document.getElementById('find');
find.value = 'OnError=';
find.dispatchEvent(new Event('input'));
find.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}));
said.found = text('found');
said.chosen = document.querySelector('.op.chosen span').textContent;
said.why = text('why');
said.rows = document.querySelectorAll('.op').length;
said.overview = at('overview', 'pointermove', 0.9999, 0.5);
said.cell = at('cells', 'pointermove', 0.1, 0.1);
said.scatter = document.querySelectorAll('#others-table tr').length;
said.title = document.title;
document.documentElement.dataset.said = JSON.stringify(said);
"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (apt-get install chromium)")
@pytest.mark.long
def test_the_report_of_two_thousand_ops_answers_in_chromium(tmp_path: Path) -> None:
    schedule = random_schedule(renamed(unit_chain(1000), HOSTILE), 1, repeated=0.3)
    plan = plan_of(schedule, budget=10**5)
    page = save_report(plan, tmp_path / "report.html", others=[plan], title="A & B")
    page.write_text(page.read_text().replace("</body>", f"<script>{VISIT}</script></body>"))
    command = [str(CHROMIUM), *FLAGS.split(), f"--user-data-dir={tmp_path / 'user'}", page.as_uri()]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    root = re.search(r"<html[^>]*>", process.stdout)
    assert root is not None
    assert "data-ready-ms" in root[0]
    assert "data-error" not in root[0]
    said = json.loads(html.unescape(str(re.search(r'data-said="([^"]*)"', root[0])[1])))  # type: ignore[index]

    timeline = simulate(schedule)
    assert said["peak"].startswith(f"Alive at step {timeline.peak_step}, the peak: ")
    step, name, facts, alive = said["hover"].split("\n")
    number = int(step.split()[1])
    assert name == schedule.graph.ops[schedule.ops[number]].name
    assert facts.endswith("writes 4 B · 1.00 s")
    assert alive.startswith(f"alive: {_nbytes(timeline.live_nbytes[number])} + ")
    assert said["clicked"].startswith(f"Alive at step {number}: ")
    assert said["tensors"] == 1 + min(201, len(at_step(schedule, number)))
    assert said["unplanned"].startswith("Alive at step 1001, the peak: ")
    assert said["found"] == "1 found"
    assert said["chosen"] == HOSTILE
    assert Reasons(schedule).of(1) in said["why"]
    assert 10 < said["rows"] < 100  # of a thousand: only those in sight are drawn
    assert said["overview"].startswith("loss\n")
    assert said["cell"].startswith("stage 200, op 200: ")
    assert said["scatter"] == 2
    assert said["title"] == "A & B"


def _nbytes(nbytes: int) -> str:
    return f"{nbytes / 2**10:.2f} KiB" if nbytes >= 2**10 else f"{nbytes} B"


@pytest.mark.parametrize("title", [3, 0, b"title"])
def test_a_title_is_a_string(title: Any) -> None:
    plan = plan_of(Schedule.unplanned(unit_chain(3)))
    with pytest.raises(ArgumentError, match="title must be a string"):
        report_html(plan, title=title)


def test_a_plan_shows_itself(tmp_path: Path) -> None:
    net, shapes = residual_net()
    plan = memplan.plan(net, strategy="chen_sqrt", **shapes)
    plan.plot("matrix", tmp_path / "matrix.svg")
    assert (tmp_path / "matrix.svg").exists()
    assert plan.explain() == memory(plan)
    assert plan.explain("unit0_conv1") == why(plan.schedule, "unit0_conv1")
    assert plan.save_report(tmp_path / "report.html").read_text() == plan.report_html()
    assert plan._repr_html_() == notebook_html(plan)
    compared = memplan.compare(net, strategies="chen_sqrt", budgets=None, **shapes)
    assert compared.plot().axes[0].lines[0].get_label() == "chen_sqrt"
