"""Solvers that are missing, that fail, and that are interrupted."""

from __future__ import annotations

import ctypes
import importlib
import math
import operator
import os
import random
import signal
import threading
import time
from typing import Any

import mip
import pytest

import memplan
from helpers.networks import residual_net
from helpers.planning import NEVER_SECONDS
from helpers.pressing import Pressing
from helpers.script import printed_by
from memplan.errors import ArgumentError, DependencyError
from memplan.programs import solver as solver_module
from memplan.programs.solver import DEFAULT_SOLVER, SOLVERS, Looks, Program, Solved
from memplan.search.kernels.mirroring import Evaluator
from memplan.step.schedule import Schedule
from memplan.strategies import REALISATIONS, Outcome, Status, create, names
from memplan.strategies.base import Problem
from memplan.util.stop import Stop


def hard_program(solver: str) -> Program:
    """A program that takes minutes."""
    draw = random.Random(1)
    program = Program(solver)
    variables = [program.variable(-5 - 10 * draw.random(), integer=True) for _ in range(300)]
    for _ in range(150):
        program.at_most({x: draw.randint(1, 50) for x in draw.sample(variables, 30)}, 200)
    return program


HIDDEN = """
import sys
sys.modules["highspy"] = sys.modules["highsbox"] = None
sys.path.insert(0, "tests")
import memplan
import memplan.planning.apart
from helpers.networks import residual_net
memplan.planning.apart.IN_A_CHILD = False  # there they are hidden from nobody
net, shapes = residual_net(units=1)
for realisation in ("mirror", "explicit"):
    options = {"budget": 0.9, "time_limit": 600, "realisation": realisation, **shapes}
    for solver in ("HIGHS", "CBC"):
        strategy = memplan.strategies.create("checkmate", realisation=realisation, solver=solver)
        try:
            print(memplan.plan(net, strategy=strategy, **options).status)
        except memplan.errors.DependencyError as error:
            print(error)
"""


@pytest.mark.long
def test_without_highs_what_to_install_is_named_and_cbc_works() -> None:
    printed = printed_by("-c", HIDDEN)
    assert printed.count("HIGHS does not start") == 2
    assert printed.count("pip install 'mip[highs]>=2' 'highspy<1.16'") == 2
    assert printed.count("Status.") == 2


def test_a_solver_that_fails_to_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**options: Any) -> None:
        raise OSError("libCbc.so: cannot open shared object file")

    importlib.import_module("mip.cbc")  # which itself needs the true class
    monkeypatch.setattr(solver_module.mip, "Model", fail)
    with pytest.raises(DependencyError, match=r"solver CBC does not start: libCbc.*pip install"):
        Program("CBC")


@pytest.mark.parametrize("solver", ["", "GUROBI", "highs"])
def test_only_known_solvers_are_asked_for(solver: str) -> None:
    with pytest.raises(ArgumentError, match="must be one of"):
        Program(solver)
    with pytest.raises(ArgumentError, match="must be one of"):
        create("checkmate", realisation="explicit", solver=solver)


def undecided_program(solver: str = "HIGHS") -> Program:
    """HiGHS says of it, in one word, that it is unbounded or infeasible."""
    program = Program(solver)
    x = program.variable(-1.0, upper=math.inf)
    ys = [program.variable(upper=10.0, integer=True) for _ in range(6)]
    program.at_most({ys[0]: 1.0, x: -1.0}, 0.0)
    program.at_most(dict.fromkeys(ys, 6.0), 27.0)
    return program


def test_what_is_unbounded_is_not_proved_infeasible() -> None:
    program = undecided_program()
    for relax in (False, True):
        assert program.solve(Stop.after(NEVER_SECONDS), relax=relax) == Solved(
            None, math.inf, -math.inf, False, False
        )


def test_what_is_unbounded_or_infeasible_is_settled() -> None:
    program = undecided_program()
    program.at_most(dict.fromkeys(range(1, 7), -6.0), -25.0)  # no multiple of 6 is in between
    assert program.solve(Stop.after(NEVER_SECONDS)).infeasible
    assert not program.solve(Stop.after(NEVER_SECONDS), relax=True).infeasible
    # Its objective is there again.
    program.at_most({0: 1.0}, 100.0)
    assert program.solve(Stop.after(NEVER_SECONDS), relax=True).value == pytest.approx(-100.0)


