"""Draws the pictures in docs/images: those of a plan for ResNet-50, and a screenshot of its report.

    python benchmarks/pictures.py [folder]

About two minutes. The screenshot, of the page with the mouse over the first picture, needs
Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import memplan
from memplan.views.pictures import PICTURES, overhead_against_memory, plot
from memplan.views.report import report_html
from networks import SHAPE, network

NAME = "resnet50_v1"
STRATEGIES = ("memonger", "chen_sqrt", "chen_greedy", "checkmate")
BUDGETS = (0.8, 0.65, 0.5, 0.4, None)

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run "
    "--disable-sync --disable-background-networking --disable-component-update --hide-scrollbars "
    "--window-size=1280,1640"
)
HOVER = """<script>{
const canvas = document.getElementById('timeline'), box = canvas.getBoundingClientRect();
canvas.dispatchEvent(new PointerEvent('pointermove', {
  clientX: box.left + 0.79 * box.width, clientY: box.top + 0.55 * box.height}));
}</script></body>"""


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
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
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        raise SystemExit("there is no Chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        path.write_text(page, encoding="utf-8")
        command = [browser, *FLAGS.split(), f"--user-data-dir={folder}/user"]
        command += [f"--screenshot={target.resolve()}", path.as_uri()]
        subprocess.run(command, capture_output=True, timeout=120, check=True)


if __name__ == "__main__":
    main()
