"""What nobody types on purpose: odd digits, endless names, networks that exit, no memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import memplan
from helpers.command_line import NET, QUICK, process_of
from helpers.paths import ROOT
from helpers.script import printed_by
from memplan.mxnet.plan_file import is_plan

EXITING = """
import sys
import mxnet as mx

if {at_import}:
    sys.exit(3)

def network():
    sys.exit("good bye")

class Block(mx.gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        sys.exit(5)

block = Block()
"""


@pytest.mark.parametrize(
    ("command", "value", "culprit"),
    [
        ("plan", "9" * 400, "digits"),
        ("plan", "9" * 20, "more than memplan can count"),
        ("plan", "9" * 5000, "digits"),
        ("plan", "0." + "1" * 5000 + "GiB", "digits"),
        ("plan", "²", "the budget '²' cannot be used"),
        ("plan", "٣GiB", "the budget '٣GiB' cannot be used"),
        ("plan", "9000000TiB", "more than memplan can count"),
        ("max-batch", "²", "the budget '²' cannot be used"),
        ("max-batch", "least", "the budget 'least' cannot be used; it must be bytes"),
    ],
    ids=range(9),
)
def test_budgets_that_are_none(command: str, value: str, culprit: str, error: Any) -> None:
    network = ["nets:symbol", "--shape", f"data={'N' if command == 'max-batch' else 2},6"]
    message = error(2, command, *network, "--budget", value)
    assert culprit in message
    assert len(message) < 1000


@pytest.mark.parametrize("share", ["3x", "%", "3%%", ""])
def test_shares_that_are_none(share: str, error: Any) -> None:
    message = error(2, "max-batch", *NET, "--budget", "1MiB", "--max-overhead", share)
    assert f"'{share}' is no share such as 0.3 or 30%" in message


@pytest.mark.parametrize("value", ["²", "٣", "1²", "9" * 400, "9" * 5000], ids=range(5))
def test_lists_of_budgets_that_are_none(value: str, error: Any) -> None:
    assert "cannot be used" in error(2, "frontier", *NET, "--budgets", value)
    assert "cannot be used" in error(2, "compare", *NET, "--budgets", f"least,{value}")


@pytest.mark.parametrize("value", ["²,3", "٣,3,8,8", "9" * 400, "2,ä"])
def test_shapes_that_are_none(value: str, error: Any) -> None:
    assert "is not of the form" in error(2, "plan", "net-symbol.json", "--shape", f"data={value}")


def test_what_a_size_of_0_stands_for_is_said(error: Any) -> None:
    message = error(2, "plan", "net-symbol.json", "--shape", "data=0,3,8,8").replace("\n", " ")
    assert "The 0 in --shape data=0,3,8,8 stands for a size that is not known" in message
    assert "stands for" not in error(2, "plan", "net-symbol.json", "--shape", "data=4")


@pytest.mark.long
def test_a_name_beyond_ascii_in_a_locale_of_it() -> None:
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = process_of("plan", *NET, *QUICK, "-o", "plän.json", **settings)
    assert done.returncode == 0, done.stderr
    assert is_plan(Path("plän.json"))


@pytest.mark.long
def test_a_name_that_stdout_cannot_encode_is_escaped() -> None:
    symbol = Path("net-symbol.json").read_text(encoding="utf-8")
    Path("net.json").write_text(symbol.replace('"unit', '"→'), encoding="utf-8")
    done = process_of("explain", "net.json", *NET[1:], *QUICK, PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr
    assert "\\u2192" in done.stdout


@pytest.mark.parametrize("value", ["gpu:٣", "gpu:99999999999999999999", "gpu(²)"])
def test_contexts_that_are_none(value: str, error: Any) -> None:
    assert "there is no context" in error(2, "plan", *NET, "--ctx", value)


@pytest.mark.parametrize("option", ["-o", "--report"])
def test_a_name_that_no_file_can_have_is_said_before_the_work(
    option: str, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memplan, "plan", lambda *_, **__: pytest.fail("searched before"))
    assert "File name too long" in error(7, "plan", *NET, option, "n" * 256)


def test_a_name_as_long_as_files_have_is_written(result: Any) -> None:
    name = "n" * 250 + ".json"
    result("plan", *NET, *QUICK, "-o", name)
    assert "nodes" in Path(name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["n" * 256 + ".json", "n" * 5000 + ".json"])
def test_an_input_that_no_file_can_be_is_bad_usage(name: str, error: Any) -> None:
    assert "File name too long" in error(2, "plan", name)
    assert "File name too long" in error(2, "explain", name)


def test_an_input_that_is_a_link_to_itself_is_bad_usage(error: Any) -> None:
    Path("circle.json").symlink_to("circle.json")
    assert "symbolic links" in error(2, "plan", "circle.json", "-o", "out.json")


@pytest.mark.parametrize(
    ("at_import", "function", "code"),
    [(True, "network", "3"), (False, "network", "good bye"), (False, "block", "5")],
)
def test_a_network_that_exits_has_failed(
    at_import: bool, function: str, code: str, error: Any
) -> None:
    name = f"exiting_{at_import}_{function}"
    Path(f"{name}.py").write_text(EXITING.format(at_import=at_import), encoding="utf-8")
    message = error(2, "plan", f"{name}:{function}", "--shape", "data=2,3")
    assert f"SystemExit: {code}" in message
    assert f"{name}:{function}" in message


# Ctrl-C when the command line imports this module, which it does before it plans anything.
INTERRUPTED = """
import signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
sys.argv = ["memplan", "plan", "net-symbol.json", "--shape", "data=2,3,8,8"]
from memplan.cli.start import main
main()
"""


@pytest.mark.parametrize("module", ["numpy", "click", "memplan.planning.planner", "mxnet"])
def test_ctrl_c_while_modules_are_imported(module: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(module=module)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "Interrupted.\n")


def test_the_command_line_starts_before_anything_is_loaded() -> None:
    """Else an interrupt would find nobody to answer it."""
    code = "import sys, memplan.cli.start; print(sorted({'numpy', 'click'} & set(sys.modules)))"
    assert printed_by("-c", code) == "[]\n"


def test_every_public_name_is_found_where_it_stands() -> None:
    for name in memplan.__all__:
        assert getattr(memplan, name).__name__.rpartition(".")[2] == name
        assert name in dir(memplan)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        memplan.nothing  # noqa: B018


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise MemoryError", "MemoryError; let this process have more memory"),
        (
            "import numpy; numpy.__version__ = '2.4.6'; raise AttributeError('np.PZERO is gone.')",
            "np.PZERO is gone; numpy 2.4.6 is too new for it: pip install 'numpy<1.24'",
        ),
        (
            "import numpy; numpy.__version__ = '2.4.6'; raise OSError('no libgomp.so.1')",
            "no libgomp.so.1; install it with pip install 'memplan[cpu]'",
        ),
    ],
)
def test_what_keeps_mxnet_from_being_imported_has_a_remedy(source: str, said: str) -> None:
    Path("mxnet").mkdir()
    Path("mxnet/__init__.py").write_text(source, encoding="utf-8")
    done = process_of("plan", *NET, PYTHONPATH=f"{Path.cwd()}{os.pathsep}{ROOT}")
    assert done.returncode == 5
    assert f"cannot be imported: {said}" in done.stderr
