"""Steps that update the parameters within: where updates stand, and MXNet's bits."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import memplan
from helpers.amounts import long_unless
from helpers.cases import CASES
from helpers.networks import Network, dense, loss, residual_net, var
from helpers.planning import NEVER_SECONDS
from helpers.schedules import random_schedule
from helpers.training_runs import Values, bound, differences, planned_steps, random_values
from memplan.errors import ArgumentError, TraceError
from memplan.memory.packing import pack
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.plan_file import load_plan, plan_text
from memplan.mxnet.realise.engine import Handles
from memplan.mxnet.realise.imperative import Call
from memplan.mxnet.realise.lowering import Lowered, lower
from memplan.mxnet.realise.packed_step import _bundles
from memplan.mxnet.realise.update_calls import Operators, UpdateCall
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.nnvm import depth_first
from memplan.planning import least
from memplan.planning.realisation import trace
from memplan.step.costs import with_costs
from memplan.step.graph import UPDATE
from memplan.step.schedule import Schedule
from memplan.step.validate import validate


@dataclass
class Descent:
    """Updates of plain gradient descent, by one operator each."""

    in_turn: bool
    order: list[str] = field(default_factory=list)
    by_operators: bool = False
    are_changing: bool = False
    operators: Operators = field(default_factory=dict)

    @contextlib.contextmanager
    def step(self, weights: Mapping[str, Any]) -> Iterator[None]:
        self.order.clear()
        yield
        assert sorted(self.order) == sorted(weights)

    def serve(self, step: Any) -> None:
        """It replaces no states."""

    def update(self, name: str, weight: Any, gradient: Any) -> None:
        self.order.append(name)
        descend(weight, gradient)
        if not self.in_turn:  # as some optimizers do
            gradient[:] = np.nan


def descend(weight: Any, gradient: Any) -> None:
    mx.nd.sgd_update(weight, gradient, out=weight, lr=0.01)


def packed_steps(case: str) -> list[Values]:
    """What packed steps leave that are followed by the updates."""
    traced = CASES[case].trace("packed")
    values = random_values(traced, CASES[case].integers)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    forward = executor.forward

    def step_and_update(**arguments: Any) -> Any:
        found = forward(**arguments)
        for name, gradient in executor.grad_dict.items():
            descend(executor.arg_dict[name], gradient)
        executor.grad_dict = {}
        return found

    executor.forward = step_and_update  # type: ignore[method-assign]
    gradients = executor.grad_dict
    steps = []
    for seed in range(3):
        executor.grad_dict = gradients
        mx.random.seed(seed)
        steps += planned_steps(executor, steps=1)
    return steps


def updating_steps(traced: Trace, schedule: Schedule, values: Values, updates: Descent) -> Any:
    symbol = traced.symbol
    arrays = {name: mx.nd.array(value, dtype=value.dtype) for name, value in values.items()}
    executor = TrainExecutor(
        traced,
        schedule,
        ctx=mx.cpu(0),
        args={name: arrays[name] for name in symbol.list_arguments()},
        aux_states={name: arrays[name] for name in symbol.list_auxiliary_states()},
        updates=updates,
    )
    assert executor.memory.nbytes == pack(lower(traced, schedule).schedule).nbytes
    assert executor.grad_dict == {}
    steps = []
    for seed in range(3):
        mx.random.seed(seed)
        steps += planned_steps(executor, steps=1)
    return steps


@pytest.mark.parametrize(
    "case",
    """residual dropout two_headed lstm unet layer_norm norms transformer embedding fused_lstm
    fused_dropout shared_weights multi_head gathered terms5 terms12 duplicates fixed""".split(),
)
def test_identical_to_updates_behind_the_step(case: str) -> None:
    expected = packed_steps(case)
    traced = CASES[case].trace("updating")
    values = random_values(traced, CASES[case].integers)
    for seed in range(3):
        graph = traced.graph
        schedule = random_schedule(graph, seed) if seed else Schedule.unplanned(graph)
        found = updating_steps(traced, schedule, values, Descent(seed != 1))
        assert not differences(expected, found), seed


@dataclass
class Untidy(Descent):
    """Frees an array in every update."""

    def update(self, name: str, weight: Any, gradient: Any) -> None:
        mx.nd.empty((3,))
        super().update(name, weight, gradient)


def test_what_is_freed_meanwhile_changes_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """MXNet cuts an operation in two where an array is freed; the calls of both keep their turn."""
    expected = packed_steps("unet")
    traced = CASES["unet"].trace("updating")
    values = random_values(traced, CASES["unet"].integers)
    run, collects = Call.__call__, list[bool]()

    def watched(call: Call) -> None:
        collects.append(gc.isenabled())
        run(call)

    monkeypatch.setattr(Call, "__call__", watched)
    found = updating_steps(traced, Schedule.unplanned(traced.graph), values, Untidy(True))
    assert not differences(expected, found)
    assert collects
    assert not any(collects)


def test_a_gradient_that_shares_memory_is_not_written_over() -> None:
    """An optimizer may write into the gradient, which here is that of the layer before, too."""
    weight = mx.sym.identity(var("w", shape=(4, 16)))
    body = mx.sym.elemwise_add(dense(var(), name="first"), weight)
    net = loss(mx.sym.tanh(body))
    found = []
    for in_turn in (True, False):
        traced = trace(net, shapes={"data": (4, 8)}, realisation="updating")
        names = [node.name for node in traced.nodes]
        assert names.index("w_update") < names.index("first_backward")
        schedule = Schedule.unplanned(traced.graph)
        found.append(updating_steps(traced, schedule, random_values(traced), Descent(in_turn)))
    assert not differences(*found)


def readers_behind(lowered: Lowered) -> int:
    """How many steps read a parameter that is updated already."""
    updated: set[int] = set()
    count = 0
    for op in lowered.schedule.ops:
        node = lowered.nodes[op]
        if node.op == UPDATE:
            updated.add(id(node.inputs[1][0]))
        else:
            count += any(id(source) in updated for source, _ in node.inputs)
    return count


def test_an_update_stands_behind_every_reader_and_no_later() -> None:
    traced = CASES["residual"].trace("updating")
    index_of = {id(node): index for index, node in enumerate(traced.nodes)}
    wrong = 0
    for seed in range(20):
        schedule = random_schedule(traced.graph, seed)
        wrong += readers_behind(Lowered(schedule, traced.nodes, index_of))
        lowered = lower(traced, schedule)
        assert validate(lowered.schedule).valid
        assert not readers_behind(lowered)
        ops, reads = lowered.schedule.ops, lowered.schedule.reads
        for step, op in enumerate(ops):
            node = lowered.nodes[op]
            if node.op != UPDATE:
                continue
            before = step - 1  # behind another update, or behind what it waits for
            while lowered.nodes[ops[before]].op == UPDATE:
                before -= 1
            weight = node.inputs[1][0]
            read = [source for source, _ in lowered.nodes[ops[before]].inputs]
            assert reads[step] == (before,) or any(source is weight for source in read)
    assert wrong, "no random schedule updates too early by itself"


def test_updates_come_as_early_in_the_base_order_as_they_may() -> None:
    """A gradient that an op of its own computes does not wait for the end."""
    body = var()
    for layer in range(4):
        weight = mx.sym.transpose(var(f"w{layer}"))
        body = mx.sym.tanh(mx.sym.dot(body, weight))
    shapes = {"data": (4, 16), **{f"w{layer}": (16, 16) for layer in range(4)}}
    requests = {f"w{layer}": "write" for layer in range(4)}
    net = loss(body)
    traced = trace(net, shapes=shapes, grad_req=requests, realisation="updating")
    names = [node.name for node in traced.nodes]
    places = [names.index(f"w{layer}_update") for layer in (3, 2, 1, 0)]
    assert places == sorted(places)
    for place, layer in zip(places[:-1], (2, 1, 0), strict=True):
        later = [n for n in traced.nodes[place:] if n.op == "_backward_dot"]
        assert len(later) == layer + 1


def complete_early() -> Network:
    """The gradient of the first output's layer needs nothing of what the second one shows."""
    data = var()
    first = mx.sym.SoftmaxOutput(dense(data, no_bias=True), name="softmax")
    return mx.sym.Group([first, mx.sym.BlockGrad(mx.sym.square(data))]), {"data": (4, 6)}


