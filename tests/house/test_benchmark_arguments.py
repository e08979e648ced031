"""The scripts in benchmarks/ name in one line what they cannot plan, without a traceback."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from helpers.networks import residual_net
from helpers.paths import ROOT


def message(script: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """What ends the ``script``: its last words, or an exit code of argparse."""
    path = ROOT / "benchmarks" / f"{script}.py"
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize(
    ("script", "arguments", "reason"),
    [
        ("gaps", ("--budgets", "abc"), "--budgets: invalid percents value: 'abc'"),
        ("gaps", ("--budgets", "50,-3"), "--budgets: percentages are positive, got '50,-3'"),
        ("gaps", ("--strategies", "auto,nosuch"), "--strategies: there is no strategy 'nosuch'"),
        ("published", ("nosuch",), "GRAPH: no graph 'nosuch'; they are rl1_n100, "),
    ],
)
def test_an_option_is_refused_as_argparse_does(
    script: str,
    arguments: tuple[str, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message(script, *arguments, monkeypatch=monkeypatch) == 2
    assert f"{script}.py: error: argument {reason}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("net.json", "the shapes behind a network are such as .*, got ''"),
        ("net.json:data=x", "the shapes behind a network are such as .*, got 'data=x'"),
        ("net.json:data=1,2", "shapes .* do not fit the network"),
        ("text.json", "it is no JSON that can be read"),
        ("number.json", "not a memplan graph"),
    ],
)
def test_a_file_that_is_no_step_is_named(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    residual_net()[0].save(str(tmp_path / "net.json"))
    (tmp_path / "text.json").write_text("nothing", encoding="utf-8")
    (tmp_path / "number.json").write_text("3", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code = str(message("gaps", name, monkeypatch=monkeypatch))
    assert re.match(f"{re.escape(name)}: .*{reason}", code)
