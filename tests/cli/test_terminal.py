"""What a terminal and a pipe see: the result, progress, warnings, interrupts, help."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memplan
from helpers.command_line import MIRROR, NET, QUICK, process_of
from helpers.networks import residual_net
from helpers.paths import ROOT
from helpers.planning import NEVER_SECONDS
from memplan.cli import main as cli
from memplan.cli import output as cli_output
from memplan.cli import progress as cli_progress
from memplan.cli.options import Arguments
from memplan.mxnet.load import Network
from memplan.util.progress import LOGGER, tell


@pytest.mark.long
def test_a_pipe_gets_the_result_and_nothing_else() -> None:
    done = process_of("plan", "nets:symbol", "--shape", "data=2,6", *QUICK, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["status"] == "feasible"
    assert done.stderr == "a print of the user's\n"


@pytest.fixture
def left() -> Iterator[int]:
    """A pipe that nobody reads any more, as that of a command whose output goes to ``head -0``."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def test_a_reader_that_leaves_early_is_told_nothing(left: int) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "memplan", "strategies"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
        stdout=left,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    # Python's own complaint at its exit would be of what is still to be flushed.
    assert (process.returncode, process.stderr) == (7, "")


STUCK = """
    import hashlib
    from dataclasses import dataclass
    import memplan, mxnet as mx

    @dataclass(frozen=True)
    class Stuck:
        "Never returns to Python, like a solver."
        def solve(self, problem):
            print("solving", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)

    memplan.strategies.register("stuck", Stuck)

    def net():
        hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="fc")
        return mx.sym.SoftmaxOutput(hidden, name="softmax")
"""


