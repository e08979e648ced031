"""A Module that is given a plan: what it does for other shapes than those of the plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import mxnet as mx
import pytest

import memplan
import memplan.mxnet
from helpers.buckets import BATCH, Sentences, network
from helpers.fitting import MIB, NETWORKS, batches, planned, steps
from memplan.errors import ArgumentError
from memplan.planning.plan import Plan

NETWORK = NETWORKS["residual"]
COUNTED: dict[str, Any] = {"ctx": mx.cpu(), "reserve": 3 * MIB, "optimizer": "adagrad"}


def plan(size: int = 8, **options: Any) -> Plan:
    shape = (size, *NETWORK[1]["data"][1:])
    return memplan.plan(NETWORK[0], strategy="evict", data=shape, **options)


def of_other_shapes(given: Plan, size: int = 5, **options: Any) -> Plan:
    """The plan that a Module makes for batches of this ``size`` after those of ``given``."""
    options = {"strategy": "evict", "plan": given, **options}
    module = planned(NETWORK[0], **options)
    for _ in steps(module, NETWORK, 8, size):
        pass
    first, other = module._plans.plans.values()
    assert first is given
    return other


def layers(*, width: int = 4, last: str = "relu", branch: str = "tanh") -> mx.sym.Symbol:
    """A layer, two activations of it, joined, and a branch whose condition is a constant."""
    layer = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=width, name="layer")
    parts = {"relu": mx.sym.relu(layer, name="relu"), "tanh": mx.sym.tanh(layer, name="tanh")}
    joined = mx.sym.concat(parts["relu"], parts["tanh"], parts[last], name="joined")
    with mx.name.NameManager():
        chosen = mx.sym.contrib.cond(
            mx.sym.ones((1,), name="one"),
            lambda: getattr(mx.sym, branch)(joined, name="in_branch"),
            lambda: joined,
        )
    return mx.sym.MakeLoss(chosen, name="loss")


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"width": 3}, r"of 'layer_weight' \(variable\) 'num_hidden' is 3 here, 4 there"),
        (
            {"last": "tanh"},
            r"of 'joined' \(Concat\) 'input 2' is tanh\[0\] here, relu\[0\] there",
        ),
        ({"branch": "relu"}, r"the loop or branch '_cond0' \(_cond\) runs another one"),
    ],
)
def test_the_difference_to_the_network_of_the_plan_is_named(
    changed: dict[str, Any], difference: str
) -> None:
    given = memplan.plan(layers(), realisation="packed", strategy="store_all", data=(2, 3))
    module = memplan.mxnet.Module(layers(**changed), plan=given, label_names=None)
    with pytest.raises(ArgumentError, match=f"another network: {difference}"):
        module.bind([("data", (2, 3))])


def test_what_reads_another_op_of_the_same_name_is_named() -> None:
    def net(last: int) -> mx.sym.Symbol:
        layer = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="layer")
        alike = [mx.sym.relu(layer, name="alike"), mx.sym.tanh(layer, name="alike")]
        joined = mx.sym.concat(*alike, alike[last], name="joined")
        return mx.sym.MakeLoss(joined, name="loss")

    given = memplan.plan(net(0), realisation="packed", strategy="store_all", data=(2, 3))
    module = memplan.mxnet.Module(net(1), plan=given, label_names=None)
    with pytest.raises(ArgumentError, match=r"'joined' \(Concat\) reads other ops here than there"):
        module.bind([("data", (2, 3))])


@pytest.mark.parametrize("realisation", ["packed", "explicit", "updating"])
def test_the_symbol_of_the_plan_is_not_its_network(realisation: str) -> None:
    given = plan(realisation=realisation)
    module = planned(given.symbol, plan=given)
    data = batches(NETWORK, 8)
    with pytest.raises(ArgumentError, match=r"plan\.symbol is; give the network itself"):
        module.bind(data.provide_data, data.provide_label)


@pytest.mark.parametrize(
    ("made", "asked", "reason"),
    [
        ("packed", "explicit", "and cannot be run as 'explicit'; leave realisation out"),
        ("explicit", "packed", "and cannot be run as 'packed'; leave realisation out"),
        ("packed", "updating", "as 'updating', as it keeps the gradients for update"),
        ("updating", "packed", "as 'packed', as it uses up the gradients within the step"),
        ("packed", "mirror", "made with realisation='explicit' or 'packed', not 'mirror'"),
        ("packed", "quickly", "there is no realisation 'quickly'"),
    ],
)
def test_another_realisation_than_that_of_the_plan_is_refused(
    made: str, asked: str, reason: str
) -> None:
    given = plan(realisation=made)
    with pytest.raises(ArgumentError, match=reason):
        planned(NETWORK[0], plan=given, realisation=asked)
    with pytest.raises(ArgumentError, match=reason):
        memplan.mxnet.BucketingModule(network, 8, plan=given, realisation=asked)


@pytest.mark.parametrize("realisation", ["packed", "explicit", "updating"])
def test_the_realisation_of_the_plan_may_be_named(realisation: str) -> None:
    module = planned(NETWORK[0], plan=plan(realisation=realisation), realisation=realisation)
    data = batches(NETWORK, 8)
    module.bind(data.provide_data, data.provide_label)
    assert module.plan is not None
    assert module.plan.realisation == realisation


def test_other_shapes_are_planned_by_the_realisation_of_the_plan() -> None:
    found = of_other_shapes(plan(realisation="explicit"), strategy="memonger")
    assert (found.realisation, found.strategy) == ("explicit", "memonger")


@pytest.mark.parametrize("strategy", ["x", "evict:gaps=1", None])
def test_a_strategy_that_there_is_not_is_refused_beside_a_plan(strategy: Any) -> None:
    given = plan(realisation="packed")
    with pytest.raises(ArgumentError, match="strategy"):
        planned(NETWORK[0], plan=given, strategy=strategy)
    with pytest.raises(ArgumentError, match="strategy"):
        memplan.mxnet.BucketingModule(network, 8, plan=given, strategy=strategy)


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_other_shapes_count_what_the_given_plan_counts(realisation: str) -> None:
    """The arrays that AdaGrad makes as it updates, too, which are workspace."""
    options = {**COUNTED, "realisation": realisation, "budget": 64 * MIB}
    found, own = of_other_shapes(plan(**options)), plan(5, **options)
    assert found.footprint == own.footprint
    assert found.unplanned == own.unplanned
    assert found.budget_nbytes == own.budget_nbytes
    assert found.footprint.reserve_nbytes == 3 * MIB
    assert found.optimizer_nbytes > 0


def test_what_the_module_names_is_counted_instead() -> None:
    given = plan(**COUNTED, realisation="packed", budget=64 * MIB)
    found = of_other_shapes(given, reserve=MIB, optimizer="adam").footprint
    options = COUNTED | {"reserve": MIB, "optimizer": "adam"}
    own = plan(5, **options, realisation="packed", budget=64 * MIB).footprint
    assert found == own
    assert found.optimizer_nbytes > given.optimizer_nbytes


@pytest.mark.parametrize("budget", ["8MiB", "90%"])
def test_the_budget_that_the_module_names_stays(budget: str) -> None:
    given = plan(realisation="packed", ctx=mx.cpu(), budget="80%")
    found = of_other_shapes(given, budget=budget)
    share = int(0.9 * given.unplanned.total_nbytes)
    assert found.budget_nbytes == (share if budget == "90%" else 8 * MIB)


@pytest.mark.parametrize("budget", [None, "70%", 0.7])
@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_a_given_plan_that_counts_no_workspace_leaves_room_for_smaller_batches(
    realisation: str, budget: str | float | None
) -> None:
    """Be the budget its own, or a share of the step of which it counts none."""
    given = plan(realisation=realisation, budget=0.7)
    assert given.workspace_nbytes == 0
    found = of_other_shapes(given, size=7, budget=budget)
    assert found.footprint.workspace_source == given.footprint.workspace_source
    assert found.total_nbytes <= found.budget_nbytes == given.budget_nbytes


def test_a_given_plan_that_was_measured_to_take_less_lowers_no_estimate() -> None:
    given = plan(realisation="packed", ctx=mx.cpu(), budget=64 * MIB)
    less = dataclasses.replace(given.footprint, workspace_nbytes=given.workspace_nbytes // 8)
    found = of_other_shapes(dataclasses.replace(given, footprint=less))
    own = plan(5, realisation="packed", ctx=mx.cpu(), budget=64 * MIB)
    assert found.workspace_nbytes == own.workspace_nbytes > less.workspace_nbytes


def test_a_budget_of_the_module_is_for_workspace_too() -> None:
    given = plan(realisation="packed", budget=0.7)
    assert of_other_shapes(given, budget=64 * MIB).workspace_nbytes > 0


def test_a_module_beside_one_with_a_given_plan_counts_the_same() -> None:
    given = plan(**COUNTED, realisation="packed", budget=64 * MIB)
    first = planned(NETWORK[0], strategy="evict", plan=given, realisation="packed")
    second = planned(NETWORK[0], strategy="evict", realisation="packed")
    data, other = batches(NETWORK, 8), batches(NETWORK, 5)
    first.bind(data.provide_data, data.provide_label)
    first.init_params()
    second.bind(other.provide_data, other.provide_label, shared_module=first)
    assert second.plan is not None
    assert second.plan.footprint.reserve_nbytes == 3 * MIB


def test_buckets_count_what_the_given_plan_counts() -> None:
    data = Sentences((5, 3))
    options: Any = {"realisation": "packed", "strategy": "store_all", "reserve": 3 * MIB}
    shapes = {"data": (BATCH, 5), "softmax_label": (BATCH, 5)}
    given = memplan.plan(network(5)[0], budget=64 * MIB, **options, **shapes)
    module = memplan.mxnet.BucketingModule(
        network, default_bucket_key=5, plan=given, strategy="store_all"
    )
    module.bind(data.provide_data, data.provide_label)
    module.init_params()
    for batch in data:
        module.forward(batch, is_train=True)
    assert module.plans[5] is given
    other = module.plans[3].footprint
    assert other.reserve_nbytes == 3 * MIB
    assert other.workspace_source == given.footprint.workspace_source


@pytest.mark.parametrize("given", ["plan.json", 10**5000], ids=["path", "number"])
def test_only_a_plan_is_given(given: Any) -> None:
    with pytest.raises(ArgumentError, match=r"plan must be one that .* has read, got"):
        memplan.mxnet.Module(layers(), plan=given, label_names=None)
