"""How the solvers' models begin and end: they are freed on purpose, a collection is harmless."""

from __future__ import annotations

import gc
import importlib
import signal
from types import ModuleType
from typing import Any

import pytest

from helpers.graphs import unit_chain
from helpers.planning import NEVER_SECONDS
from helpers.script import printed_by
from memplan.programs.solver import SOLVERS, Program, _look_up_destructor, new_model
from memplan.strategies import create
from memplan.strategies.base import Problem

UNIT = 4


def class_of(solver: str) -> type[Any]:
    """python-mip's class, whose ``__del__`` frees a model."""
    with Program(solver) as program:
        return type(program.model.solver)


# Children collect a model that nobody refers to at one moment after the other of the first access
# to a function. Some of these moments are while cffi holds its lock.
COLLECTED = """
import gc, os, signal, sys
from memplan.programs.solver import Program
solver = sys.argv[1]
gc.disable()
models = [Program(solver), Program(solver)]
import mip
module = mip.highs if solver == "HIGHS" else mip.cbc
library = mip.highs.highslib if solver == "HIGHS" else mip.cbc.cbclib
first_accessed = "Highs_addCol" if solver == "HIGHS" else "Cbc_getColNz"
assert first_accessed not in vars(library)
del models[0]
while_locked = 0
for allocations in range(40):
    child = os.fork()
    if not child:
        signal.alarm(60)
        locked = []
        gc.callbacks.append(lambda phase, info: locked.append(module.ffi._lock.locked()))
        gc.set_threshold(gc.get_count()[0] + allocations)
        gc.enable()
        getattr(library, first_accessed)
        os._exit(any(locked))
    status = os.waitpid(child, 0)[1]
    assert not os.WIFSIGNALED(status), "hangs"
    while_locked += status != 0
print(while_locked)
"""


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_model_may_be_collected_while_cffi_looks_up_a_function(solver: str) -> None:
    assert int(printed_by("-c", COLLECTED, solver)) > 0


def test_an_interrupt_waits_until_the_library_of_highs_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import_module = importlib.import_module
    loaded: list[str] = []

    def interrupted(name: str) -> ModuleType:
        signal.raise_signal(signal.SIGINT)
        loaded.append(name)
        return import_module(name)

    _look_up_destructor.cache_clear()
    monkeypatch.setattr(importlib, "import_module", interrupted)
    with pytest.raises(KeyboardInterrupt):
        new_model("HIGHS")
    assert loaded == ["mip.highs"]


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_interrupt_while_a_model_is_freed_is_not_lost(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python prints what a ``__del__`` raises, and goes on."""
    gc.collect()  # the models of other tests
    solver_class = class_of(solver)
    delete = solver_class.__del__
    freed: list[int] = []

    def interrupted(self: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        delete(self)
        freed.append(id(self))

    program = Program(solver)
    monkeypatch.setattr(solver_class, "__del__", interrupted)
    with pytest.raises(KeyboardInterrupt), program:
        program.variable(1.0)
    assert len(freed) == 1
    program.close()  # again, which does nothing


@pytest.mark.parametrize(
    ("name", "realisation"),
    [
        ("auto", "explicit"),
        ("checkmate", "explicit"),
        ("checkmate_lp", "explicit"),
        ("checkmate", "mirror"),
    ],
)
def test_strategies_free_their_models(
    name: str, realisation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any garbage collection."""
    monkeypatch.setattr("memplan.strategies.spaces.sequences.MOST_OPS", 0)  # else it needs none
    solver_class = class_of("HIGHS")
    make, delete = solver_class.__init__, solver_class.__del__
    alive = []
    made = []

    def counted(self: Any, *given: Any) -> None:
        make(self, *given)
        made.append(id(self))
        alive.append(id(self))

    def uncounted(self: Any) -> None:
        delete(self)
        alive.remove(id(self))

    strategy = create(name, realisation=realisation, time_limit=NEVER_SECONDS)
    gc.collect()
    monkeypatch.setattr(solver_class, "__init__", counted)
    monkeypatch.setattr(solver_class, "__del__", uncounted)
    gc.disable()
    try:
        assert strategy.solve(Problem(unit_chain(8), 5 * UNIT)).schedule is not None
    finally:
        gc.enable()
    assert made
    assert not alive
