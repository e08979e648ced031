"""What a step holds beside activations: optimizers' states and operators' workspaces count."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import mxnet as mx
import pytest

import memplan
from helpers.networks import residual_net
from helpers.planning import NEVER_SECONDS
from memplan.errors import ArgumentError, BudgetError, CostError
from memplan.mxnet.plan_file import load_plan, plan_text
from memplan.mxnet.realise.optimizer_states import states_nbytes
from memplan.mxnet.realise.update_workspace import update_nbytes
from memplan.planning import job_json, least
from memplan.planning.job import Job
from memplan.planning.planner import plan
from memplan.planning.realisation import trace
from memplan.step.costs import CostTable
from memplan.step.mirroring import mirror
from memplan.step.schedule import Schedule
from memplan.strategies.auto import Auto

NET, SHAPES = residual_net(batch=4)
WORKSPACE = 3 << 20
OPTIONS: dict[str, Any] = {
    "realisation": "packed",
    "strategy": "chen_sqrt",
    "time_limit": NEVER_SECONDS,
}


@pytest.fixture(autouse=True)
def _little_time_to_look_for_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least, "SEARCH_SECONDS", 0.2)


@pytest.fixture(scope="module")
def table() -> CostTable:
    """Costs of the network with a workspace, as if measured."""
    graph = trace(NET, shapes=SHAPES, realisation="packed").graph
    stock = trace(NET, shapes=SHAPES).graph
    seconds = {op.signature: 1e-3 for op in (*graph.ops, *stock.ops)}
    return CostTable("cpu(here)", seconds, workspace_nbytes={"packed": WORKSPACE})


@pytest.mark.long
def test_a_measured_workspace_is_in_the_total_and_in_every_budget(table: CostTable) -> None:
    without = plan(NET, costs=dataclasses.replace(table, workspace_nbytes={}), **OPTIONS, **SHAPES)
    made = plan(NET, costs=table, **OPTIONS, **SHAPES)
    assert made.workspace_nbytes == made.unplanned.workspace_nbytes == WORKSPACE
    assert made.footprint.workspace_source == "measured on cpu(here)"
    assert made.allocated_nbytes == without.allocated_nbytes
    assert made.total_nbytes == without.total_nbytes + WORKSPACE
    assert made.unplanned.total_nbytes == without.unplanned.total_nbytes + WORKSPACE
    enough = plan(NET, costs=table, budget=made.total_nbytes, **OPTIONS, **SHAPES)
    assert enough.total_nbytes <= made.total_nbytes
    with pytest.raises(BudgetError, match=r"the workspace of operators 3\.00 MiB") as refused:
        plan(NET, costs=table, budget=WORKSPACE, **OPTIONS, **SHAPES)
    assert refused.value.lowest_nbytes is not None
    assert refused.value.lowest_nbytes > WORKSPACE
    assert "workspace of operators" in str(made)
    assert "workspace of operators: measured on cpu(here)" in str(made)
    assert "workspace of operators" in made.report_html()


def test_without_a_measurement_it_is_estimated_where_a_cpu_is_named() -> None:
    without = plan(NET, **OPTIONS, **SHAPES)
    assert (without.workspace_nbytes, without.footprint.workspace_source) == (0, "not counted")
    made = plan(NET, ctx=mx.cpu(), **OPTIONS, **SHAPES)
    assert made.footprint.workspace_source == "estimated from shapes"
    # The largest op reads two tensors of the largest size and writes a third, or they are copied.
    largest = max(tensor.nbytes for tensor in made.schedule.graph.tensors)
    assert 0 < made.workspace_nbytes <= 16 * largest
    assert made.total_nbytes == without.total_nbytes + made.workspace_nbytes
    for realisation in ("mirror", "explicit"):
        options = OPTIONS | {"realisation": realisation}
        assert plan(NET, **options, **SHAPES).workspace_nbytes == 0
        counted = plan(NET, ctx=mx.cpu(), **options, **SHAPES)
        assert counted.footprint.workspace_source == "estimated from shapes"
        # A mirrored one has what nobody reads in temporary space, too.
        assert counted.unplanned.workspace_nbytes > 0
        assert 0 < counted.workspace_nbytes <= 16 * largest


def _fallback_net() -> mx.sym.Symbol:
    """A network most of whose ops read arrays in oneDNN's layouts, and know none."""
    out = mx.sym.Variable("data")
    for n in range(6):
        out = mx.sym.Convolution(
            out, num_filter=16, kernel=(3, 3), pad=(1, 1), name=f"conv{n}", no_bias=True
        )
        out = mx.sym.sigmoid(mx.sym.relu(out, name=f"relu{n}"), name=f"sigmoid{n}")
    out = mx.sym.FullyConnected(mx.sym.Flatten(out), num_hidden=4)
    return mx.sym.SoftmaxOutput(out, name="softmax")


