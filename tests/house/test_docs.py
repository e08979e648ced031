"""The pages hold: their code runs and prints what stands there, and they build without a warning.

The python blocks of a page run in order in one namespace. A ``text`` block right after one is what
it prints (``...`` stands for anything). Lines of ``sh`` blocks that begin with ``memplan`` run,
too. A block that begins with "# not run by the tests:" says why; python is then only parsed.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import memplan
from helpers.amounts import long_unless
from helpers.paths import ROOT
from memplan import strategies
from memplan.cli import main as cli
from memplan.util.progress import LOGGER

# Readers plan so.
pytestmark = pytest.mark.usefixtures("code_counts")

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"# not run by the tests: \w.{7,}")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    """A fenced block; ``printed`` is the text right below it, if there is one."""

    language: str
    text: str
    line: int
    printed: str | None

    @property
    def runs(self) -> bool:
        return NOT_RUN.match(self.text) is None


def blocks(page: Path) -> list[Block]:
    """The blocks of code of ``page``, in order."""
    text = page.read_text(encoding="utf-8")
    found = list(FENCE.finditer(text))
    result = []
    for block, below in itertools.zip_longest(found, found[1:]):
        printed = None
        if (
            below is not None
            and below[1] == "text"
            and not text[block.end() : below.start()].strip()
        ):
            printed = below[2]
        line = text.count("\n", 0, block.start(2)) + 1
        result.append(Block(block[1], block[2], line, printed))
    return [block for block in result if block.language in ("python", "sh")]


def run_python(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    lines = "\n" * (block.line - 1)  # so that a traceback points into the page
    exec(compile(lines + block.text, str(page), "exec"), namespace)


def run_shell(block: Block) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        command = shlex.split(line, comments=True)
        if command[:1] == ["memplan"]:
            assert cli.run(command[1:]) == 0, line


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page registers is gone afterwards."""
    monkeypatch.setattr(strategies, "_rows", dict(strategies._rows))


@pytest.fixture
def logger() -> Iterator[None]:
    """What a page sets on the logger is as before afterwards."""
    level = LOGGER.level
    yield
    LOGGER.setLevel(level)


@pytest.mark.usefixtures("registry", "logger")
@pytest.mark.parametrize(
    "page",
    long_unless(PAGES, lambda page: page.name in ("README.md", "choosing.md")),
    ids=lambda page: page.name,
)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if not block.runs:
            assert block.language != "python" or ast.parse(block.text)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if block.language == "python":
                run_python(block, page, namespace)
            else:
                run_shell(block)
        if block.printed is not None:
            same = doctest.OutputChecker().check_output(block.printed, printed.getvalue(), FLAGS)
            assert same, f"{page.name}:{block.line} prints\n{printed.getvalue()}"


def test_every_page_has_code_or_says_what_it_is_for() -> None:
    with_code = {page.stem for page in PAGES if blocks(page)}
    assert with_code >= {page.stem for page in PAGES} - WITHOUT_CODE


WITHOUT_CODE = {"index", "api", "benchmarks", "glossary", "limits", "scripts", "troubleshooting"}


def test_the_reference_has_every_public_name_and_no_other() -> None:
    reference = (DOCS / "api.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\.\. auto\w+:: ([\w.]+)", reference, re.MULTILINE)
    below = {"MemplanError", "strategies"}  # in memplan.errors, which is there whole; by its names
    names = {f"memplan.{name}" for name in set(memplan.__all__) - below}
    above = {"Status"}  # which is memplan.Status
    names |= {f"memplan.strategies.{name}" for name in set(strategies.__all__) - above}
    assert sorted(documented) == sorted(names | OF_MXNET)


OF_MXNET = {
    "memplan.mxnet.BucketingModule",
    "memplan.mxnet.Module",
    "memplan.mxnet.gluon.TrainStep",
    "memplan.mxnet.gluon.planned",
    "memplan.mxnet.executor.TrainExecutor",
    "memplan.mxnet.plan_file.load_plan",
    "memplan.mxnet.plan_file.plan_text",
}


def test_every_room_is_on_the_map() -> None:
    """And the files that the map names are there."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = text[text.index("## Rooms") : text.index("Beside the package:")]
    named = set(re.findall(r"^\| `([\w/.]+)` \|", rooms, re.MULTILINE))
    package = ROOT / "memplan"
    files = {path.relative_to(package) for path in package.rglob("*.py")}
    folders = {f"{path.parent.as_posix()}/" for path in files if path.parent != Path()}
    assert folders <= named
    assert named - folders <= {path.as_posix() for path in files}
    assert not {path.as_posix() for path in files if path.parent == Path()} - named


LINK = re.compile(r"(?:\]\(|<img src=\")([^)#\s\"]+)")


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("C*.md")], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert not [target for target in local if not (page.parent / target).exists()]


def test_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    """Every cell of its tables of figures stands in rows of docs/benchmarks.md that begin alike."""
    lines = [line for line in _tables(ROOT / "README.md") if re.search(r"\d%|\d MB", line)]
    rows = [(_name(line), _cells(line)) for line in lines]
    known: dict[str, set[str]] = {}
    for line in _tables(DOCS / "benchmarks.md"):
        known.setdefault(_name(line), set()).update(_cells(line))
    assert rows, "the README shows no figures"
    for name, row in rows:
        assert row <= known[name], f"not in docs/benchmarks.md: {sorted(row - known[name])}"


def _tables(page: Path) -> list[str]:
    return [line for line in page.read_text("utf-8").splitlines() if line.startswith("|")]


def _name(row: str) -> str:
    return row.strip("| ").split(" ")[0].lower()


def _cells(row: str) -> set[str]:
    """Figures in a row of a table."""
    return set(re.findall(r"\d+(?:\.\d+)?", row))


@pytest.mark.long
def test_the_pages_build(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs memplan[docs]")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    process = subprocess.run(
        [*command, str(DOCS), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "tutorial.html").exists()


def tables(page: Path) -> Iterator[list[str]]:
    """The rows of each table of ``page``, outside of blocks of code."""
    lines = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for is_table, rows in itertools.groupby(lines.splitlines(), lambda row: row.startswith("|")):
        if is_table:
            yield list(rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_row_of_a_table_has_the_cells_of_its_header(page: Path) -> None:
    """A pipe within a cell is written ``\\|``, in code, too."""
    for header, *rows in tables(page):
        ncells = len(re.split(r"(?<!\\)\|", header))
        assert not [row for row in rows if len(re.split(r"(?<!\\)\|", row)) != ncells]
