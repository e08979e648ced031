"""What is alive when, and the reasons in words."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memplan
from helpers.amounts import examples, long_except
from helpers.branches import taking
from helpers.graphs import mirrored_graphs, schedules, tensors, training_graphs, unit_chain
from helpers.networks import residual_net
from helpers.shown import plan_of, recomputing_chain
from memplan.errors import ArgumentError, BudgetError
from memplan.planning.plan import Footprint
from memplan.step.graph import Handover, Op, TrainingGraph
from memplan.step.liveness import Fate, Role, at_peak, at_step, fates, live_by_role, lives, waits
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies import REALISATIONS
from memplan.views.explain import Reasons, memory, peak, why


@examples(60)
@given(st.one_of(training_graphs(), mirrored_graphs()).flatmap(schedules))
def test_lives_add_up_to_the_simulation(schedule: Schedule) -> None:
    live = [0] * len(schedule.ops)
    for life in lives(schedule):
        for step in range(life.step, min(life.last + 1, len(schedule.ops))):
            live[step] += life.nbytes
    assert tuple(live) == simulate(schedule).live_nbytes
    by_role = live_by_role(schedule)
    assert [sum(column) for column in zip(*by_role.values(), strict=True)] == live


@taking(result=5, read=5)
@examples(60)
@given(training_graphs().flatmap(schedules))
def test_what_is_alive_at_the_peak_adds_up_to_the_validators(
    taken: Counter[str], schedule: Schedule
) -> None:
    alive = at_peak(schedule)
    assert sum(tensor.nbytes for tensor in alive) == validate(schedule).peak_nbytes
    assert [t.nbytes for t in alive] == sorted((t.nbytes for t in alive), reverse=True)
    for tensor in alive:
        assert schedule.graph.ops[schedule.ops[tensor.since]].name == tensor.op
        if tensor.reader is None:
            taken["result"] += 1
            assert tensor.until == len(schedule.ops)
            assert tensor.role is Role.RESULT
        else:
            taken["read"] += 1
            assert schedule.graph.ops[schedule.ops[tensor.until]].name == tensor.reader


def test_roles_on_a_chain() -> None:
    schedule = recomputing_chain()
    spans = {
        (life.step, life.last): life.role for life in lives(schedule) if life.step not in (3, 9)
    }
    assert spans == {
        (0, 1): Role.PASSING,  # f0, read by f1
        (1, 2): Role.PASSING,
        (2, 4): Role.KEPT,  # f2, read by the loss and by b2
        (4, 7): Role.GRADIENT,
        (5, 6): Role.RECOMPUTED,
        (6, 7): Role.RECOMPUTED,
        (7, 9): Role.GRADIENT,
        (8, 9): Role.RECOMPUTED,
    }
    assert fates(schedule) == (Fate.RECOMPUTED, Fate.RECOMPUTED, Fate.KEPT, Fate.KEPT)


def in_place() -> TrainingGraph:
    """conv, relu written over it, flatten sharing relu's memory, and the backward op of relu."""
    ops = (
        Op("conv", "Convolution", (), (0,), 1.0),
        Op("relu", "Activation", (0,), (1,), 1.0, handovers=(Handover(0, 0, False),)),
        Op("flatten", "Flatten", (1,), (2,), 1.0, handovers=(Handover(0, 0, True),)),
        Op("fc", "FullyConnected", (2,), (3,), 1.0),
        Op("relu_backward", "_backward", (1, 3), (4,), 1.0, False, 1, (1,)),
    )
    return TrainingGraph(ops, tensors(conv=8, relu=8, flatten=8, fc=2, grad=8), (4,), 4)


def test_memory_belongs_to_who_wrote_it_last_and_aliases_only_share_it() -> None:
    schedule = Schedule.unplanned(in_place())
    names = [tensor.name for tensor in schedule.graph.tensors]
    found = [(names[life.tensor], life.step, life.last) for life in lives(schedule)]
    assert found == [("conv", 0, 0), ("relu", 1, 4), ("fc", 3, 4), ("grad", 4, 5)]
    assert fates(schedule) == (Fate.FREED, Fate.KEPT, Fate.FREED, Fate.KEPT)


@examples(60)
@given(st.integers(2, 6).map(unit_chain).flatmap(schedules))
def test_waits_are_checkmates_s_where_all_outputs_have_bytes(schedule: Schedule) -> None:
    cells = {(stage, op) for op, begin, end in waits(schedule) for stage in range(begin, end + 1)}
    _, kept = schedule.matrices()
    assert cells == {(int(stage), int(op)) for stage, op in zip(*kept.nonzero(), strict=True)}


