"""Where the command line starts: it imports nothing before it can answer Ctrl-C."""

import os
import sys
from typing import NoReturn

from memplan.cli import INTERRUPTED


def main() -> NoReturn:
    """The console script."""
    try:
        _open_what_is_closed()
        from memplan.cli.main import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while the rest was imported
        print("Interrupted.", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)


def _open_what_is_closed() -> None:
    """Without stdout or stderr (``>&-``) what goes there goes nowhere, and not into other files."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
