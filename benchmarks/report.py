"""The HTML report of a large network: its size, and how long a browser takes to open it.

    python benchmarks/report.py [NETWORK]

For each of three runs: seconds from the start of the navigation to the last picture drawn, as the
page itself measures them in headless Chromium, and the whole command, the browser's start included.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

import memplan
from chromium import opened
from memplan.views.report import save_report
from networks import SHAPE, network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", nargs="?", default="resnet152_v2", metavar="NETWORK")
    name = parser.parse_args().network
    plan = memplan.plan(network(name), strategy="chen_greedy", data=SHAPE)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        page = save_report(plan, Path(folder) / "report.html")
        seconds = time.perf_counter() - begin
        print("| network | ops | steps | report, MB | written in, s | opened in, s | command, s |")
        print("|---|---|---|---|---|---|---|")
        for run in range(3):
            drawn, whole = drawing_seconds(page, Path(folder) / f"user{run}")
            print(
                f"| {name} | {len(plan.schedule.graph.ops)} | {len(plan.schedule.ops)} "
                f"| {page.stat().st_size / 1e6:.2f} | {seconds:.2f} | {drawn:.2f} | {whole:.2f} |",
                flush=True,
            )


def drawing_seconds(page: Path, user: Path) -> tuple[float, float]:
    """Seconds until all is drawn, and of the whole command."""
    begin = time.perf_counter()
    printed = opened(page, user, "--dump-dom")
    whole = time.perf_counter() - begin
    ready = re.search(r'data-ready-ms="(\d+)"', printed)
    if ready is None:
        raise SystemExit("the report was not drawn")
    return int(ready[1]) / 1e3, whole


if __name__ == "__main__":
    main()
