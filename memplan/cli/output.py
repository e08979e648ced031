"""How commands end: results as text or JSON, files, errors and exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from memplan.cli import INTERRUPTED
from memplan.errors import (
    ArgumentError,
    BudgetError,
    DependencyError,
    MemplanError,
    UsageError,
)
from memplan.planning.comparison import COLUMNS, figures
from memplan.planning.plan import Attempt, Footprint, Plan
from memplan.planning.realisation import AUTO
from memplan.step.costs import how_to_profile
from memplan.strategies import REALISATIONS
from memplan.util.files import check_names_a_file, write_text


class Exit(enum.IntEnum):
    """The exit codes, with what they mean."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> Exit:
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    OK = 0, "done"
    BUG = 1, "an error in memplan or in a plugin; please report it"
    USAGE = 2, "an option, argument or input file cannot be used"
    PROVED = 3, "no plan fits the budget: proved"
    NOT_FOUND = 4, "no plan within the budget was found in the time given; one may exist"
    MXNET = 5, "MXNet 1.9.1 (or a solver) is missing or failed"
    NETWORK = 6, "the network or its costs cannot be used, or a process of memplan's was ended"
    OUTPUT = 7, "a result cannot be written"
    BROKEN = 8, "a step by the plan took more memory than promised, or computed something else"
    INTERRUPTED = INTERRUPTED, "interrupted; the best plan found by then, if any, is still written"


# What says for which realisation costs are measured.
_FOR_REALISATION = {name: f"--realisation {name} " for name in (AUTO, *REALISATIONS)}

# Messages speak of the arguments of Python's functions, in ways like these; here they are options.
_IN_PYTHON: tuple[tuple[str, Any], ...] = (
    *(
        (
            re.escape(how_to_profile(realisation)),
            f"memplan profile NETWORK {option}--shape data=32,3,224,224 -o costs.json",
        )
        for realisation, option in ((None, ""), *_FOR_REALISATION.items())
    ),
    (r"\b(realisation|strategy|costs)='([^']*)'", r"--\1 \2"),
    (r"\bgrad_req='(\w+)'", r"--grad-req '...=\1'"),
    # What is to be written into a network, as mx.sym.Variable("h", shape=(32, 10)), stays Python.
    (
        r"\b(?!shape=)(\w+)=\(((?:[0-9]+|'N')(?:, [0-9]+)*),?\)",
        lambda match: _shape_option(*match.groups()),
    ),
    (r"^(costs must be )a Roofline, (.*), a CostTable or", r"\1\2 or"),
    (r"^(costs|reserve|optimizer|cache|repeats|warmup)(?= must be )", r"--\1"),
    (r"\btype_dict\b", "--dtype"),
    (r"\bgrad_req\b", "--grad-req"),
    (r"^time_limit(?= must be a positive )", "--time-limit"),  # a strategy may have one, too
    (r"\bmax_overhead\b", "--max-overhead"),
)


class OutputError(MemplanError):
    """A result cannot be written."""


def exit_code(error: BaseException) -> Exit:
    """The exit code that says what ``error`` means."""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return Exit.INTERRUPTED
    if isinstance(error, BudgetError):
        return Exit.PROVED if error.proved else Exit.NOT_FOUND
    if isinstance(error, ArgumentError | UsageError | click.UsageError | click.FileError):
        return Exit.USAGE
    if isinstance(error, OutputError):
        return Exit.OUTPUT
    # The core does not import MXNet, so its error is known by name.
    if isinstance(error, DependencyError) or type(error).__name__ == "MXNetError":
        return Exit.MXNET
    return Exit.NETWORK if isinstance(error, MemplanError) else Exit.BUG


def show_error(error: BaseException, *, as_json: bool) -> Exit:
    """Say on stderr what went wrong (and on stdout, with ``as_json``); the exit code."""
    code = exit_code(error)
    message = _message(error)
    if isinstance(error, click.ClickException):
        error.show()
    elif code is not Exit.BUG:  # which needs its traceback
        note(message if code is Exit.INTERRUPTED else f"Error: {message}")
    if as_json:
        figures: dict[str, Any] = {
            "kind": type(error).__name__,
            "message": message,
            "exit_code": int(code),
        }
        if isinstance(error, BudgetError):
            figures |= {"proved": error.proved, "lowest_nbytes": error.lowest_nbytes}
        show_json({"error": figures})
    return code


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return "Interrupted."
    if isinstance(error, click.ClickException):
        return error.format_message()
    if type(error).__name__ == "MXNetError":
        return f"MXNet failed: {str(error).strip().splitlines()[-1]}"
    return with_options(str(error))