PICTURES = {"data": (4, 16, 32, 32)}


@pytest.mark.parametrize(("kind", "pictures"), [("relu", 0), ("sigmoid", 1)])
def test_a_mirrored_step_pays_for_the_copies_of_each_run(kind: str, pictures: int) -> None:
    """So many, as seen of processes that train by such flags on larger pictures."""
    job = Job.prepare(_fallback_net(), ctx=mx.cpu(), time_limit=5, **PICTURES)
    assert job.beside.layouts
    everything = Schedule.unplanned(job.graph)
    again = next(i for i, op in enumerate(job.graph.ops) if op.name == f"{kind}3")
    flagged = mirror(job.graph, {again})
    assert list(flagged.recomputed) == [again]
    # A relu whose input is kept writes over it the second time only. A sigmoid is written over what
    # it reads the first time, and copies its input alone the second time.
    nbytes = pictures * 4 * 16 * 32 * 32 * 4
    parts = job.realised(flagged).footprint
    assert parts.workspace_nbytes == job.unplanned.workspace_nbytes + nbytes
    assert job.holds(flagged) == parts.total_nbytes
    assert job.holds(everything) == job.unplanned.total_nbytes
    again_made = job_json.from_json(job_json.to_json(job))
    assert again_made.beside == job.beside


@pytest.mark.long
@pytest.mark.parametrize("realisation", ["mirror", "explicit"])
def test_budgets_hold_with_all_that_an_executor_takes(realisation: str) -> None:
    options: dict[str, Any] = {"realisation": realisation, "time_limit": 5, **PICTURES}
    least = plan(_fallback_net(), ctx=mx.cpu(), **options)
    assert (
        least.total_nbytes == least.allocated_nbytes + least.fixed_nbytes + least.workspace_nbytes
    )
    made = plan(_fallback_net(), ctx=mx.cpu(), budget=least.total_nbytes + 1, **options)
    assert made.total_nbytes <= least.total_nbytes + 1
    with pytest.raises(BudgetError, match="the workspace of operators"):
        plan(_fallback_net(), ctx=mx.cpu(), budget=least.workspace_nbytes, **options)


def test_what_recomputation_adds_counts_in_the_search() -> None:
    """Its blocks would be smaller; but a further run of every op keeps more than it frees."""
    job = Job.prepare(_fallback_net(), ctx=mx.cpu(), time_limit=5, **PICTURES)
    blind = Job.prepare(_fallback_net(), time_limit=5, **PICTURES)
    assert blind.least_by(Auto())[1].allocated_nbytes < job.least_by(Auto())[1].allocated_nbytes
    assert job.holds(job.least_by(Auto())[0]) <= job.holds(blind.least_by(Auto())[0])


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [("sgd", 0), ("adam", 2), (mx.optimizer.create("sgd", momentum=0.9), 1), ("rmsprop", 1)],
)
def test_states_of_the_optimizer_count(optimizer: Any, copies: int) -> None:
    without = plan(NET, **OPTIONS, **SHAPES)
    made = plan(NET, optimizer=optimizer, **OPTIONS, **SHAPES)
    executor = NET.simple_bind(mx.cpu(), grad_req="write", **SHAPES)
    given = {*SHAPES, "softmax_label", "label"}
    weights = sum(4 * a.size for name, a in executor.arg_dict.items() if name not in given)
    assert made.optimizer_nbytes == made.unplanned.optimizer_nbytes == copies * weights
    assert made.total_nbytes == without.total_nbytes + copies * weights


def dense_net(layers: int) -> mx.sym.Symbol:
    """Layers whose parameters are matrices of 64 by 64."""
    net = mx.sym.Variable("data")
    for _ in range(layers):
        net = mx.sym.FullyConnected(net, num_hidden=64, no_bias=True)
    return mx.sym.MakeLoss(net)


