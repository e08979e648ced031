"""The command line: memplan, or python -m memplan."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Callable, Sequence

import click

import memplan
from memplan.cli.check import check
from memplan.cli.output import Exit, note, show_error, with_options
from memplan.cli.plan import explain, plan
from memplan.cli.profile import profile
from memplan.cli.search import compare, frontier, max_batch
from memplan.cli.strategies import strategies

# What stdout says that cannot be written to: nobody reads it, or there is no room.
_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_CODES = "\n".join(f"{int(code):5}  {code.meaning}" for code in Exit)


@click.group(
    commands=[plan, explain, compare, frontier, max_batch, profile, check, strategies],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=f"\b\nExit codes:\n{_CODES}",
)
@click.version_option(memplan.__version__, message="memplan %(version)s")
def cli() -> None:
    """Plan the activation memory of training on MXNet 1.9.1 by recomputation.

    NETWORK, in every command, is a Symbol's JSON, a Gluon export (parameters beside the JSON are
    found), or module:function: a function without arguments that returns a Symbol, a Gluon block,
    or a pair of a block and its loss, in a module that can be imported or lies in this folder.

    Results go to stdout, progress (on a terminal) and notes to stderr. With --json the result is
    one JSON object; if the command fails, it has the key "error" with kind, message and exit_code,
    and with proved and lowest_nbytes where a budget cannot be met.

    \b
    Examples:
      memplan plan model-symbol.json --shape data=32,3,224,224 --budget 4GiB -o plan.json
      memplan compare model-symbol.json --shape data=32,3,224,224 --budgets 75%,50%
      memplan explain model-symbol.json --shape data=32,3,224,224 --budget 60%
    """


def run(arguments: Sequence[str]) -> int:
    """Run the command; its exit code. Errors of memplan are one message on stderr."""
    # MXNet says at every bind by which backend it computes.
    os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")
    try:
        return _run(arguments)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        # Whoever reads this has enough, or the disk is full; Python would complain at its exit
        # when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with contextlib.suppress(OSError):  # of a stderr that cannot be written to
            if not isinstance(error, BrokenPipeError):
                note(f"Error: the result cannot be printed: {error.strerror}")
        return int(Exit.OUTPUT)


def _run(arguments: Sequence[str]) -> int:
    as_json = "--json" in arguments
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning()
            with cli.make_context("memplan", list(arguments)) as context:
                code = cli.invoke(context)
            sys.stdout.flush()
            return int(code)
    except click.exceptions.Exit as finish:  # of --help and --version
        return finish.exit_code
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            raise
        code = show_error(error, as_json=as_json)
        if code is Exit.BUG:
            raise
        return int(code)


def _show_warning() -> Callable[..., None]:
    """Shows a warning as one line, and only once however often it is given."""
    messages: set[str] = set()

    def show(message: Warning | str, *_: object) -> None:
        if str(message) not in messages:
            note(f"Warning: {with_options(str(message))}")
        messages.add(str(message))

    return show
