"""What strategies may answer, and what is made of answers that cannot be."""

from __future__ import annotations

import contextlib
import json
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import memplan
from helpers.graphs import unit_chain
from helpers.networks import dense, loss, var
from helpers.planning import half_of_the_ops, quick
from memplan.cli.output import attempt_figures
from memplan.errors import ArgumentError, BudgetError
from memplan.memory.additions import Additions, LoweredMemory
from memplan.memory.memory import Packed
from memplan.mxnet.realise.packed_step import lower
from memplan.planning.answer import checked
from memplan.step.mirroring import mirror
from memplan.step.schedule import Schedule
from memplan.strategies.base import Outcome, Problem, Status

pytestmark = pytest.mark.usefixtures("little_time_to_look_for_the_least")


@dataclass(frozen=True)
class Saying:
    """Recomputes what half of the ops wrote, and ``says`` something of it."""

    says: Callable[[Problem, Outcome], Any]

    def solve(self, problem: Problem) -> Any:
        schedule = mirror(problem.graph, half_of_the_ops(problem.graph))
        return self.says(problem, Outcome(Status.FEASIBLE, schedule))


def saying(bound: Any, status: Any = Status.FEASIBLE, *, in_order: bool = False) -> Saying:
    """One whose bound is this, of the seconds of the unplanned step if it is a number."""

    def says(problem: Problem, outcome: Outcome) -> Outcome:
        seconds = bound * problem.graph.seconds if isinstance(bound, float) else bound
        return Outcome(status, outcome.schedule, seconds, in_order)

    return Saying(says)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (saying(math.inf), "says that no plan within the budget takes less than inf seconds, but"),
        (saying(3.0, Status.OPTIMAL), "says that no plan within the budget takes less than"),
        (saying(math.nan), "returns must be None or a number of seconds, got nan"),
        (saying("x"), "returns must be None or a number of seconds, got 'x'"),
        (saying(True), "returns must be None or a number of seconds, got True"),
        (saying(None, "feasible"), "returns must be a Status, got 'feasible'"),
        (saying(None, Status.INFEASIBLE), "returns a schedule, but says 'infeasible' of it"),
        (saying(None, Status.NO_PLAN_FOUND), "returns a schedule, but says 'no plan found' of it"),
    ],
)
def test_an_answer_that_cannot_be_is_refused_by_name(
    network: Any, strategy: Saying, message: str
) -> None:
    with pytest.raises(ArgumentError, match=f"strategy Saying {message}"):
        quick(network, strategy=strategy, budget=0.9)


class MadeAgain:
    """Runs two ops at the end that have run before, when nobody read them; says that is best."""

    def solve(self, problem: Problem) -> Outcome:
        graph = problem.graph
        again = [op for op in range(len(graph.ops)) if graph.ops[op].name in ("large", "fixed")]
        schedule = Schedule.sequence(graph, (*range(len(graph.ops)), *again))
        return Outcome(Status.OPTIMAL, schedule, schedule.seconds, in_order=True)


@pytest.mark.parametrize("max_overhead", [None, 0.01])
def test_runs_that_are_left_out_of_the_step_are_no_part_of_a_plan(
    max_overhead: float | None,
) -> None:
    """What nobody reads is not computed: the plan counts neither its seconds nor its bytes."""
    small = mx.sym.tanh(dense(var("data"), 64))
    large = mx.sym.BlockGrad(mx.sym.tile(small, reps=(1, 64), name="large"), name="fixed")
    net = mx.sym.Group([large, loss(dense(mx.sym.tanh(dense(small, 512)), 10))])
    options = {"strategy": MadeAgain(), "budget": 0.9, "max_overhead": max_overhead}
    plan = quick((net, {"data": (256, 64)}), realisation="packed", **options)
    steps = lower(plan.trace, plan.schedule).schedule.ops
    assert len(plan.schedule.ops) == len(steps) == len(plan.schedule.graph.ops)
    assert plan.overhead == 0.0
    assert plan.peak_nbytes <= plan.allocated_nbytes
    assert (plan.status, plan.lower_bound_overhead) == (Status.OPTIMAL, 0.0)
    assert not plan.bound_in_order


