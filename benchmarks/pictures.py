"""Draws the pictures in docs/images: those of a plan for ResNet-50, and a screenshot of its report.

    python benchmarks/pictures.py [FOLDER]

About two minutes. The screenshot, of the page with the mouse over the first picture, needs
Chromium.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import memplan
from chromium import opened
from memplan.views.pictures import PICTURES, overhead_against_memory, plot
from memplan.views.report import report_html
from networks import SHAPE, network

NAME = "resnet50_v1"
STRATEGIES = ("memonger", "chen_sqrt", "chen_greedy", "checkmate")
BUDGETS = (0.8, 0.65, 0.5, 0.4, None)

HOVER = """<script>{
const canvas = document.getElementById('timeline'), box = canvas.getBoundingClientRect();
canvas.dispatchEvent(new PointerEvent('pointermove', {
  clientX: box.left + 0.79 * box.width, clientY: box.top + 0.55 * box.height}));
}</script></body>"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default="docs/images", metavar="FOLDER")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    net = network(NAME)
    comparison = memplan.compare(
        net, strategies=STRATEGIES, budgets=BUDGETS, time_limit=15, data=SHAPE
    )
    print(comparison)
    plan = memplan.plan(net, budget=0.5, time_limit=30, data=SHAPE)
    print(plan)
    for picture in PICTURES:
        plot(plan, picture, folder / f"report-{picture}.png")
    overhead_against_memory(comparison, folder / "report-overhead.png")
    page = report_html(plan, others=comparison, title="ResNet-50 v1, batch 32 at 224 × 224")
    _screenshot(page.replace("</body>", HOVER), folder / "report-page.png")


def _screenshot(page: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        path.write_text(page, encoding="utf-8")
        flags = ("--hide-scrollbars", "--window-size=1280,1640", f"--screenshot={target.resolve()}")
        opened(path, Path(folder) / "user", *flags)


if __name__ == "__main__":
    main()
