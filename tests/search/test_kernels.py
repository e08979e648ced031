"""Compiled code: never stale, and right at the edges of what it counts."""

from __future__ import annotations

import ast
import functools
import importlib
import logging
import math
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import pytest
from numba.core.compiler import CompileResult

from helpers.graphs import unit_chain
from helpers.replays import replayed
from helpers.script import printed_by
from memplan.errors import DependencyError, GraphError
from memplan.memory import offsets
from memplan.memory.blocks import allocate
from memplan.search import kernels
from memplan.search.compile import compile_all
from memplan.search.eviction import Evictions
from memplan.search.flag_annealing import anneal
from memplan.search.kernels import mirroring
from memplan.search.kernels.mirroring import Evaluator
from memplan.search.sequence_search import search
from memplan.search.sequences import Rules
from memplan.step.graph import MAX_NBYTES, Handover, Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util import dispatcher
from memplan.util.compiled import compiled
from memplan.util.dispatcher import SUFFIX, dispatcher_of
from memplan.util.stop import Stop


def run_in(folder: Path, **variables: str) -> str:
    code = "import b; print(b.twice(1), 'from', 'disk' if b.twice.stats.cache_hits else 'source')"
    command = [sys.executable, "-c", code]
    path = f"{folder}:{Path(kernels.__file__).parents[3]}"
    environment = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **variables}
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.long
def test_an_edit_in_another_file_is_seen(tmp_path: Path) -> None:
    head = "from memplan.util.compiled import compiled\n"
    source = head + "@compiled\ndef add(x):\n    return x + {}\n"
    (tmp_path / "a.py").write_text(source.format(1))
    call = "from a import add\n@compiled\ndef twice(x):\n    return add(add(x))\n"
    (tmp_path / "b.py").write_text(head + call)
    assert run_in(tmp_path) == "3 from source"
    assert run_in(tmp_path) == "3 from disk"
    (tmp_path / "a.py").write_text(source.format(10))
    assert run_in(tmp_path) == "21 from source"


@pytest.mark.long
def test_a_cache_that_cannot_be_read_is_made_anew(tmp_path: Path) -> None:
    head = "from memplan.util.compiled import compiled\n"
    (tmp_path / "b.py").write_text(head + "@compiled\ndef twice(x):\n    return x + 2\n")
    assert run_in(tmp_path) == "3 from source"
    [entry] = tmp_path.rglob(f"*{SUFFIX}")
    entry.write_bytes(entry.read_bytes()[:1000])
    assert run_in(tmp_path) == "3 from source"
    assert run_in(tmp_path) == "3 from disk"


@pytest.mark.long
def test_processors_that_share_a_folder_have_their_own_code(tmp_path: Path) -> None:
    head = "from memplan.util.compiled import compiled\n"
    (tmp_path / "b.py").write_text(head + "@compiled\ndef twice(x):\n    return x + 2\n")
    assert run_in(tmp_path) == "3 from source"
    assert run_in(tmp_path, NUMBA_CPU_NAME="x86-64") == "3 from source"
    assert run_in(tmp_path) == run_in(tmp_path, NUMBA_CPU_NAME="x86-64") == "3 from disk"
    assert len(list(tmp_path.rglob(f"*{SUFFIX}"))) == 2


@pytest.mark.long
def test_what_lies_beside_the_sources_is_read_where_others_are_written(tmp_path: Path) -> None:
    folder, other = tmp_path / "sources", tmp_path / "other"
    folder.mkdir()
    head = "from memplan.util.compiled import compiled\n"
    (folder / "b.py").write_text(head + "@compiled\ndef twice(x):\n    return x + 2\n")
    assert run_in(folder) == "3 from source"
    assert run_in(folder, NUMBA_CACHE_DIR=str(other)) == "3 from disk"
    shutil.rmtree(folder / "__pycache__")
    (folder / "__pycache__").touch()  # where nothing can be written, not even by root
    assert run_in(folder, NUMBA_CACHE_DIR=str(folder / "b.py"), HOME="~") == "3 from source"
    assert run_in(folder, NUMBA_CACHE_DIR=str(other)) == "3 from source"
    assert run_in(folder, NUMBA_CACHE_DIR=str(other)) == "3 from disk"


def test_nothing_is_searched_where_numba_is_told_to_compile_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(DependencyError, match=r"NUMBA_DISABLE_JIT is set.*; unset it"):
        compiled(lambda number: number)(1)


class Compiled:
    """What numba gives to be kept of a function."""

    def __init__(self) -> None:
        self.target_context, self.magic_tuple = self, lambda: "a processor"
        self.codegen = lambda: self

    def _reduce(self) -> str:
        return "code"


