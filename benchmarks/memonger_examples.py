"""memonger's two example programs, with memplan for the module that they import.

    python benchmarks/memonger_examples.py FOLDER [PROGRAM ...]

FOLDER is a checkout of https://github.com/dmlc/mxnet-memonger; the programs run as they stand,
at their own sizes, with all defaults of `memplan.search_plan`. Printed as Markdown: what
`get_cost` says before and after, in MB, the seconds of the processor that `search_plan` and the
whole program take, with those of the child process that plans.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

import memplan
from this_process import processor_seconds

PROGRAMS = ("example_resnet.py", "example_lstm.py")


def row(path: Path) -> list[str]:
    """The cells of a program."""
    seconds: list[float] = []

    def timed(*arguments: Any, **options: Any) -> Any:
        begin = processor_seconds()
        symbol = memplan.search_plan(*arguments, **options)
        seconds.append(processor_seconds() - begin)
        return symbol

    module: Any = type(sys)("memonger")
    module.search_plan, module.get_cost = timed, memplan.get_cost
    sys.modules["memonger"] = module
    begin = processor_seconds()
    names = runpy.run_path(str(path))
    whole = processor_seconds() - begin
    costs = [str(names[name]) for name in ("old_cost", "new_cost")]
    return [path.name, *costs, f"{sum(seconds):.0f}", f"{whole:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS), metavar="PROGRAM")
    options = parser.parse_args()
    print("| program | before, MB | after, MB | planned in s | whole program, s |")
    print("|---|---|---|---|---|")
    for name in options.programs:
        print("| " + " | ".join(row(options.folder / name)) + " |", flush=True)


if __name__ == "__main__":
    main()