@pytest.mark.parametrize(
    ("optimizer", "realisation", "layers", "arrays"),
    [
        ("sgd", "packed", 4, 0),
        ("adam", "updating", 4, 0),
        ("adagrad", "packed", 1, 4),
        ("adagrad", "packed", 4, 18),
        ("adagrad", "mirror", 16, 30),
        ("adadelta", "explicit", 4, 15),
        ("adadelta", "updating", 4, 8),  # three more, for the C library keeps what is freed
        ("sgld", "packed", 1, 4 + 1),  # no more holes than parameters
        ("sgld", "packed", 4, 12 + 3),
        ("lamb", "packed", 3, 12),  # as large as all three, four times
        ("lamb", "updating", 3, 2),
    ],
)
def test_an_update_makes_so_many_arrays(
    optimizer: str, realisation: str, layers: int, arrays: int
) -> None:
    traced = trace(dense_net(layers), shapes={"data": (2, 64)}, realisation=realisation)
    assert update_nbytes(traced, optimizer) == arrays * 4 * 64 * 64


def test_what_the_c_library_keeps_of_updates_within_is_beside_what_it_returns() -> None:
    net = mx.sym.Variable("data")
    for name, width in (("large", 4096), ("small", 1024)):
        net = mx.sym.FullyConnected(net, num_hidden=width, no_bias=True, name=name)
    traced = trace(net, shapes={"data": (2, 2048)}, realisation="updating")
    large, small = 4 * 4096 * 2048, 4 * 4096 * 1024
    assert update_nbytes(traced, "adagrad") == 4 * large + (4 + 1) * small


def test_holes_of_updates_within_are_no_more_than_what_all_parameters_have() -> None:
    """One of them may be larger than all others together, as a table of an embedding."""
    net = mx.sym.Variable("data")
    for width in (512, 64, 64):
        net = mx.sym.FullyConnected(net, num_hidden=width, no_bias=True)
    traced = trace(mx.sym.MakeLoss(net), shapes={"data": (2, 512)}, realisation="updating")
    sizes = [4 * 512 * 512, 4 * 512 * 64, 4 * 64 * 64]
    assert update_nbytes(traced, "adagrad") == 4 * sizes[0] + sum(sizes)


def test_what_an_update_makes_counts_as_workspace() -> None:
    net, options = dense_net(1), OPTIONS | {"data": (2, 64)}
    without = plan(net, ctx=mx.cpu(), **options)
    made = plan(net, ctx=mx.cpu(), optimizer="adagrad", **options)
    assert made.workspace_nbytes == without.workspace_nbytes + 4 * 4 * 64 * 64
    assert made.unplanned.workspace_nbytes >= made.workspace_nbytes
    assert made.total_nbytes == without.total_nbytes + made.optimizer_nbytes + 4 * 4 * 64 * 64
    of_no_device = plan(net, optimizer="adagrad", **options)
    assert of_no_device.workspace_nbytes == 0


def test_an_update_of_the_users_own_is_not_counted() -> None:
    class Derived(mx.optimizer.AdaGrad):
        pass

    class Own(mx.optimizer.AdaGrad):
        def update(self, index: int, weight: Any, grad: Any, state: Any) -> None:
            weight -= grad

    traced = trace(dense_net(1), shapes={"data": (2, 64)}, realisation="packed")
    assert update_nbytes(traced, Derived()) == 4 * 4 * 64 * 64
    assert update_nbytes(traced, Own()) == 0


def test_further_parameters_count_as_the_last_that_were_measured() -> None:
    traced = trace(dense_net(100), shapes={"data": (2, 64)}, realisation="packed")
    assert update_nbytes(traced, "adadelta") == (130 + 36 * (130 - 40) / 48) * 4 * 64 * 64


def test_copies_in_full_precision_count() -> None:
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=100, no_bias=True, name="fc")
    traced = trace(net, shapes={"data": (2, 50)}, type_dict={"data": "float16"})
    assert traced.dtypes["fc_weight"] == "float16"
    optimizers = {
        False: mx.optimizer.create("sgd", momentum=0.9),
        True: mx.optimizer.create("sgd", momentum=0.9, multi_precision=True),
    }
    for precise, nbytes in ((False, 2), (True, 8)):
        assert states_nbytes(traced, optimizers[precise]) == 5000 * nbytes


