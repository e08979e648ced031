"""Loops around networks and losses that others published: what a plan changes in them.

    python benchmarks/scripts.py
    python benchmarks/scripts.py --only FCN,SSD --size 128

The loops are those of tests/scripts, each run as it is and planned, in a process of its own. A row
has: the lines that change; whether losses, weights and states are equal to the last bit; the MiB of
the step, parameters and gradients included, unplanned and planned; by how many MiB the process
grows, planning included.
GluonCV and GluonNLP must be installed, as `make test-all` does.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from this_process import memory_nbytes

TESTS = Path(__file__).resolve().parents[1] / "tests"
MODULES = ("test_mxnet", "test_examples", "test_gluoncv", "test_gluonnlp")


def main() -> None:
    """Print a table; or, for the processes of this one, the figures of a loop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of loops, separated by commas")
    parser.add_argument("--size", type=int, default=64, help="of GluonCV's pictures")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--planned", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(figures(options.run, options.size, plan=options.planned)))
        return
    columns = ["loop", "lines changed", "bits", "step, MiB", "planned step, MiB"]
    columns += ["process grows by, MiB", "planned, MiB"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for name in options.only.split(",") if options.only else loops():
        print(row(name, options.size), flush=True)


def loops() -> dict[str, Any]:
    """Modules and loops by name."""
    sys.path.insert(0, str(TESTS))
    result: dict[str, Any] = {}
    for name in MODULES:
        spec = importlib.util.spec_from_file_location(name, TESTS / "scripts" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        result |= {script: (module, make) for script, make in module.SCRIPTS.items()}
    return result


def row(name: str, size: int) -> str:
    """The row of a loop."""
    command = [sys.executable, __file__, "--run", name, "--size", str(size)]
    plain, planned = output(command), output([*command, "--planned"])
    pairs = zip(plain["values"], planned["values"], strict=True)
    is_equal = all(one == other for one, other in pairs)
    bits = "equal" if is_equal else "DIFFERENT"
    cells = [name, 1, bits, *planned["step"], plain["growth"], planned["growth"]]
    return f"| {' | '.join(map(str, cells))} |"


def output(command: list[str]) -> Any:
    """The figures that a process of this script prints; networks may print before it."""
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(printed.splitlines()[-1])


def figures(name: str, size: int, *, plan: bool) -> dict[str, Any]:
    """Of one run: digests of all values, MiB of growth, and those of the plan."""
    module, make = loops()[name]
    from helpers.scripts import trained

    if hasattr(module, "SIZE") and "R-CNN" not in name:  # its regions are counted for small ones
        module.SIZE = size
    script = make()
    before = memory_nbytes("VmRSS")
    values, net = trained(script, plan=plan)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    result: dict[str, Any] = {
        "values": [
            hashlib.sha256(value.tobytes()).hexdigest()
            for step in values
            for value in step.values()
        ],
        "growth": growth >> 20,
    }
    if plan:
        (planning,) = net.planned_step.plans.values()
        pair = [p.fixed_nbytes + p.allocated_nbytes for p in (planning.unplanned, planning)]
        result["step"] = [f"{nbytes / 2**20:.1f}" for nbytes in pair]
    return result


if __name__ == "__main__":
    main()
