"""Who may import whom, and what works without MXNet."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import networkx
import pytest

from helpers.paths import ROOT


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in sorted((ROOT / "memplan").rglob("*.py"))}


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _imports(module: str) -> set[str]:
    """The modules that the source of ``module`` imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else str(node.module))
    return found


IMPORTS = {module: _imports(module) for module in MODULES}


def _importers(package: str) -> set[str]:
    return {
        module
        for module, imports in IMPORTS.items()
        if any(_is_in(imported, package) for imported in imports)
    }


def test_the_modules_are_found() -> None:
    assert {"memplan", "memplan.step.graph", "memplan.mxnet.trace.build"} <= MODULES.keys()
    assert "memplan.errors" in IMPORTS["memplan.step.graph"]
    assert "mxnet" in IMPORTS["memplan.mxnet.trace.build"]


def test_only_the_mxnet_room_imports_mxnet() -> None:
    assert all(_is_in(module, "memplan.mxnet") for module in _importers("mxnet"))


@pytest.mark.parametrize("package", ["highspy", "matplotlib", "mip"])
def test_one_file_at_most_imports(package: str) -> None:
    assert len(_importers(package)) <= 1


@pytest.mark.parametrize(
    "strategy", [m for m in MODULES if m.startswith("memplan.strategies.") and m[-5:] != ".base"]
)
def test_a_strategy_is_on_its_own(strategy: str) -> None:
    forbidden = [
        imported
        for imported in IMPORTS[strategy]
        if (_is_in(imported, "memplan.strategies") and imported != "memplan.strategies.base")
        or _is_in(imported, "memplan.step.validate")
        or _is_in(imported, "memplan.mxnet")
        or imported == "memplan"
    ]
    assert not forbidden


def test_imports_go_one_way() -> None:
    graph = networkx.DiGraph(
        (module, imported)
        for module, imports in IMPORTS.items()
        for imported in imports & MODULES.keys()
    )
    cycle = [] if networkx.is_directed_acyclic_graph(graph) else networkx.find_cycle(graph)
    assert not cycle


def test_no_folder_of_tests_hides_mxnet() -> None:
    """Pytest puts tests/ on the path, where tests/mxnet would be imported in MXNet's place."""
    assert not (ROOT / "tests" / "mxnet").exists()


def _run(code: str, **environment: str) -> str:
    """What ``code`` prints, run by a Python of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_memplan_does_not_load_mxnet() -> None:
    """Which keeps it quick, and possible where MXNet is missing."""
    assert _run("import sys, memplan; print('mxnet' in sys.modules)").split() == ["False"]


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
    message = _run("import sys; sys.modules['mxnet'] = None\n" + PLAN)
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
    assert culprit in _run(PLAN, PYTHONPATH=str(tmp_path))
