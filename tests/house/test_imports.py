"""Who may import whom, and what works without MXNet."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx
import pytest

from helpers.paths import ROOT
from helpers.script import printed_by


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in sorted((ROOT / "memplan").rglob("*.py"))}


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _imported(node: ast.Import | ast.ImportFrom) -> set[str]:
    """The modules that this line imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    assert node.level == 0, f"line {node.lineno}: a relative import"
    names = (f"{node.module}.{alias.name}" for alias in node.names)
    return {name if name in MODULES else str(node.module) for name in names}


def _is_typing_only(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


@dataclass(frozen=True)
class Imports:
    """What a module imports as it is loaded, in its functions later, and for its types only."""

    at_once: set[str]
    lazily: set[str]
    for_types: set[str]

    def all(self) -> set[str]:
        return self.at_once | self.lazily | self.for_types


@cache
def _imports(module: str) -> Imports:
    found = Imports(set(), set(), set())

    def visit(node: ast.AST, names: set[str]) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= _imported(node)
        elif _is_typing_only(node):
            names = found.for_types
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and names is found.at_once:
            names = found.lazily
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # no expression has a statement in it
                visit(child, names)

    visit(ast.parse(MODULES[module].read_text(encoding="utf-8")), found.at_once)
    return found


def _importers(package: str) -> set[str]:
    return {
        module
        for module in MODULES
        if any(_is_in(imported, package) for imported in _imports(module).all())
    }


def test_the_modules_are_found() -> None:
    assert {"memplan", "memplan.step.graph", "memplan.mxnet.trace.build"} <= MODULES.keys()
    assert "memplan.errors" in _imports("memplan.step.graph").all()
    assert "mxnet" in _imports("memplan.mxnet.trace.build").all()


def test_only_the_mxnet_room_imports_mxnet() -> None:
    assert all(_is_in(module, "memplan.mxnet") for module in _importers("mxnet"))


@pytest.mark.parametrize("package", ["highspy", "matplotlib", "mip"])
def test_one_file_at_most_imports(package: str) -> None:
    assert len(_importers(package)) <= 1


# The file of a strategy is on its own, but for these, which are none.
SHARED = {
    f"memplan.strategies.{module}"
    for module in (
        "base",
        "least",
        "quick",
        "auto_searches",
        "auto_starts",
        "shares",
        "proof_apart",
        "proof_beside",
    )
}.union(m for m in MODULES if _is_in(m, "memplan.strategies.spaces"))


@pytest.mark.parametrize(
    "strategy", [m for m in MODULES if m.startswith("memplan.strategies.") and m not in SHARED]
)
def test_a_strategy_is_on_its_own(strategy: str) -> None:
    forbidden = [
        imported
        for imported in _imports(strategy).all()
        if (_is_in(imported, "memplan.strategies") and imported not in SHARED)
        or _is_in(imported, "memplan.step.validate")
    ]
    assert not forbidden


# The house, from the ground up: a module imports only what stands in its room or before it.
LAYERS = (
    "memplan.errors",
    "memplan.util",
    "memplan.step",
    "memplan.memory",
    "memplan.search",
    "memplan.programs",
    "memplan.strategies",
    "memplan.mxnet.trace",
    "memplan.mxnet.realise.estimate",
    "memplan.mxnet.realise",
    "memplan.planning",
    "memplan.views",
    "memplan.mxnet.train.arrays",
    "memplan.mxnet.train.blocks",
    "memplan.mxnet.train",
    "memplan.mxnet.train.modules",
    "memplan.mxnet",
    "memplan",
    "memplan.cli",
    "memplan.__main__",
)

# Imports upwards, all of them inside functions: who shows a plan is loaded when one is shown, and
# costs are measured when they are asked for.
UPWARDS = {
    ("memplan.planning.plan", "memplan.views"),
    ("memplan.planning.comparison", "memplan.views"),
    ("memplan.planning.realisation", "memplan.mxnet.profile"),
    ("memplan", "memplan.mxnet.profile"),
}


def _layer(module: str) -> int:
    """The place of the innermost room that ``module`` is in."""
    rooms = [(len(room), place) for place, room in enumerate(LAYERS) if _is_in(module, room)]
    return max(rooms)[1]


def _higher(module: str, names: set[str]) -> set[str]:
    """Which of ``names`` are modules of memplan that stand above ``module``."""
    return {name for name in names if _is_in(name, "memplan") and _layer(name) > _layer(module)}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_what_stands_before_it(module: str) -> None:
    assert not _higher(module, _imports(module).at_once)
    lazily = _higher(module, _imports(module).lazily)
    allowed = {room for importer, room in UPWARDS if importer == module}
    assert all(any(_is_in(m, room) for room in allowed) for m in lazily), lazily


def test_every_import_upwards_that_is_allowed_is_made() -> None:
    for module, room in UPWARDS:
        assert any(_is_in(name, room) for name in _imports(module).lazily), (module, room)


def test_planning_reaches_mxnet_by_one_door() -> None:
    importers = {
        module
        for module in MODULES
        if _is_in(module, "memplan.planning")
        and any(
            _is_in(imported, "memplan.mxnet")
            for imported in _imports(module).at_once | _imports(module).lazily
        )
    }
    assert importers == {"memplan.planning.realisation"}


def test_nothing_else_stands_at_the_root() -> None:
    files = {path.stem for path in (ROOT / "memplan").glob("*.py")}
    assert files == {"__init__", "__main__", "errors"}


def test_imports_go_one_way() -> None:
    graph = networkx.DiGraph(
        (module, imported)
        for module in MODULES
        for imported in _imports(module).at_once & MODULES.keys()
    )
    cycle = [] if networkx.is_directed_acyclic_graph(graph) else networkx.find_cycle(graph)
    assert not cycle


def test_no_folder_of_tests_hides_mxnet() -> None:
    """Pytest puts tests/ on the path, where tests/mxnet would be imported in MXNet's place."""
    assert not (ROOT / "tests" / "mxnet").exists()


def test_importing_memplan_does_not_load_mxnet() -> None:
    """Which keeps it quick, and possible where MXNet is missing."""
    printed = printed_by("-c", "import sys, memplan; print('mxnet' in sys.modules)")
    assert printed.split() == ["False"]


def test_the_code_of_planning_loads_no_solver() -> None:
    """A process that trains by what its child has planned never makes a model."""
    printed = printed_by("-c", "import sys, memplan.planning.planner; print('mip' in sys.modules)")
    assert printed.split() == ["False"]


PLAN = """
import memplan
memplan.search_plan, memplan.compare, memplan.profile
assert "store_all" in memplan.strategies.names()
try:
    memplan.plan(object(), strategy="store_all", data=(2, 3))
except memplan.errors.DependencyError as error:
    print(error)
"""


def test_without_mxnet_planning_names_the_extra() -> None:
    message = printed_by("-c", "import sys; sys.modules['mxnet'] = None\n" + PLAN)
    assert "memplan[cpu]" in message


@pytest.mark.parametrize(
    ("source", "culprit"),
    [
        ("raise OSError('libcuda.so.1: cannot open shared object file')", "libcuda.so.1"),
        ("__version__ = '1.8.0'", "1.8.0"),
    ],
    ids=["fails to load", "another version"],
)
def test_with_an_unusable_mxnet_planning_says_why(
    tmp_path: Path, source: str, culprit: str
) -> None:
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").write_text(source, encoding="utf-8")
    assert culprit in printed_by("-c", PLAN, PYTHONPATH=str(tmp_path))