@pytest.mark.parametrize(
    ("bound", "status", "in_order"),
    [
        (None, Status.FEASIBLE, False),
        (4.0, Status.FEASIBLE, False),
        (3.5, Status.FEASIBLE, False),
        (3.0, Status.OPTIMAL, True),
    ],
)
def test_what_holds_in_order_says_nothing_of_a_cheaper_schedule(
    bound: float | None, status: Status, in_order: bool
) -> None:
    """Without the run that nobody reads it takes 3 seconds, and may be in another order."""
    graph = unit_chain(1)
    memory = LoweredMemory(Additions((1, 1, 1)), Packed())
    schedule = Schedule.sequence(graph, (0, 0, 1, 2))
    answer = Outcome(Status.OPTIMAL, schedule, bound, in_order=True)
    outcome = checked(answer, Problem(graph, 100, memory=memory), "own")
    assert outcome.schedule == Schedule.unplanned(graph)
    assert (outcome.status, outcome.in_order) == (status, in_order)
    assert outcome.lower_bound_seconds == (bound if in_order else None)
    # Of live bytes, and of what MXNet's mirroring executes, every run is a part.
    assert checked(answer, Problem(graph, 100), "own") == answer


def test_truth_values_of_numpy_become_pythons() -> None:
    """JSON, in which a cache keeps plans, takes no others."""
    graph = unit_chain(1)
    flags: Any = {"in_order": np.bool_(True), "cut_by_clock": np.bool_(False)}
    for schedule in (None, Schedule.unplanned(graph)):
        status = Status.NO_PLAN_FOUND if schedule is None else Status.FEASIBLE
        outcome = checked(Outcome(status, schedule, **flags), Problem(graph, 100), "own")
        assert outcome.in_order is True
        assert outcome.cut_by_clock is False


@pytest.mark.parametrize("value", [None, "no", np.zeros(2, bool)])
def test_what_is_no_truth_value_is_refused(value: Any) -> None:
    answer = Outcome(Status.NO_PLAN_FOUND, cut_by_clock=value)
    with pytest.raises(ArgumentError, match="own must return true or false as cut_by_clock"):
        checked(answer, Problem(unit_chain(1), 100), "own")


@pytest.mark.parametrize("bound", [-1.0, 0.5, 1.01, np.float32(1e-9)])
def test_a_bound_that_holds_is_taken(network: Any, bound: Any) -> None:
    plan = quick(network, strategy=saying(bound), budget=0.9)
    assert 0.0 <= (plan.lower_bound_overhead or 0.0) <= plan.overhead


def test_no_bound_is_above_the_overhead(network: Any) -> None:
    """Neither by rounding, nor where it holds for plans in order, and the plan is another one."""

    def of_its_own(_: Problem, outcome: Outcome) -> Outcome:
        assert outcome.schedule is not None
        return Outcome(Status.OPTIMAL, outcome.schedule, outcome.schedule.seconds)

    for strategy in (Saying(of_its_own), saying(math.inf, in_order=True)):
        net, shapes = network
        options = {"costs": "roofline:v100", **shapes}
        table = memplan.compare(net, strategies=strategy, budgets=0.9, **options)
        [row] = table.rows
        assert row.plan is not None
        assert row.plan.lower_bound_overhead == row.plan.overhead
        json.dumps(attempt_figures(row), allow_nan=False)


@pytest.mark.long
def test_that_nothing_fits_is_not_called_proved_where_something_does(network: Any) -> None:
    strategy = Saying(lambda *_: Outcome(Status.INFEASIBLE))
    with pytest.raises(BudgetError) as caught:
        quick(network, strategy=strategy, budget=0.9)
    assert not caught.value.proved
    message = str(caught.value)
    assert message.startswith("strategy Saying found no plan within")
    assert "It says that there is none, which is not so" in message
    assert "(proved)" not in message
    assert message.endswith("strategy='auto' plans within this budget")


@pytest.mark.parametrize("in_the_bound", [False, True])
def test_an_interrupt_after_the_answer_does_not_lose_it(
    network: Any, monkeypatch: pytest.MonkeyPatch, in_the_bound: bool
) -> None:
    """In the search for a bound, or before it: then no other search begins."""

    def interrupted(*_: Any, **__: Any) -> None:
        assert in_the_bound
        signal.raise_signal(signal.SIGINT)

    def says(_: Problem, outcome: Outcome) -> Outcome:
        if not in_the_bound:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return outcome

    monkeypatch.setattr("memplan.planning.attempt.moment_bound", interrupted)
    plan = quick(network, strategy=Saying(says), budget=0.9)
    assert plan.cut_by_clock
    assert plan.lower_bound_overhead is None
