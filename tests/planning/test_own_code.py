"""An edited strategy is another one: its code, that of its helpers, and what these name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from helpers.script import printed_by
from memplan.planning.own_code import own_code
from memplan.strategies import create

TYPED = """
from dataclasses import dataclass
from functools import lru_cache, partial, wraps

STEP = 2
KEPT = [1, {"two": 3}]

class Table:
    def __init__(self, entries):
        self.entries = entries

TABLE = Table({"conv": 5})

def count():
    return len({"a", "b", "c", "d"} & {"e", 6})

def taking(most):
    def limited(self):
        return 7 + most
    return limited

def passing(function):
    @wraps(function)
    def passed(*arguments):
        return function(*arguments)
    return passed

@lru_cache
def slow():
    return 8

RULES = {"first": partial(lambda number: number + 9, 10)}

class Base:
    weight = 11
    def step(self, most=12):
        return [value + 13 for value in range(most)]

@dataclass(frozen=True)
class Mine(Base):
    longest: int = 3
    limited = taking(14)
    @passing
    def solve(self, problem):
        "A rule."
        return STEP, KEPT, TABLE, count(), slow(), RULES, self.limited, self.step, 15
    @property
    def size(self):
        return 16
    @staticmethod
    def of():
        return 17
"""


def typed(text: str) -> Any:
    """The strategy that was typed as ``text``, into a notebook say: it has no source."""
    module: Any = ModuleType("typed")
    with patch.dict(sys.modules, typed=module):
        exec(compile(text, "typed", "exec"), vars(module))
    return module.Mine()


def test_what_was_typed_again_is_the_same() -> None:
    assert own_code(typed(TYPED)) == own_code(typed(TYPED))


NUMBERS = ["STEP = 2", "1, {", "3}", "5}", "6}", "7 +", *map(str, range(8, 18))]


@pytest.mark.parametrize("number", NUMBERS)
def test_every_number_that_a_rule_reads_counts(number: str) -> None:
    assert TYPED.count(number) == 1
    edited = TYPED.replace(number, f"1{number}" if number[0].isdigit() else "STEP = 12")
    assert own_code(typed(edited)) != own_code(typed(TYPED))


def test_another_process_says_the_same(tmp_path: Path) -> None:
    """Whatever the order of its sets."""
    (tmp_path / "rules.py").write_text(TYPED)
    code = (
        "import rules; from memplan.planning.own_code import own_code as o; print(o(rules.Mine()))"
    )
    printed = {
        printed_by("-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}", **seed)
        for seed in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"}, {"PYTHONHASHSEED": "3"})
    }
    assert len(printed) == 1


RULE = """
from dataclasses import dataclass
import rule_helpers

CALLS = []

@dataclass(frozen=True)
class Mine:
    def solve(self, problem):
        CALLS.append(problem)
        return rule_helpers.best(problem)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    forget()


def forget() -> None:
    for name in ("rule", "rule_helpers"):
        sys.modules.pop(name, None)


def imported(folder: Path, rule: str, helpers: str) -> Any:
    """The strategy in the module ``rule``, imported by a new process as it were."""
    forget()
    (folder / "rule.py").write_text(rule)
    (folder / "rule_helpers.py").write_text(helpers)
    importlib.invalidate_caches()
    return importlib.import_module("rule").Mine()


def test_a_file_that_was_edited(folder: Path) -> None:
    helpers = "TABLE = {1: 2}\ndef best(problem):\n    return TABLE\n"
    first = own_code(imported(folder, RULE, helpers))
    strategy = imported(folder, RULE, helpers)
    assert own_code(strategy) == first
    # A count of calls is nothing that an answer depends on.
    importlib.import_module("rule").CALLS.append(1)
    assert own_code(strategy) == first
    edited = {own_code(imported(folder, RULE, helpers.replace("2", number))) for number in "34"}
    assert len({first, *edited}) == 3


def test_a_file_that_was_edited_since_it_was_imported(folder: Path) -> None:
    """What runs is the code before, so the plan is none of the code that the file has now."""
    old, new = (f"def best(problem):\n    return {number}\n" for number in (1, 22))
    strategy = imported(folder, RULE, old)
    (folder / "rule_helpers.py").write_text(new)
    edited = own_code(strategy)
    assert own_code(imported(folder, RULE, new)) != edited


NAMES = [f"rule_{number}" for number in range(12)]
FUNCTIONS = "\n".join(f"def {name}(): return 1" for name in NAMES)
OF_A_SET = f"""
import rule_helpers
from dataclasses import dataclass
{FUNCTIONS}
RULES = {{{", ".join([*NAMES, *(f"rule_helpers.{name}" for name in NAMES)])}}}

@dataclass(frozen=True)
class Mine:
    def solve(self, problem):
        return max(rule() for rule in RULES)
"""


def test_where_the_functions_of_a_set_lie_in_memory_counts_for_nothing(folder: Path) -> None:
    strategies = [imported(folder, OF_A_SET, FUNCTIONS) for _ in range(6)]
    sets = [strategy.solve.__globals__["RULES"] for strategy in strategies]
    assert len({tuple(rule.__name__ for rule in rules) for rules in sets}) > 1
    assert len({own_code(strategy) for strategy in strategies}) == 1


def test_memplans_own_have_its_version_and_what_is_compiled_has_nothing() -> None:
    assert own_code(create("auto")) == ""
    compiled = TYPED.partition("@dataclass")[0] + "class Mine:\n    solve = len\n"
    assert own_code(typed(compiled)) is None