@pytest.mark.parametrize(
    ("redirected", "code", "message"),
    [
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        (">/dev/full", 7, "Error: the result cannot be printed: No space left on device\n"),
        ("--realisation none 2>/dev/full", 7, ""),
        ("--realisation none >&$LEFT 2>&1", 7, ""),
    ],
)
def test_where_nothing_can_be_printed(redirected: str, code: int, message: str, left: int) -> None:
    command = shlex.join([sys.executable, "-m", "memplan", "strategies"])
    process = subprocess.run(
        ["bash", "-c", f"{command} {redirected}"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "LEFT": str(left)},
        pass_fds=[left],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (process.returncode, process.stderr) == (code, message)


@pytest.mark.long
def test_the_second_interrupt_ends_even_a_solver_in_c() -> None:
    Path("stuck.py").write_text(textwrap.dedent(STUCK), encoding="utf-8")
    arguments = ["plan", "stuck:net", "--shape", "data=2,6", "--strategy", "stuck", "-o", "out"]
    process = subprocess.Popen(
        [sys.executable, "-m", "memplan", *arguments, "--budget", "99%"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "solving\n"
        time.sleep(0.5)  # by then it is in C
        process.send_signal(signal.SIGINT)
        assert "again" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(600) == 130  # what it computes in C takes longer
        assert "Interrupted" in process.stderr.read()
    finally:
        process.kill()
        process.wait()
    assert not Path("out").exists()


def test_a_warning_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "1")
    assert cli.run(["plan", *NET, *QUICK, *MIRROR, "-o", "out.json"]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "MIRROR" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("Warning: MXNET_BACKWARD_DO_MIRROR")


def test_an_interrupt_has_its_code(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(memplan, "plan", interrupt)
    assert error(130, "plan", *NET) == "Interrupted.\n"


def test_an_interrupt_that_an_import_swallows_ends_the_command(
    error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Arguments.load

    def swallowing(*arguments: Any) -> Network:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return load(*arguments)

    monkeypatch.setattr(Arguments, "load", swallowing)
    assert error(130, "plan", *NET) == "Interrupted.\n"


@pytest.mark.parametrize(
    ("command", "ends"),
    [
        ("plan", cli_progress.SEARCH_ENDS),
        ("check", cli_progress.WORK_ENDS),
        ("profile", cli_progress.WORK_ENDS),
    ],
)
def test_the_first_interrupt_says_what_it_does(
    command: str, ends: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = ""

    def interrupted(*_: Any, **__: Any) -> None:
        nonlocal said
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            while "again" not in said:
                time.sleep(0.01)
                said += capfd.readouterr().err
            if command != "check":  # whose search ends with the best plan so far
                raise

    monkeypatch.setattr(cli_progress, "GRACE", 0.0)
    for name in ("plan", "profile"):
        monkeypatch.setattr(memplan, name, interrupted)
    assert cli.run([command, *NET]) == 130
    assert ends in said


def test_what_was_found_before_an_interrupt_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = memplan.plan

    def interrupted(*arguments: Any, **options: Any) -> memplan.Plan:
        found = plan(*arguments, **options)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            return found
        raise AssertionError

    monkeypatch.setattr(memplan, "plan", interrupted)
    assert cli.run(["plan", *NET, *QUICK, "-o", "out.json", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["output"] == "out.json"
    assert Path("out.json").exists()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_incumbent_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, shown = _Terminal(), "planning: checkmate, best +25.0%, bound +12.5%"
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with cli_progress.working("planning"):
        tell("checkmate")
        tell("", incumbent_seconds=1.25, unplanned_seconds=1.0)
        tell("", bound_seconds=1.125, unplanned_seconds=1.0)
        for _ in range(600):  # it is drawn a few times in a second
            if shown in screen.getvalue():
                break
            time.sleep(0.1)
    assert shown in screen.getvalue()
    assert not LOGGER.handlers
    assert LOGGER.level == logging.NOTSET


def test_no_thread_is_needed_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt), cli_progress.working("planning") as interrupt:
        signal.raise_signal(signal.SIGINT)
    assert interrupt.has_come
    assert "planning" in screen.getvalue()
    assert sys.stderr is screen


def test_news_begin_anew_with_every_search() -> None:
    shown: list[str] = []
    news = cli_progress.News(shown.append)
    for extra in ({}, {"incumbent_seconds": 0.002}, {"bound_seconds": 0.001}):
        news.handle(logging.makeLogRecord({"msg": "row 1", **extra}))
    news.handle(logging.makeLogRecord({"msg": "row 2"}))
    assert shown == ["row 1", "row 1, best 2 ms", "row 1, best 2 ms, bound 1 ms", "row 2"]


def test_a_pipe_sees_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with cli_progress.working("planning"):
        tell("checkmate")
    assert capsys.readouterr() == ("", "")


COMMANDS = sorted(cli.cli.commands)


@pytest.mark.parametrize("name", [*COMMANDS, ""])
def test_help_has_examples_that_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*filter(None, [name]), "--help"]) == 0
    text = capsys.readouterr().out.replace("\\\n", " ")
    examples = re.findall(r"^ +memplan (.+)$", text, re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        command, *arguments = shlex.split(example)
        cli.cli.commands[command].make_context(command, arguments)
    if name:
        assert "Keys of --json:" in text
    else:
        assert all(f"{int(code):5}  " in text for code in cli_output.Exit)


@pytest.mark.usefixtures("code_counts")  # a check exits with 8 where a promise is broken
@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", *NET, *QUICK],
        ["compare", *NET, "--strategies", "store_all", "--budgets", "least"],
        ["frontier", *NET, *QUICK, "--budgets", "2"],
        ["explain", *NET, *QUICK],
        ["explain", *NET, *QUICK, "unit0_conv1"],
        ["max-batch", "net-symbol.json", "--shape", "data=N,3,8,8", *QUICK, "--budget", "1MiB"],
        pytest.param(["profile", *NET, "--repeats", "1", "--warmup", "0"], marks=pytest.mark.long),
        pytest.param(["check", *NET, *QUICK, "--steps", "1"], marks=pytest.mark.long),
        ["strategies"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_help_names_every_key_of_the_json(
    arguments: list[str], result: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    said = result(*arguments)
    found = set(said)
    for key, value in said.items():
        if key in ("planned", "unplanned"):
            found |= set(value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            found |= set(value[0])
    cli.run([arguments[0], "--help"])
    words = set(re.findall(r"\w+", capsys.readouterr().out.partition("Keys of --json:")[2]))
    assert found <= words


@pytest.mark.parametrize(
    ("strategy", "realisation"),
    [("checkmate", "mirror"), ("checkmate", "explicit"), ("auto", "explicit")],
)
def test_searches_tell_their_best_and_their_bound(
    strategy: str, realisation: str, caplog: pytest.LogCaptureFixture
) -> None:
    symbol, _ = residual_net(units=2)
    with caplog.at_level(logging.INFO, logger="memplan"):
        plan = memplan.plan(
            symbol,
            strategy=strategy,
            realisation=realisation,
            budget="90%",
            time_limit=NEVER_SECONDS,
            data=(2, 3, 8, 8),
        )
    records = [record.__dict__ for record in caplog.records]
    assert records[0]["message"].startswith(strategy)
    unplanned = plan.unplanned.seconds
    for name in ("incumbent_seconds", "bound_seconds"):
        told = [record[name] for record in records if record[name] is not None]
        assert told
        assert all(0.99 * unplanned <= seconds < 2 * unplanned for seconds in told)