@pytest.mark.parametrize("failure", [mip.OptimizationStatus.ERROR, mip.InterfacingError("none")])
def test_a_failed_solve_proves_nothing(failure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program("HIGHS")
    program.variable(1.0)

    def fail(**_: Any) -> Any:
        if isinstance(failure, Exception):
            raise failure
        return failure

    with monkeypatch.context() as patched:
        patched.setattr(program.model, "optimize", fail)
        assert program.solve(Stop.after(NEVER_SECONDS), relax=True) == Solved(
            None, math.inf, 0.0, False, False
        )
    # python-mip may have left variables continuous: it is not asked again.
    assert program.solve(Stop.after(NEVER_SECONDS)) == Solved(None, math.inf, 0.0, False, False)


def test_an_optimum_without_values_proves_nothing() -> None:
    """Of a row at its limit but for less than a solver's tolerance, as of a small tensor."""
    program = Program("HIGHS")
    dropped, kept, large = (program.variable(cost, integer=True) for cost in (1.0, 0.0, 0.0))
    program.at_most({dropped: -1.0, kept: -1.0}, -1.0)
    program.at_most({large: -1.0}, -1.0)
    program.at_most({kept: 1e-7, large: 500.0}, 500.0)
    nothing = Solved(None, math.inf, 0.0, False, False)
    relaxed = program.solve(Stop.after(NEVER_SECONDS), relax=True)
    assert relaxed == nothing or relaxed.value <= 1.0
    assert program.solve(Stop.after(NEVER_SECONDS)).bound <= 1.0


@pytest.mark.parametrize("solver", SOLVERS)
def test_bounds_hold_for_negative_costs(solver: str) -> None:
    program = hard_program(solver)
    solved = program.solve(Stop.after(0.5))
    assert solved.bound <= solved.value
    assert solved.bound < 0.0
    assert not solved.optimal


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("relax", [False, True])
@pytest.mark.parametrize("integer", [False, True])
def test_a_solver_prints_nothing(
    solver: str, relax: bool, integer: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where the command line prints JSON, say. What C prints lies in a buffer of its own."""
    with Program(solver) as program:
        variables = [program.variable(1.0, integer=integer) for _ in range(2)]
        program.at_most(dict.fromkeys(variables, 1.0), 1.0)
        program.start_from([0.0, 0.0])
        assert program.solve(Stop.after(NEVER_SECONDS), relax=relax).value == 0.0
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == ""


def test_an_interrupt_stops_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    program = hard_program("HIGHS")
    interrupt = Pressing(20)
    interrupt.in_highs(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        program.solve(Stop.after(NEVER_SECONDS))
    assert interrupt.pressed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_highs_works_in_another_thread() -> None:
    """Where no interrupt is ever delivered."""
    found: list[Solved] = []

    def solve() -> None:
        program = Program("HIGHS")
        x = program.variable(-1.0, integer=True)
        program.at_most({x: 2.0}, 1.0)
        found.append(program.solve(Stop.after(NEVER_SECONDS)))

    thread = threading.Thread(target=solve)
    thread.start()
    thread.join()
    assert found[0].optimal
    assert found[0].value == 0


def test_highs_ends_after_so_many_looks() -> None:
    """In its first node, too, where nodes count nothing: with what is proved and known by then."""
    found = []
    for _ in range(2):
        program, looks, stop = hard_program("HIGHS"), Looks(5 * 300), Stop.after(NEVER_SECONDS)
        found.append(program.solve(stop, looks=looks))
        assert looks.left <= 0
        assert not stop.cut_by_clock
    first, second = found
    assert first == second
    assert first.values is not None
    assert math.fsum(map(operator.mul, program.costs, first.values)) == pytest.approx(first.value)
    assert program.floor < first.bound < first.value < 0.0
    assert not first.optimal
    assert not first.infeasible


@pytest.mark.parametrize("relax", [True, False])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_solve_that_the_clock_ends_says_so(
    solver: str, *, relax: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relaxation, too, of which python-mip leaves no status, and what asks without objective."""
    for program in (hard_program(solver), undecided_program(solver)):
        optimize = program.model.optimize

        def without_time(run: Any = optimize, **options: Any) -> Any:
            return run(**{**options, "max_seconds": 0.0})

        patched: Any = program.model
        monkeypatch.setattr(patched, "optimize", without_time)
        late = Stop.after(NEVER_SECONDS if solver == "HIGHS" else 0.0)
        program.solve(late, relax=relax)
        assert late.cut_by_clock


def test_earlier_solves_take_no_time_from_a_relaxation() -> None:
    """The clock of HiGHS counts all solves of a program, unless it is set back."""
    with hard_program("HIGHS") as program:
        highs = program.model.solver
        program.solve(Stop.after(NEVER_SECONDS), looks=Looks(20 * 300))
        long_seconds = highs._lib.Highs_getRunTime(highs._model)
        assert program.solve(Stop.after(NEVER_SECONDS), relax=True).optimal
        assert highs._lib.Highs_getRunTime(highs._model) < long_seconds


def test_another_thread_stops_highs() -> None:
    asked = threading.Event()

    class Asked(Stop):
        @property
        def is_ended(self) -> bool:
            asked.set()
            return super().is_ended

    program, stop = hard_program("HIGHS"), Asked.after(NEVER_SECONDS)
    found: list[Solved] = []
    thread = threading.Thread(target=lambda: found.append(program.solve(stop)))
    thread.start()
    asked.wait()
    stop.end()
    thread.join()
    assert not found[0].optimal


def plan(strategy: Any, realisation: str = "mirror", **options: Any) -> memplan.Plan:
    net, shapes = residual_net(batch=16, size=32, units=6, filters=16)
    options = {"costs": "roofline:v100", "budget": 0.6, "time_limit": NEVER_SECONDS, **options}
    return memplan.plan(net, strategy=strategy, realisation=realisation, **options, **shapes)


@pytest.mark.parametrize(
    ("name", "realisation", "options"),
    [
        ("search", "mirror", {}),
        ("search", "mirror", {"budget": None}),
        ("checkmate", "mirror", {"solver": "HIGHS", "program_share": 1.0}),
        ("checkmate", "mirror", {"solver": "HIGHS", "budget": None}),
        ("checkmate", "explicit", {"solver": "HIGHS"}),
    ],
)
def test_an_interrupted_plan_is_the_best_so_far(
    name: str, realisation: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {field: value for field, value in options.items() if field != "budget"}
    given = {field: value for field, value in options.items() if field == "budget"}
    strategy = create(name, realisation=realisation, **fields)
    annealing = name == "search" or given == {"budget": None}
    interrupt = Pressing(1000 if annealing else 20)
    if annealing:
        interrupt.at_calls(monkeypatch, Evaluator, "order")
    else:
        interrupt.in_highs(monkeypatch)
    made = plan(strategy, realisation, **given)
    assert interrupt.pressed
    assert made.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert made.budget_nbytes is None or made.total_nbytes <= made.budget_nbytes
    assert made.total_nbytes < 0.6 * made.unplanned.total_nbytes


class Stubborn:
    """Has nothing to answer with when it is interrupted."""

    def solve(self, problem: Problem) -> Outcome:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        return Outcome(Status.FEASIBLE, Schedule.unplanned(problem.graph))


def test_an_interrupt_before_any_plan_is_raised_and_leaves_all_as_it_was() -> None:
    net, shapes = residual_net(batch=16, size=32, units=6, filters=16)
    before = net.tojson()
    environment = dict(os.environ)
    with pytest.raises(KeyboardInterrupt):
        memplan.plan(net, strategy=Stubborn(), budget=0.6, **shapes)
    assert net.tojson() == before
    assert dict(os.environ) == environment
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.long
def test_mxnet_can_be_imported_after_cbc_has_solved() -> None:
    code = (
        "from memplan.programs.solver import Program\n"
        "from memplan.util.stop import Stop\n"
        "program = Program('CBC')\n"
        "program.at_most({program.variable(-1.0): 1.0}, 1.0)\n"
        "assert program.solve(Stop.after(3600.0)).values is not None\n"
        "import mxnet\n"
    )
    printed_by("-c", code)


THREADS = """
import os, mip
from memplan.programs.solver import Program
from memplan.util.stop import Stop


def solve():
    with Program() as program:
        program.at_most({program.variable(-1.0, integer=True): 2.0}, 3.0)
        return program.solve(Stop.after(3600.0)).value


before = BEFORE
if before:
    model = mip.Model(sense=mip.MINIMIZE, solver_name="HIGHS")
    model.verbose = 0
    model.threads = before
    model.add_var()
    model.optimize()
print(solve())
if not before:
    child = os.fork()
    if not child:
        os._exit(0 if solve() == -1.0 else 1)
    print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize(("before", "printed"), [(0, "-1.0 0"), (2, "-1.0"), (3, "-1.0")])
def test_highs_works_after_a_fork_and_where_others_asked_for_threads(
    before: int, printed: str
) -> None:
    """Models of one process must ask for one number of threads; a fork has none but its own."""
    code = THREADS.replace("BEFORE", str(before))
    assert printed_by("-c", code).split() == printed.split()


SOLVER_FIELDS = [
    (name, realisation)
    for realisation in REALISATIONS
    for name in names(realisation)
    if hasattr(create(name, realisation=realisation), "solver")
]


@pytest.mark.parametrize(("name", "realisation"), SOLVER_FIELDS)
def test_every_strategy_has_the_same_solver_and_the_same_check(name: str, realisation: str) -> None:
    assert create(name, realisation=realisation).solver == DEFAULT_SOLVER == "HIGHS"
    assert create(name, realisation=realisation, solver="CBC").solver == "CBC"
    with pytest.raises(ArgumentError, match=r"must be one of \['HIGHS', 'CBC'\]"):
        create(name, realisation=realisation, solver="GUROBI")


def test_strategies_that_ask_a_solver_are_known() -> None:
    assert {name for name, _ in SOLVER_FIELDS} == {"auto", "checkmate", "checkmate_lp"}


@pytest.mark.parametrize("restarts", [True, False])
def test_highs_is_told_whether_it_may_restart(*, restarts: bool) -> None:
    with Program("HIGHS", restarts=restarts) as program:
        assert program.model.solver._get_bool_option_value("mip_allow_restart") == restarts
