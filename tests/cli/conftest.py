"""A folder with a network, and commands that succeed or fail in it."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import NETS
from helpers.networks import residual_net
from memplan.cli import main as cli
from memplan.planning import least


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own with a network and a module, as the current one."""
    monkeypatch.setattr(least, "SEARCH_SECONDS", 0.1)
    symbol, _ = residual_net(units=2)
    symbol.save(str(tmp_path / "net-symbol.json"))
    (tmp_path / "nets.py").write_text(textwrap.dedent(NETS), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("nets", None)


@pytest.fixture
def result(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command that must succeed; its result as JSON."""

    def call(*arguments: str) -> Any:
        code = cli.run([*arguments, "--json"])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return json.loads(printed.out)

    return call


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command that must fail with ``code``; its message."""

    def call(code: int, *arguments: str) -> str:
        assert cli.run(arguments) == code
        printed = capsys.readouterr()
        assert not printed.out
        assert "Traceback" not in printed.err
        return printed.err

    return call
