"""Linear and integer programs, solved by what python-mip comes with: the only user of it.

:class:`Program` counts variables and rows by number. Rows are sums, given as a dict of variable
number to factor: python-mip's own arithmetic loses a term where a variable occurs twice.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan.errors import ArgumentError, DependencyError
from memplan.programs import python_mip as mip
from memplan.programs.highs import Rows, asking_whether_late
from memplan.programs.native import load_openblas_of_mxnet, silence
from memplan.util.interrupts import deferring
from memplan.util.stop import Stop

SOLVERS = ("HIGHS", "CBC")

# HiGHS can be interrupted. CBC cannot, and was once seen to abort the process, in the middle of a
# factorization.
DEFAULT_SOLVER = "HIGHS"

# Solvers work with tolerances around 1e-6: an optimum this close to its bound is proved. Op times
# are of that order, so costs are scaled until the unplanned step costs this much.
TOLERANCE, SCALE = 1e-6, 1000.0

# Nor do they tell what is so near to a budget from what is over it, in a row of which the budget is
# SCALE: what is within it to the byte was proved impossible, beside tensors of gigabytes. So such a
# row allows this much more, which takes a proof away only where less than that is missing.
LEEWAY = SCALE * TOLERANCE

# Sums of floats that should be equal differ by less than this.
ROUNDING = 1e-9

# A solve visits this many nodes of branch and bound, by the number of variables, and a relaxation
# makes this many iterations: some seconds for a few moments of the zoo's ResNet-50 or DenseNet-121.
NODES_BY_VARIABLES = 1_000_000
ITERATIONS_BY_VARIABLES = 1_000_000_000
MOST = (1 << 31) - 1

_IN_BRANCH_AND_BOUND = 6
# HiGHS asks in the simplex method, the interior point method and branch and bound.
_MAY_BE_STOPPED = (1, 2, _IN_BRANCH_AND_BOUND)

# The names of statuses.
_INFEASIBLE, _SOLVED = ("INFEASIBLE", "INT_INFEASIBLE"), ("OPTIMAL", "FEASIBLE")

# By solver, python-mip's module, the library there, and what deletes a model in it.
_DESTRUCTORS = {
    "CBC": ("mip.cbc", "cbclib", "Cbc_deleteModel"),
    "HIGHS": ("mip.highs", "highslib", "Highs_destroy"),
}

Model = Any


@dataclass(frozen=True)
class Solved:
    """What a solve gave. ``values`` are those of all variables, None if there is no solution.

    ``bound`` is proven: no solution has a smaller objective. ``optimal``: nor is there a gap
    between ``value`` and the bound. ``infeasible``: proved. With neither, nothing else is known.
    """

    values: tuple[float, ...] | None
    value: float
    bound: float
    optimal: bool
    infeasible: bool


@dataclass
class Looks:
    """How many more times HiGHS may look in branch and bound whether it is to end.

    A look counts as many times as the program has variables, by which it takes longer. HiGHS looks
    after a round of cuts and after a node: in large programs rounds of cuts take most of the time.
    """

    left: float = math.inf


def _check_solver(solver: str) -> None:
    """ArgumentError unless ``solver`` is one of :data:`SOLVERS`."""
    if solver not in SOLVERS:
        raise ArgumentError(f"solver is {solver!r}; it must be one of {list(SOLVERS)}")


def new_model(solver: str) -> Model:
    """An empty model of python-mip to be minimised by ``solver``.

    ArgumentError for a name of none, DependencyError for one that does not start.
    """
    load_openblas_of_mxnet()
    _check_solver(solver)  # an empty name would make python-mip look at environment variables
    try:
        _look_up_destructor(solver)
        model = mip.Model(sense=mip.MINIMIZE, solver_name=solver)
    except Exception as error:  # whatever a missing shared library makes python-mip raise
        raise DependencyError(
            f"the solver {solver} does not start: {error}; "
            "pip install 'mip[highs]>=2' 'highspy<1.16'"
        ) from error
    model.verbose = 0
    # Threads of CBC call BLAS at the same time, on which the OpenBLAS that MXNet brings (and which
    # then serves both) hangs for good: its exec_blas spins on a flag that it read once.
    model.threads = 0 if solver == "CBC" else _threads_of_highs()
    return model


@functools.cache
def _threads_of_highs() -> int:
    """1, or 0 for what HiGHS has, if another number was asked for in this process before.

    HiGHS fails if models of one process ask for different numbers. With more than one thread its
    models hang in processes that are forked later, as a fork has no threads but its own.
    """
    with deferring():
        model = mip.Model(sense=mip.MINIMIZE, solver_name="HIGHS")
        model.verbose = 0
        model.threads = 1
        model.add_var()
        try:
            model.optimize()
        except mip.InterfacingError:
            return 0
        finally:
            _break_circles(model)
            del model
    return 1


def _break_circles(model: Model) -> None:
    """Let ``model`` be deleted when the last reference to it is, not by a garbage collection.

    python-mip's objects refer to each other in circles. ``Model.__del__`` deletes the attribute
    ``solver``.
    """
    model.__dict__.clear()
    model.solver = None


@functools.cache
def _look_up_destructor(solver: str) -> None:
    """Access what deletes a model once, before the first model is made.

    cffi holds a lock during the first access to a function. A garbage collection in that time
    deletes models that nobody refers to, and if that were the first access to the destructor, it
    would wait for the lock, which the same thread holds, for good.

    An interrupt waits: highspy would make an ImportError of it, and python-mip have no HiGHS then
    for as long as the process lives.
    """
    module, library, destructor = _DESTRUCTORS[solver]
    with deferring():
        getattr(getattr(importlib.import_module(module), library), destructor)


@contextlib.contextmanager
def _stoppable(model: Model, stop: Stop, looks: Looks) -> Iterator[None]:
    """Let an interrupt stop HiGHS: Python alone would only see it once the solver has come back.

    So does another thread that ends ``stop``, and the last of ``looks``. CBC offers no such way.
    """
    with deferring() as interrupt:
        highs, pointer, weight = model.solver._lib, model.solver._model, model.num_cols

        def is_to_end() -> bool:
            return interrupt.has_come or stop.is_ended

        def look(kind: int, message: Any, out: Any, answer: Any, data: Any) -> None:
            looks.left -= weight if kind == _IN_BRANCH_AND_BOUND else 0
            if (is_to_end() or looks.left <= 0.0) and answer != mip.highs.ffi.NULL:
                answer.user_interrupt = 1

        signature = "void(int, char *, HighsCallbackDataOut *, HighsCallbackDataIn *, void *)"
        callback = mip.highs.ffi.callback(signature, look)
        highs.Highs_setCallback(pointer, callback, mip.highs.ffi.NULL)
        for kind in _MAY_BE_STOPPED:
            highs.Highs_startCallback(pointer, kind)
        try:
            yield
        except KeyError:  # python-mip knows no status "interrupted"
            if not (is_to_end() or looks.left <= 0.0):
                raise
            _take_solution(model.solver)
        finally:
            for kind in _MAY_BE_STOPPED:
                highs.Highs_stopCallback(pointer, kind)


def _take_solution(highs: Any) -> None:
    """Let python-mip have the best solution, if any, of a solve that was stopped."""
    sizes = (highs.num_cols(), highs.num_cols(), highs.num_rows(), highs.num_rows())
    arrays = [mip.highs.ffi.new("double[]", size) for size in sizes]
    highs._lib.Highs_getSolution(highs._model, *arrays)
    highs._x = list(arrays[0])


class Program:
    """A minimisation over variables between 0 and an upper bound; rows may be added any time.

    A context manager: at its end the solver's memory is freed (:meth:`close`). Without ``restarts``
    HiGHS does not presolve again what its first node has fixed much of. That takes most of the time
    of the programs of several moments, which it solves in a few nodes.
    """

    def __init__(self, solver: str = DEFAULT_SOLVER, *, restarts: bool = True) -> None:
        self.model = new_model(solver)
        if solver == "HIGHS" and not restarts:
            highs = self.model.solver
            highs._lib.Highs_setBoolOptionValue(highs._model, b"mip_allow_restart", 0)
        self.model.max_mip_gap = 0.1 * TOLERANCE
        self.nodes = MOST
        self.variables: list[Any] = []
        self.new_rows = Rows()
        self.costs: list[float] = []
        self.has_integers = False
        self.has_failed = False
        self.floor = 0.0  # a lower bound on the objective, by the bounds of the variables
        self.contradicts = False  # is there a row without variables that does not hold?

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the solver's memory; the program is not to be used any more.

        Without this a garbage collection frees it, in a ``__del__`` of python-mip, at any time,
        and an interrupt that comes then is lost: Python prints what a ``__del__`` raises, and goes
        on. Here it is deferred.
        """
        with deferring():
            model, self.model = self.model, None
            self.variables.clear()
            if model is not None:
                _break_circles(model)
                del model

    def variable(self, cost: float = 0.0, *, upper: float = 1.0, integer: bool = False) -> int:
        """The number of a new variable with this factor in the objective."""
        kind = mip.INTEGER if integer else mip.CONTINUOUS
        self.costs.append(cost)
        self.has_integers |= integer
        self.floor += min(0.0, cost * upper) if cost else 0.0
        self.variables.append(self.model.add_var(obj=cost, lb=0.0, ub=upper, var_type=kind))
        return len(self.variables) - 1

    def at_most(self, terms: Mapping[int, float], limit: float) -> None:
        """Demand that the sum of factor times variable is at most ``limit``."""
        if not terms:
            self.contradicts |= limit < -ROUNDING
            return
        self.new_rows.add(terms, limit)

    def start_from(self, values: Sequence[float]) -> None:
        """Give the solver a first solution: the values of all variables so far."""
        self.model.start = list(zip(self.variables, values, strict=False))

    def solve(
        self,
        stop: Stop,
        *,
        relax: bool = False,
        effort: float = 1.0,
        gap: float = 0.0,
        looks: Looks | None = None,
    ) -> Solved:
        """Minimise; with ``relax``, the linear relaxation.

        It ends after a number of nodes or iterations, ``effort`` times the usual one, and where no
        solution can be cheaper by more than ``gap``; ``stop`` says whether the clock has ended it.
        HiGHS ends with a bound alone when no ``looks`` are left. A status that is not known to mean
        more proves nothing. After a failure nothing is known any more, as python-mip may have left
        integer variables continuous.
        """
        infeasible = Solved(None, math.inf, self.floor, False, True)
        if self.contradicts:
            return infeasible
        if not self.variables:  # python-mip cannot solve this
            return Solved((), 0.0, 0.0, True, False)
        no_answer = Solved(None, math.inf, self.floor, False, False)
        if self.has_failed:
            return no_answer
        self._limit(effort, gap, relax=relax)
        status = self._optimize(stop, looks := looks or Looks(), relax=relax)
        if status == mip.OptimizationStatus.UNBOUNDED:
            is_proved = self._is_infeasible(stop, relax=relax)
            return infeasible if is_proved else no_answer
        if status.name in _INFEASIBLE:
            return infeasible
        bound = self.floor if relax else self._bound(is_fresh=looks.left <= 0.0)
        if status.name not in _SOLVED or not self.model.num_solutions:
            return replace(no_answer, bound=bound)
        value = self.model.objective_value
        values = tuple(variable.x for variable in self.variables)
        is_proved = status == mip.OptimizationStatus.OPTIMAL
        if relax:
            return Solved(values, value, value if is_proved else bound, is_proved, False)
        # With a gap tolerance a solver may say OPTIMAL although a gap remains: read the gap.
        is_closed = is_proved and value - bound <= TOLERANCE * max(1.0, abs(value))
        return Solved(values, value, bound, is_closed, False)

    def _pass_rows(self) -> None:
        """Give the solver the rows that are new since its last solve."""
        rows, self.new_rows = self.new_rows, Rows()
        if self.model.solver_name == "HIGHS":
            rows.pass_to(self.model.solver, mip.highs)
            return
        for numbers, factors, limit in rows:
            variables = [self.variables[number] for number in numbers]
            self.model.add_constr(mip.LinExpr(variables, factors, -limit, "<"))

    def _limit(self, effort: float, gap: float, *, relax: bool) -> None:
        """Set how much work a solve may take, and which gap it may leave."""
        nodes, iterations = (
            int(max(1.0, min(MOST, effort * work / len(self.variables))))
            for work in (NODES_BY_VARIABLES, ITERATIONS_BY_VARIABLES)
        )
        self.nodes = nodes
        self.model.max_mip_gap_abs = max(0.1 * TOLERANCE, gap)
        if self.model.solver_name == "HIGHS":
            self.model.solver.set_max_iter(iterations if relax else MOST)

    def _optimize(self, stop: Stop, looks: Looks, *, relax: bool) -> Any:
        """The status when ``stop`` is over at the latest; ERROR if the solver fails."""
        status = mip.OptimizationStatus.OTHER
        is_of_highs, is_linear = self.model.solver_name == "HIGHS", relax or not self.has_integers
        lates: list[bool] = []
        with contextlib.ExitStack() as around:
            if is_of_highs:
                around.enter_context(_stoppable(self.model, stop, looks))
                lates = around.enter_context(asking_whether_late(self.model.solver))
            elif is_linear:
                around.enter_context(silence())
            try:
                self._pass_rows()
                status = self.model.optimize(
                    max_seconds=max(0.1, stop.seconds_left), max_nodes=self.nodes, relax=relax
                )
            except mip.InterfacingError:
                status = mip.OptimizationStatus.ERROR
            except TypeError:  # HiGHS says OPTIMAL, and has no values: python-mip compares None
                if self.model.num_solutions:
                    raise
        if any(lates) if is_of_highs else stop.seconds_left <= 0.0:
            stop.cut()
        self.has_failed = status == mip.OptimizationStatus.ERROR
        if looks.left <= 0.0 and status == mip.OptimizationStatus.OTHER:
            return mip.OptimizationStatus.FEASIBLE  # if there is a solution
        return status

    def _is_infeasible(self, stop: Stop, *, relax: bool) -> bool:
        """Is it proved of what is unbounded or infeasible, which HiGHS does not tell apart?

        Without an objective nothing is unbounded: what is infeasible then, is so.
        """
        self.model.objective = mip.LinExpr()
        status = self._optimize(stop, Looks(), relax=relax)
        self.model.objective = mip.LinExpr(self.variables, self.costs)
        return status.name in _INFEASIBLE

    def _bound(self, *, is_fresh: bool) -> float:
        """What the solver has proved, or what holds in any case.

        python-mip has none of a solve that is stopped; that of HiGHS is of it if ``is_fresh``.
        """
        highs = self.model.solver
        bound = highs.get_objective_bound() if is_fresh else self.model.objective_bound
        # CBC says 1e50, or the largest float, where it has no bound.
        return bound if bound is not None and self.floor < bound < 1e50 else self.floor