def with_options(message: str) -> str:
    """``message`` with the options of the command line in the place of Python's arguments."""
    for pattern, replacement in _IN_PYTHON:
        message = re.sub(pattern, replacement, message)
    return message


def _shape_option(name: str, sizes: str) -> str:
    return f"--shape {name}=" + re.sub("[ ']", "", sizes)


def show_json(data: Mapping[str, Any]) -> None:
    """``data`` on stdout."""
    click.echo(json.dumps(data, indent=1, allow_nan=False))


def plan_figures(plan: Plan) -> dict[str, Any]:
    """What ``--json`` says of a plan."""
    graph = plan.schedule.graph
    return {
        "status": plan.status.value,
        "strategy": plan.strategy,
        "realisation": plan.realisation,
        "costs": plan.costs,
        "budget_nbytes": plan.budget_nbytes,
        "overhead": plan.overhead,
        "lower_bound_overhead": plan.lower_bound_overhead,
        "planning_seconds": plan.planning_seconds,
        "cut_by_clock": plan.cut_by_clock,
        "planned": _footprint_figures(plan.footprint),
        "unplanned": _footprint_figures(plan.unplanned),
        "recomputed": [graph.ops[op].name for op in plan.schedule.recomputed],
    }


def _footprint_figures(footprint: Footprint) -> dict[str, Any]:
    return {**dataclasses.asdict(footprint), "total_nbytes": footprint.total_nbytes}


def attempt_figures(attempt: Attempt) -> dict[str, Any]:
    """What ``--json`` says of a row: the columns of the CSV."""
    return dict(zip(COLUMNS, figures(attempt), strict=True))


_NO_FOLDER = "its folder is missing; make that first"


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path]) -> None:
    """ArgumentError for an output over an input or another output; OutputError for no folder.

    Said before the work, not after it.
    """
    named = [path for path in outputs if path is not None]
    sources = {_place(path) for path in (inputs if named else ())}
    targets: set[Path] = set()
    for output in named:
        place = _place(output)
        if place in sources:
            raise ArgumentError(f"{str(output)!r} is read by this command; write to another file")
        if place in targets:
            raise ArgumentError(f"{str(output)!r} is named for two outputs")
        try:
            # A file is replaced by a new one of its folder, any other thing is written to.
            # The place of a pipe is no path that can be asked for.
            places = [place.parent, place] if output.is_file() else [output]
            places = places if output.exists() else [place.parent]
            check_names_a_file(output)
        except OSError as error:  # such as too long a name
            raise OutputError(f"{str(output)!r} cannot be written: {error.strerror}") from error
        if not all(os.access(path, os.W_OK) for path in places):
            is_there = place.parent.exists()
            reason = "it is read-only, or its folder is" if is_there else _NO_FOLDER
            raise OutputError(f"{str(output)!r} cannot be written: {reason}")
        targets.add(place)


def _place(path: Path) -> Path:
    """Where ``path`` leads; OutputError for one from a folder that has been deleted.

    Not by Path.resolve, which raises for links that lead to themselves.
    """
    try:
        return Path(os.path.realpath(path))
    except FileNotFoundError as error:  # a name alone is one in the folder of the process
        raise OutputError(
            f"{str(path)!r} cannot be written or read: the folder in which this runs is gone; "
            f"change to one that is there"
        ) from error


def write(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, all of it or nothing; OutputError if it cannot be.

    Then it is kept in the folder for temporary files, if there is room: it may have taken long.
    """
    try:
        write_text(path, text)
    except OSError as error:
        message = f"{str(path)!r} cannot be written: {error.strerror}"
        with contextlib.suppress(OSError):
            message += f"; what it was to hold is in {_kept(text, path.suffix)!r}"
        raise OutputError(message) from error


def _kept(text: str, suffix: str) -> str:
    """The name of a new temporary file with ``text``; OSError if there can be none."""
    descriptor, name = tempfile.mkstemp(prefix="memplan-", suffix=suffix)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        os.unlink(name)
        raise
    return name


def note(text: str) -> None:
    """What a person wants to know, and a pipe does not: on stderr."""
    click.echo(text, file=sys.stderr)
