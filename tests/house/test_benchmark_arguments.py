"""The scripts in benchmarks/ name in one line what they cannot plan, without a traceback."""

from __future__ import annotations

import json
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
        ("update_times", ("nosuch",), "NETWORK: no network 'nosuch'; they are perceptron, lenet, "),
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


# Two ops of one byte each; the second reads the first.
OPS = [
    {"name": "a", "cost": 1, "nbytes": 1, "inputs": []},
    {"name": "b", "cost": 2, "nbytes": 1, "inputs": [0]},
]


@pytest.mark.parametrize("script", ["gaps", "published"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"ops": OPS, "peak_nbytes": 3, "total_cost": 3}, "peak and cost are .2, 3.0.; the file"),
        ({"ops": [{}], "peak_nbytes": 2, "total_cost": 3}, "not a published graph: .*'inputs'"),
    ],
)
def test_a_published_graph_that_contradicts_itself_is_named(
    script: str,
    content: dict[str, object],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    code = str(message(script, str(path), monkeypatch=monkeypatch))
    assert re.match(f"{re.escape(str(path))}: {reason}", code)


@pytest.mark.parametrize("script", ["gaps", "published"])
def test_what_is_neither_a_graph_nor_a_file_is_named(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = str(message(script, "nosuch", monkeypatch=monkeypatch))
    assert re.match("no (network|graph) or file 'nosuch'; ", code)


def test_a_file_in_the_published_format_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph.json"
    content = {"ops": OPS, "peak_nbytes": 2, "total_cost": 3}
    path.write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["published.py", "--time-limit", "2", str(path)])
    runpy.run_path(str(ROOT / "benchmarks" / "published.py"), run_name="__main__")
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith(f"| {path} | infeasible in ")  # both ops' bytes are alive at once