@pytest.mark.parametrize("case", ["two_headed", "multi_head", None])
def test_the_first_ops_are_the_forward_pass(case: str | None) -> None:
    network = CASES[case].network if case else complete_early
    net, shapes = network()
    traced = trace(net, shapes=shapes, realisation="updating")
    outputs = traced.heads[: len(traced.symbol.list_outputs())]
    forward = {node for node in depth_first(outputs) if not node.is_variable}
    assert {*traced.nodes[: traced.graph.nforward]} == forward


def planned(realisation: str, budget: Any, network: Callable[[], Network] = residual_net) -> Any:
    symbol, shapes = network()
    options: dict[str, Any] = {"realisation": realisation, "costs": "roofline:v100"}
    options |= {"strategy": "auto:effort=0.2"}
    return memplan.plan(symbol, budget=budget, time_limit=NEVER_SECONDS, **options, **shapes)


def wide() -> Network:
    """Much of the step are gradients."""
    body = var()
    for layer in range(6):
        body = mx.sym.tanh(dense(body, name=f"layer{layer}", units=128))
    return loss(body), {"data": (8, 128)}


@pytest.mark.parametrize("network", long_unless([wide, residual_net], lambda net: net is wide))
def test_plans_get_lower(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least, "SEARCH_SECONDS", 0.2)
    for budget in ("64MiB", None):
        after, within = (planned(r, budget, network) for r in ("packed", "updating"))
        assert within.fixed_nbytes == after.fixed_nbytes
        assert within.total_nbytes < after.total_nbytes
        assert within.unplanned == after.unplanned
        assert validate(within.schedule).valid
        assert "updated within the step" in str(within)
        assert "updated within the step" not in str(after)
    gradients = sum(
        np.prod(within.trace.shapes[name]) * 4
        for name, request in within.trace.grad_req.items()
        if request == "write"
    )
    if network is wide:
        assert within.allocated_nbytes < gradients / 2 < after.allocated_nbytes / 2


