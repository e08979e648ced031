"""Where the command line starts: it imports nothing before it can answer Ctrl-C."""

import sys
from typing import NoReturn

from memplan.cli import INTERRUPTED


def main() -> NoReturn:
    """The console script."""
    try:
        from memplan.cli.main import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while the rest was imported
        print("Interrupted.", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)
