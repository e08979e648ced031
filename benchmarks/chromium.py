"""Headless Chromium, by which the benchmarks open a report."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run "
    "--disable-sync --disable-background-networking --disable-component-update"
)


def opened(page: Path, user: Path, *flags: str) -> str:
    """What Chromium prints that opens ``page`` with more ``flags``; ``user`` is its folder."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        raise SystemExit("there is no Chromium here: apt-get install chromium")
    command = [browser, *FLAGS.split(), *flags, f"--user-data-dir={user}", page.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return run.stdout
