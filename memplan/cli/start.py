"""Where the command line starts: it imports nothing before it can answer Ctrl-C."""

import os
import sys
from io import TextIOWrapper
from typing import NoReturn

from memplan.cli import INTERRUPTED


def main() -> NoReturn:
    """The console script."""
    try:
        _open_what_is_closed()
        _print_every_name()
        from memplan.cli.main import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while the rest was imported
        print("Interrupted.", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)


def _print_every_name() -> None:
    """What the encoding of stdout lacks is written as an escape, as stderr does by itself."""
    if isinstance(sys.stdout, TextIOWrapper):  # others may have no encoding
        sys.stdout.reconfigure(errors="backslashreplace")


def _open_what_is_closed() -> None:
    """Without stdout or stderr (``>&-``) what goes there goes nowhere, and not into other files."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