@pytest.mark.parametrize(
    ("realisation", "arrays"),
    [("updating", 2 + 1), ("packed", 1 + (8 - 1) * 2 / 3), ("mirror", 1 + (8 - 1) * 2 / 3)],
)
def test_gradients_in_full_precision_count_where_mxnet_makes_them_for_an_update(
    realisation: str, arrays: float
) -> None:
    """Within the step those of the largest parameter, else of all: here of three equal ones."""
    net = mx.sym.Variable("data")
    for _ in range(3):
        net = mx.sym.FullyConnected(net, num_hidden=90, no_bias=True)
    options = {"shapes": {"data": (2, 90)}, "realisation": realisation}
    half, full = (
        trace(mx.sym.MakeLoss(net), type_dict={"data": dtype}, **options)
        for dtype in ("float16", "float32")
    )

    def made(name: str, traced: Any = half, *, is_precise: bool = True) -> int:
        return update_nbytes(traced, mx.optimizer.create(name, multi_precision=is_precise))

    for name in ("adam", "rmsprop"):
        assert made(name) == round(arrays * 4 * 90 * 90)
        assert made(name, full) == made(name, is_precise=False) == 0
    assert made("sgd") == made("nag") == 0
    assert made("adagrad") == made("adagrad", full) + made("adam")


@pytest.mark.parametrize("name", ["adam", "nag", "adagrad", "adadelta", "ftrl", "groupadagrad"])
def test_states_are_as_large_as_those_that_mxnet_makes(name: str) -> None:
    traced = trace(NET, shapes=SHAPES)
    optimizer, total = mx.optimizer.create(name), 0
    for place, argument in enumerate(traced.symbol.list_arguments()):
        if traced.grad_req[argument] == "null":
            continue
        if name == "groupadagrad" and len(traced.shapes[argument]) != 2:
            return  # MXNet has it for matrices only
        state = optimizer.create_state(place, mx.nd.zeros(traced.shapes[argument]))
        arrays = state if isinstance(state, tuple) else [state]
        total += sum(4 * array.size for array in arrays if array is not None)
    assert states_nbytes(traced, name) == total


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [("adm", "MXNet has no optimizer 'adm'"), (7, "optimizer must be one of MXNet's")],
)
def test_an_optimizer_that_is_none_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        plan(NET, optimizer=optimizer, **OPTIONS, **SHAPES)


def test_a_table_keeps_its_workspaces(table: CostTable, tmp_path: Path) -> None:
    table.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == table
    with pytest.raises(CostError, match="-1 bytes of workspace for packed"):
        dataclasses.replace(table, workspace_nbytes={"packed": -1})


@pytest.mark.long
def test_a_profile_measures_the_workspace() -> None:
    table = memplan.profile(NET, ctx=mx.cpu(), realisation="packed", repeats=1, warmup=0, **SHAPES)
    # A network of 1 MB: MXNet's code is not counted.
    assert table.workspace_nbytes["packed"] < 32 << 20
    made = plan(NET, ctx=mx.cpu(), costs=table, **OPTIONS, **SHAPES)
    assert made.workspace_nbytes == table.workspace_nbytes["packed"]
    assert made.footprint.workspace_source.startswith("measured on cpu(")


def test_it_goes_with_the_plan_and_with_the_job(table: CostTable, tmp_path: Path) -> None:
    options = {"costs": table, "optimizer": "adam"}
    made = plan(NET, **options, **OPTIONS, **SHAPES)
    (tmp_path / "plan.json").write_text(plan_text(made), encoding="utf-8")
    assert load_plan(tmp_path / "plan.json").footprint == made.footprint
    prepared = Job.prepare(NET, realisation="packed", **options, **SHAPES)
    assert job_json.from_json(job_json.to_json(prepared)).beside == prepared.beside


def test_an_optimizer_that_cannot_update_a_parameter_is_named() -> None:
    net = mx.sym.MakeLoss(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="fc"))
    with pytest.raises(ArgumentError, match="GroupAdaGrad cannot update 'fc_bias'"):
        plan(net, ctx=mx.cpu(), optimizer="groupadagrad", data=(2, 3))
