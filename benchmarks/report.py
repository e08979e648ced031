"""The HTML report of a large network: its size, and how long a browser takes to open it.

    python benchmarks/report.py [network]

For each of three runs: seconds from the start of the navigation to the last picture drawn, as the
page itself measures them in headless Chromium, and the whole command, the browser's start included.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import memplan
from memplan.views.report import save_report
from networks import SHAPE, network

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run "
    "--disable-sync --disable-background-networking --disable-component-update --dump-dom"
)


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "resnet152_v2"
    plan = memplan.plan(network(name), strategy="chen_greedy", data=SHAPE)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        page = save_report(plan, Path(folder) / "report.html")
        seconds = time.perf_counter() - begin
        print("| network | ops | steps | report, MB | written in, s | opened in, s | command, s |")
        print("|---|---|---|---|---|---|---|")
        for run in range(3):
            opened, whole = _open(page, Path(folder) / f"user{run}")
            print(
                f"| {name} | {len(plan.schedule.graph.ops)} | {len(plan.schedule.ops)} "
                f"| {page.stat().st_size / 1e6:.2f} | {seconds:.2f} | {opened:.2f} | {whole:.2f} |",
                flush=True,
            )


def _open(page: Path, user: Path) -> tuple[float, float]:
    """Seconds until all is drawn, and of the whole command."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        raise SystemExit("there is no Chromium here: apt-get install chromium")
    begin = time.perf_counter()
    process = subprocess.run(
        [browser, *FLAGS.split(), f"--user-data-dir={user}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    whole = time.perf_counter() - begin
    ready = re.search(r'data-ready-ms="(\d+)"', process.stdout)
    if ready is None:
        raise SystemExit("the report was not drawn")
    return int(ready[1]) / 1e3, whole


if __name__ == "__main__":
    main()
