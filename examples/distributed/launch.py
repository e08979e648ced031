"""Starts a scheduler, servers and workers on this machine, and ends all when one of them fails.

    python examples/distributed/launch.py --workers 2 -- --api gluon --epochs 3

What stands after ``--`` is for train.py. README.md says what to start on which of several hosts.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(role: str, command: list[str], common: dict[str, str]) -> subprocess.Popen:
    """One process of MXNet's parameter server."""
    return subprocess.Popen(
        [sys.executable, *command], env=os.environ | common | {"DMLC_ROLE": role}
    )


def wait(processes: list[subprocess.Popen], seconds: float) -> str | None:
    """Until all have ended; what went wrong, as soon as it does."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            return f"not done after {seconds:g} s"
        failures = [process for process in processes if process.poll()]
        if failures:
            return f"{' '.join(failures[0].args)} ended with {failures[0].returncode}"
        time.sleep(0.1)
    failures = [process for process in processes if process.returncode]
    return f"{' '.join(failures[0].args)} ended with {failures[0].returncode}" if failures else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--port", type=int, default=0, help="of the scheduler; 0: any free one")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for all of it")
    parser.add_argument("arguments", nargs="*", help="for train.py, after --")
    options = parser.parse_args()
    common = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(options.port or free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": str(options.servers),
        "DMLC_NUM_WORKER": str(options.workers),
    }
    # Ended from outside, it ends its processes as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    processes: list[subprocess.Popen] = []
    try:
        for role, count in (("scheduler", 1), ("server", options.servers)):
            processes += [start(role, ["-c", "import mxnet"], common) for _ in range(count)]
        train = [str(TRAIN), *options.arguments]
        processes += [start("worker", train, common) for _ in range(options.workers)]
        wrong = wait(processes, options.timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    sys.exit(wrong)


if __name__ == "__main__":
    main()
