"""What planning leaves in a process that goes on to train: no more than it trains by."""

from __future__ import annotations

import gc
from itertools import chain
from typing import Any

import mxnet as mx
import pytest

import memplan
from helpers.graphs import unit_chain
from memplan.memory.memory import Packed
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.nnvm import Node, depth_first
from memplan.planning import job as jobs
from memplan.planning import known
from memplan.planning.messages import GRAPH, pickled, unpickled
from memplan.step.graph import Op
from memplan.step.schedule import Schedule


def plan_of(network: Any, **options: Any) -> memplan.Plan:
    net, shapes = network
    return memplan.plan(net, strategy="store_all", **options, **shapes)


def nparts() -> int:
    """How many nodes of traces there are, and ops of graphs."""
    return sum(type(each) in (Node, Op) for each in gc.get_objects())


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_the_trace_of_the_unplanned_step_is_gone_before_the_next_is_made(
    realisation: str, network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one lies where it was; nobody looks for garbage in the meantime."""
    gc.collect()
    trace_by, before, more = jobs.trace_by, nparts(), list[int]()

    def counting(*arguments: Any, **options: Any) -> Any:
        more.append(nparts() - before)
        return trace_by(*arguments, **options)

    monkeypatch.setattr(jobs, "trace_by", counting)
    plan = plan_of(network, realisation=realisation)
    assert more == [0, 0]
    assert nparts() - before >= len(plan.trace.nodes)


@pytest.mark.parametrize("realisation", ["mirror", "explicit", "packed"])
def test_a_symbol_is_made_when_it_is_asked_for(realisation: str, network: Any) -> None:
    plan = plan_of(network, realisation=realisation)
    assert "symbol" not in vars(plan)
    assert plan.symbol.list_outputs()[0] == network[0].list_outputs()[0]
    assert plan.symbol is plan.symbol


def test_a_plan_has_one_graph_and_equal_nodes_share_what_is_inferred(network: Any) -> None:
    plan = plan_of(network)
    assert plan.trace.graph is plan.schedule.graph
    infos = [node.infos for node in plan.trace.nodes]
    assert len(set(map(id, infos))) == len(set(infos)) < len(infos)


def test_a_plan_has_equal_names_attributes_and_numbers_once() -> None:
    """They took nearly two megabytes in a step of 3,500 ops."""
    out = mx.sym.Variable("data")
    for _ in range(90):
        out = mx.sym.Activation(mx.sym.FullyConnected(out, num_hidden=4), act_type="tanh")
    net = mx.sym.make_loss(out.sum(), name="loss")
    plan = plan_of((net, {"data": (2, 4)}))
    trace, graph = plan.trace, plan.schedule.graph
    arguments = [*trace.shapes, *trace.dtypes, *trace.grad_req]
    names = [*(node.name for node in depth_first(trace.heads) if node.is_variable), *arguments]
    assert len(set(map(id, names))) == len(set(names)) < len(names)
    attributes = [node.attrs for node in trace.nodes]
    contents = {tuple(each.items()) for each in attributes}
    assert len(set(map(id, attributes))) == len(contents) < len(attributes)
    numbers = [number for op in graph.ops for number in (*op.inputs, *op.outputs) if number > 256]
    assert len(set(map(id, numbers))) == len(set(numbers)) < len(numbers)


def test_what_is_known_of_a_graph_holds_no_part_of_it(network: Any) -> None:
    plan_of(network)
    assert [type(key) for key in known._KNOWN] == [str]


def test_equal_numbers_of_a_plan_that_a_child_made_are_one_object() -> None:
    graph = unit_chain(400)
    schedule = Schedule.unplanned(graph)
    whole = (schedule, Packed().packing(schedule))
    schedule, packing = unpickled(pickled(whole, {GRAPH: graph}), {GRAPH: graph})
    assert (schedule, packing) == whole
    tensors = chain.from_iterable(op.outputs for op in graph.ops)
    for numbers in (
        [*tensors, *schedule.ops, *chain(*schedule.reads)],
        [*packing.offsets.values()],
    ):
        large = [number for number in numbers if number > 256]  # of others Python has one each
        assert len(set(map(id, large))) == len(set(large)) < len(large)


def test_mxnet_keeps_no_long_text_of_a_network(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the one that it wrote last: a megabyte of a network of 2,000 ops."""
    lengths, write = list[int](), mx.sym.Symbol.tojson

    def noted(symbol: mx.sym.Symbol, **options: Any) -> str:
        lengths.append(len(text := write(symbol, **options)))
        return text

    monkeypatch.setattr(mx.sym.Symbol, "tojson", noted)
    text = symbol_json.text_of(network[0])
    assert lengths[0] == len(text) > 2000
    assert lengths[-1] < 500


def test_an_op_has_no_mapping_of_its_own(network: Any) -> None:
    """In a step of 3,500 ops they took a third of a megabyte."""
    ops = plan_of(network).schedule.graph.ops
    assert not any(hasattr(op, "__dict__") for op in (*ops, ops[0].taking(1.0)))