def test_drafts_of_who_was_killed_are_swept(tmp_path: Path) -> None:
    cache = dispatcher._Cache(dispatcher_of)
    cache.folders = (tmp_path,)
    drafts = [tmp_path / f"{cache.fresh}-1{SUFFIX}.{name}" for name in ("left", "written")]
    of_other_sources = tmp_path / f"{cache.function}-0-1{SUFFIX}.left"
    for draft in (*drafts, of_other_sources):
        draft.touch()
    os.utime(drafts[0], (0.0, 0.0))
    cache.save_overload((), Compiled())
    entry = tmp_path / cache._name((), Compiled())
    assert set(tmp_path.iterdir()) == {drafts[1], entry}


def test_where_nothing_compiled_can_be_kept_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher._announce_that_none_is_kept.cache_clear()
    (tmp_path / "file").touch()
    cache = dispatcher._Cache(dispatcher_of)
    cache.folders = (tmp_path / "file" / "a", tmp_path / "file" / "b")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            cache.save_overload((), Compiled())
    [record] = caplog.records
    assert "set NUMBA_CACHE_DIR to a folder where one can" in record.getMessage()


@pytest.mark.parametrize(("package", "least"), [(kernels, 40), (offsets, 15)])
def test_compiled_code_uses_its_own_folder_only(package: ModuleType, least: int) -> None:
    folder = Path(package.__file__ or "").parent
    ncompiled = 0
    for found in pkgutil.iter_modules([str(folder)]):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        for function in vars(module).values():
            if hasattr(function, "py_func") and function.py_func.__module__ == module.__name__:
                ncompiled += 1
                code = function.py_func.__code__
                for name in code.co_names:
                    value = function.py_func.__globals__.get(name)
                    if hasattr(value, "py_func"):
                        assert Path(value.py_func.__code__.co_filename).parent == folder
    assert ncompiled > least


def is_compiled(node: ast.AST) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    names = {decorator.id for decorator in decorators if isinstance(decorator, ast.Name)}
    return bool(names & {"compiled", "compiled_with_arrays"})