def test_why_on_a_chain() -> None:
    schedule = recomputing_chain()
    text = why(schedule, "f2")
    assert "kept to step 4, for b2" in text
    assert "Recomputing it for step 4 would cost 3e+03 ms" in text  # f0 and f1 are gone, too
    assert "for 3 ops" in text
    again = why(schedule, "f1")
    assert "freed in the forward pass (last read at step 2 by f2)" in again
    assert "Recomputed at step 6" in again
    assert "for b1; its 4 B are not held between step 2 and step 6" in again
    assert "for f1, itself recomputed" in why(schedule, "f0")
    assert "a gradient, alive to step 7" in why(schedule, "b2")
    assert "as a result" in why(schedule, "b0")


def test_why_something_is_not_recomputed() -> None:
    ops = (
        Op("drop", "Dropout", (), (0,), 1.0, recomputable=False),
        Op("relu", "Activation", (0,), (1,), 1.0),
        Op("back", "_backward", (0, 1), (2,), 1.0, False, 1, (1,)),
    )
    schedule = Schedule.unplanned(TrainingGraph(ops, tensors(a=9, b=1, c=1), (2,), 2))
    assert "It cannot be recomputed: Dropout must not run twice." in why(schedule, "drop")
    assert "Recomputing it for step 2 would cost 1e+03 ms" in why(schedule, "relu")


@examples(40)
@given(st.one_of(training_graphs(), mirrored_graphs()).flatmap(schedules))
def test_there_is_a_reason_for_every_tensor_of_every_schedule(schedule: Schedule) -> None:
    reasons = Reasons(schedule)
    for tensor in range(len(schedule.graph.tensors)):
        text = reasons.of(tensor)
        assert text.endswith(".")
        again = len(set(schedule.ops)) < len(schedule.ops)
        assert again or "ecomputed at" not in text
    assert peak(schedule)


def test_an_unknown_name_is_answered_with_close_ones() -> None:
    with pytest.raises(ArgumentError, match=r"name: there is no .* 'los'.*'loss'"):
        why(recomputing_chain(), "los")


def test_a_step_that_does_not_exist() -> None:
    with pytest.raises(ArgumentError, match="no step 10; the schedule has 10 steps"):
        at_step(recomputing_chain(), 10)


def test_a_name_is_text() -> None:
    with pytest.raises(ArgumentError, match="name must be that of an op or tensor, got 3"):
        why(Schedule.unplanned(unit_chain(3)), 3)  # type: ignore[arg-type]


def test_an_argument_is_said_to_be_one() -> None:
    said = why(Schedule.unplanned(unit_chain(3)), "weight", ["weight"])
    assert said.startswith("'weight' is an argument or a state of the network")


def test_what_is_held_beside_activations_is_said() -> None:
    footprint = Footprint(8, 8, 3 * 2**20, 2**10, 1.0, 16, 0, 2**21, "measured")
    plan = dataclasses.replace(plan_of(recomputing_chain()), footprint=footprint)
    others = "workspace of operators 2.00 MiB, reserve 1.00 KiB"
    parts = f"arguments and other gradients 3.00 MiB, {others}"
    assert memory(plan) == f"{peak(plan.schedule)}\n\nBeside activations: {parts}."
    nothing = Footprint(8, 8, 0, 0, 1.0, 16, workspace_source="measured")
    assert memory(dataclasses.replace(plan, footprint=nothing)) == peak(plan.schedule)


def test_a_workspace_that_is_not_counted_is_said() -> None:
    said = memory(plan_of(recomputing_chain()))
    assert said.endswith("\n\nThe workspace of operators is not counted.")


@pytest.mark.parametrize("realisation", long_except(REALISATIONS, ["mirror", "packed"]))
def test_gradients_that_are_activations_are_no_others(realisation: str) -> None:
    """The table of the peak has those of all but mirror plans, which have arrays of their own."""
    net, shapes = residual_net(units=1)
    optimizer = "sgd" if realisation == "updating" else None
    plan = memplan.plan(
        net, strategy="store_all", realisation=realisation, optimizer=optimizer, **shapes
    )
    mirrored = realisation == "mirror"
    gradients = "arguments and gradients" if mirrored else "arguments and other gradients"
    assert f"Beside activations: {gradients} " in plan.explain()
    assert re.search(rf"\n{gradients}  ", str(plan))
    assert f"<td>{gradients}</td>" in plan.report_html()
    assert ("step count among activations, but" in str(plan)) == (not mirrored)
    text = "Arguments, gradients and states take"
    if not mirrored:
        text = "Arguments, states and gradients that are no activations take"
    with pytest.raises(BudgetError, match=text):
        memplan.plan(net, budget=1, realisation=realisation, optimizer=optimizer, **shapes)