def test_a_plan_from_a_file(tmp_path: Any) -> None:
    plan = planned("updating", 0.6)
    file = tmp_path / "plan.json"
    file.write_text(plan_text(plan), encoding="utf-8")
    read = load_plan(file)
    assert plan_text(read) == plan_text(plan)
    assert read.realisation == "updating"
    assert read.trace.form.updates
    gradients = [n for n in read.symbol.list_outputs() if "backward" in n]
    assert len(gradients) > 5  # in the Symbol, which has no updates, they are outputs


def test_updates_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # In a process of its own, which takes longer than all else here.
    monkeypatch.setattr("memplan.mxnet.profile._workspace_nbytes", lambda *_: 0)
    symbol, shapes = residual_net(units=1)
    measured = memplan.profile(symbol, realisation="updating", repeats=1, warmup=0, **shapes)
    graph = trace(symbol, shapes=shapes, realisation="updating").graph
    for costs in (measured, "roofline:v100"):
        seconds = {(op.kind == UPDATE, op.seconds > 0) for op in with_costs(graph, costs).ops}
        assert seconds == {(True, False), (False, True)}


def weight_as_output() -> Network:
    weight = var("w")
    return mx.sym.Group([loss(mx.sym.dot(var(), weight)), mx.sym.BlockGrad(weight), weight]), {
        "data": (4, 8),
        "w": (8, 8),
    }


def test_what_cannot_be_used_up_is_refused() -> None:
    symbol, shapes = residual_net()
    with pytest.raises(TraceError, match=r"grad_req='add'.*realisation='packed'"):
        trace(symbol, shapes=shapes, grad_req="add", realisation="updating")
    symbol, shapes = weight_as_output()
    with pytest.raises(TraceError, match="'w' is an output"):
        trace(symbol, shapes=shapes, grad_req={"w": "write"}, realisation="updating")
    traced = CASES["residual"].trace("updating")
    with pytest.raises(ArgumentError, match="nothing was given that does so"):
        TrainExecutor(traced, Schedule.unplanned(traced.graph), ctx=mx.cpu(0))


def test_many_calls_beside_updates_that_change_are_kept_apart() -> None:
    """Between few there are too many bundles."""
    updates, arrays = Descent(True), Handles([mx.nd.zeros(1)])
    updates.by_operators = True
    plain = Call("_plus_scalar", {"scalar": "1"}, arrays, arrays)
    update = UpdateCall(updates, "weight", *arrays.arrays * 2)
    calls = [*[plain] * 9, update, *[plain] * 3, update, *[plain] * 8]
    sizes = {
        are_changing: [len(each.calls) for each in _bundles(calls, are_changing=are_changing)]
        for are_changing in (False, True)
    }
    assert sizes == {False: [1, 4, 16, 1], True: [1, 4, 4, 5, 8]}