class Calls(ast.NodeVisitor):
    """Names that code calls which is not compiled, and the compiled functions."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        self.compiled: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if is_compiled(node):
            self.compiled.add(node.name)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name):
            self.called.add(node.func.id)
        self.generic_visit(node)


def test_python_calls_no_private_compiled_function() -> None:
    """There is no wrapper with which it could: the process would end."""
    nprivate = 0
    for package in (kernels, offsets):
        for path in Path(package.__file__ or "").parent.glob("*.py"):
            calls = Calls()
            calls.visit(ast.parse(path.read_text()))
            private = {name for name in calls.compiled if name.startswith("_")}
            nprivate += len(private)
            assert not private & calls.called, path
    assert nprivate > 30


def all_compiled() -> Iterator[Any]:
    for package in (kernels, offsets):
        for found in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{found.name}")
            for function in vars(module).values():
                if hasattr(function, "py_func") and function.py_func.__module__ == module.__name__:
                    yield function


def test_every_function_is_compiled_ahead_of_time_and_once_for_all_constants() -> None:
    compile_all()
    several, missing = {}, set()
    for function in all_compiled():
        name = function.py_func.__name__
        if len(getattr(function, "signatures", ())) > 1:
            several[name] = function.signatures
        cache = getattr(function, "dispatcher", function)._cache
        if not any(path for folder in cache.folders for path in folder.glob(f"{cache.fresh}-*")):
            missing.add(name)
    assert not several
    assert not missing


def test_an_interrupt_waits_until_compiled_code_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM calls Python back as it loads: an interrupt there would be printed and forgotten."""
    evaluate = Evaluator(unit_chain(3))
    evaluate(evaluate.flags(()))
    replay = getattr(mirroring.replay, "dispatcher", mirroring.replay)
    rebuild, loaded = CompileResult._rebuild, []

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        loaded.append(rebuild(*arguments))
        return loaded[-1]

    monkeypatch.setattr(CompileResult, "_rebuild", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replay._cache.load_overload(replay.signatures[0], replay.targetctx)
    assert len(loaded) == 1


@pytest.mark.long
def test_it_is_said_once_that_something_is_compiled(tmp_path: Path) -> None:
    head = "from memplan.util.compiled import compiled\n"
    (tmp_path / "b.py").write_text(head + "@compiled\ndef twice(x):\n    return x + x\n")
    run = functools.partial(
        subprocess.run,
        [sys.executable, "-c", "import b; b.twice(1); b.twice(1.0)"],
        env={"PYTHONPATH": f"{tmp_path}:{Path(kernels.__file__).parents[3]}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run().stderr.count("memplan compiles its search") == 1
    assert run().stderr == ""


def heads_only() -> TrainingGraph:
    """Ops that write nothing."""
    return TrainingGraph((Op("a", "op", (), ()), Op("b", "op", (), ())), (), (), 1)


@pytest.mark.parametrize("graph", [TrainingGraph((), (), (), 0), heads_only()])
@pytest.mark.parametrize("budget", [None, 0])
def test_a_graph_without_tensors(graph: TrainingGraph, budget: int | None) -> None:
    unplanned = Schedule.unplanned(graph)
    for match_ranges in ((), (1, 16)):
        rules = Rules(False, True, match_ranges)
        stop = Stop.after(60.0)
        assert (
            search(graph, budget, rules=rules, starts=[], seed=0, stop=stop, rounds=1) == unplanned
        )
        assert not stop.cut_by_clock
    assert replayed(graph, unplanned.ops, 1) == (0, 0)
    evaluate = Evaluator(graph)
    assert evaluate(evaluate.flags(())).peak_nbytes == 0
    fit = Evictions(graph, 0).fit((), Stop.after(60.0))
    assert fit is not None
    assert fit.schedule == unplanned
    anneal(graph, frozenset(), budget, stop=Stop.after(60.0), moves=5)


def chain_of(nbytes: int) -> TrainingGraph:
    """A chain whose tensors have this many bytes in all."""
    graph = unit_chain(6)
    each = nbytes // len(graph.tensors) // 4 * 4
    tensors = tuple(Tensor(t.name, each, each // 4) for t in graph.tensors)
    return TrainingGraph(graph.ops, tensors, graph.heads, graph.nforward)


@pytest.mark.parametrize("match_range", [1, 16, 2**40, 2**62])
def test_nothing_wraps_where_a_graph_may_be(match_range: int) -> None:
    graph = chain_of(MAX_NBYTES)
    schedule = Schedule.sequence(graph, [*range(6), 3, 6, 7, 3, *range(8, 13)])
    cost = replayed(graph, schedule.ops, match_range)
    assert cost.peak_nbytes == simulate(schedule).peak_nbytes
    assert cost.allocated_nbytes == allocate(schedule, match_range=match_range).nbytes
    fit = Evictions(graph, cost.peak_nbytes * 2 // 3).fit((), Stop(math.inf))
    assert fit is not None


def test_bytes_that_would_wrap_summed_over_steps_are_refused() -> None:
    rules = Rules(False, True, ())
    graph = chain_of(MAX_NBYTES // 4)
    budget = simulate(Schedule.unplanned(graph)).peak_nbytes * 2 // 3
    schedule = search(graph, budget, rules=rules, starts=[], seed=0, stop=Stop(math.inf), rounds=1)
    assert schedule is not None
    assert simulate(schedule).peak_nbytes <= budget
    with pytest.raises(GraphError, match="bytes in all"):
        search(
            chain_of(MAX_NBYTES), 1, rules=rules, starts=[], seed=0, stop=Stop(math.inf), rounds=1
        )


def test_more_places_that_read_than_a_word_has_bits() -> None:
    """Inputs 0 and 64 may both be taken over, each once."""
    ninputs = 70
    ops = [Op(f"i{i}", "op", (), (i,), 1.0) for i in range(ninputs)]
    inputs = tuple(range(ninputs))
    handovers = tuple(Handover(i, i, False) for i in range(ninputs))
    ops.append(
        Op("all", "op", inputs, tuple(range(ninputs, 2 * ninputs)), 1.0, handovers=handovers)
    )
    ops.append(Op("end", "op", tuple(range(ninputs, 2 * ninputs)), (2 * ninputs,), 1.0))
    tensors = tuple(Tensor(f"t{i}", 4, 1) for i in range(2 * ninputs + 1))
    graph = TrainingGraph(tuple(ops), tensors, (2 * ninputs,), len(ops))
    schedule = Schedule.unplanned(graph)
    assert simulate(schedule).peak_nbytes == 4 * (ninputs + 1)
    assert replayed(graph, schedule.ops, 1).peak_nbytes == 4 * (ninputs + 1)


@pytest.mark.long
def test_numba_is_loaded_when_something_compiled_is_called() -> None:
    code = """
import sys
import memplan.mxnet.module, memplan.planning.planner, memplan.search.compile
before = "numba" in sys.modules
memplan.search.compile.compile_all()
print(before, "numba" in sys.modules)
"""
    assert printed_by("-c", code) == "False True\n"
