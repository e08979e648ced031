"""What a training graph is, what it refuses, and its JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given

from helpers.graphs import UNIT, tensors, training_graphs, unit_chain
from memplan.errors import GraphError
from memplan.step.graph import Handover, Op, Tensor, TrainingGraph

A = Op("a", "first", (), (0,))
B = Op("b", "second", (0,), (1,))


def test_indices() -> None:
    ops = (
        Op("two", "two", (), (1, 0)),
        Op("twice", "twice", (0, 1, 0), (2,)),
        Op("once", "once", (0,), (3,)),
    )
    graph = TrainingGraph(ops, tensors(a=1, b=1, c=1, d=1), heads=(2, 3), nforward=3)
    assert graph.producer == (0, 0, 1, 2)
    assert graph.position == (1, 0, 0, 0)
    assert graph.readers == ((1, 2), (1,), (), ())


def test_seconds() -> None:
    graph = unit_chain(1)
    assert graph.seconds == 3.0
    assert graph.with_seconds([1.0, 0.5, 2.0]).seconds == 3.5
    with pytest.raises(GraphError, match="2 costs for 3 ops"):
        graph.with_seconds([1.0, 2.0])
    with pytest.raises(GraphError, match=r"seconds must be >= 0 and finite, got -2\.0"):
        graph.with_seconds([1.0, -2.0, 1.0])
    with pytest.raises(GraphError, match="too many to count"):
        graph.with_seconds([1e308, 1e308, 1.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", -1, 1), "tensor 'x': nbytes must be an integer >= 0, got -1"),
        (("x", 4, -1), "tensor 'x': nelements must be an integer >= 0, got -1"),
        (("x", 4.0, 1), "tensor 'x': nbytes must be an integer >= 0, got 4.0"),
        (("x", 4, 0), "tensor 'x' has 4 bytes, but 0 elements"),
        (("x", 0, 4), "tensor 'x' has 0 bytes, but 4 elements"),
        ((7, 4, 1), "the name of a tensor must be a string, got 7"),
    ],
)
def test_a_tensor_has_sizes(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(GraphError, match=f"^{message}$"):
        Tensor(*arguments)


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_an_op_takes_time(seconds: float) -> None:
    with pytest.raises(GraphError, match="op 'x': seconds must be >= 0"):
        Op("x", "x", (), (), seconds)


@pytest.mark.parametrize(
    "handover",
    [
        Handover(1, 0, False),
        Handover(0, 1, False),
        Handover(-1, 0, False),
        Handover(0, -1, False),
    ],
)
def test_a_handover_stays_within_its_op(handover: Handover) -> None:
    with pytest.raises(GraphError, match=r"op 'x': Handover\(.*\) points outside the op"):
        Op("x", "x", (0,), (1,), handovers=(handover,))


@pytest.mark.parametrize("handover", [(0, 0, True), 7, None])
def test_a_handover_is_one(handover: Any) -> None:
    with pytest.raises(GraphError, match=r"op 'x': .* must be a Handover of two places and"):
        Op("x", "x", (0,), (1,), handovers=(handover,))


@pytest.mark.parametrize("index", [0.5, True])
@pytest.mark.parametrize("field", ["inputs", "outputs", "after", "differentiates"])
def test_an_op_names_others_by_integers(field: str, index: Any) -> None:
    fields = {"inputs": (), "outputs": ()}
    with pytest.raises(GraphError, match="op 'x': tensors and ops are named by integers"):
        Op("x", "x", **fields | {field: index if field == "differentiates" else (index,)})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("recomputable", "false", "op 'x': recomputable must be true or false, got 'false'"),
        ("recomputable", None, "op 'x': recomputable must be true or false, got None"),
        ("recomputable", 0, "op 'x': recomputable must be true or false, got 0"),
        ("name", 7, "op 7: name must be a string, got 7"),
        ("kind", None, "op 'x': kind must be a string, got None"),
        ("signature", ["s"], r"op 'x': signature must be a string, got \['s'\]"),
        ("mirror_stage", True, "op 'x': mirror_stage must be a string or None, got True"),
        (
            "handovers",
            [[0, 0, "no"]],
            r"op 'x': Handover\(.*\) must be a Handover of two places and true or false",
        ),
        (
            "handovers",
            [[False, 0, True]],
            r"op 'x': Handover\(.*\) must be a Handover of two places and true or false",
        ),
    ],
)
def test_no_field_of_an_op_is_taken_for_another_value(field: str, value: Any, message: str) -> None:
    """A file in JSON may have anything in a field."""
    op = Op("x", "x", (0,), (1,))
    data = json.loads(TrainingGraph((A, op), tensors(one=1, two=1), (1,), 2).to_json())
    data["ops"][1][field] = value
    with pytest.raises(GraphError, match=f"^{message}$"):
        TrainingGraph.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("ops", "heads", "nforward", "message"),
    [
        ((A, B), (1,), 3, "nforward is 3, but there are 2 ops"),
        ((A, B), (1,), -1, "nforward must be an integer >= 0, got -1"),
        ((A, B), (1,), 2.0, r"nforward must be an integer >= 0, got 2\.0"),
        ((A, Op("b", "b", (), (2,))), (0,), 2, "op 'b' writes tensor 2, which does not exist"),
        ((A, Op("b", "b", (), (-1,))), (0,), 2, "op 'b' writes tensor -1, which does not exist"),
        ((A, Op("b", "b", (), (0,))), (0,), 2, "op 'b' writes tensor 'one', as an earlier op did"),
        ((A,), (0,), 1, "tensor 'two' is written by no op"),
        ((B, A), (1,), 2, "op 'b' reads tensor 0 before an op has written it"),
        ((A, Op("b", "b", (7,), (1,))), (1,), 2, "op 'b' reads tensor 7 before"),
        ((A, Op("b", "b", (), (1,), after=(1,))), (1,), 2, "op 'b' must follow op 1, which is not"),
        ((A, Op("b", "b", (), (1,), after=(-1,))), (1,), 2, "op 'b' must follow op -1, which is"),
        (
            (Op("a", "a", (), (0,), differentiates=1), B),
            (1,),
            2,
            "op 'a' must follow op 1, which is not before it",
        ),
        ((A, B), (2,), 2, "head 2 is no tensor of the graph"),
        ((A, B), (1.0,), 2, r"head 1\.0 is no tensor of the graph"),
        ((A, B), (True,), 2, "head True is no tensor of the graph"),
    ],
)
def test_refused(ops: tuple[Op, ...], heads: tuple[int, ...], nforward: int, message: str) -> None:
    with pytest.raises(GraphError, match=f"^{message}"):
        TrainingGraph(ops, tensors(one=1, two=1), heads, nforward)


@pytest.mark.parametrize("two", [Tensor("two", 8, 2), Tensor("two", 2, 1)])
def test_a_handover_joins_equal_sizes(two: Tensor) -> None:
    ops = (A, Op("b", "b", (0,), (1,), handovers=(Handover(0, 0, False),)))
    message = "op 'b' hands over 'one' to 'two', which differ in size"
    with pytest.raises(GraphError, match=message):
        TrainingGraph(ops, (Tensor("one", UNIT, 1), two), (1,), 2)


def test_a_handover_may_name_a_tensor_without_bytes() -> None:
    ops = (A, Op("b", "b", (0,), (1,), handovers=(Handover(0, 0, False),)))
    graph = TrainingGraph(ops, tensors(one=1, none=0), heads=(1,), nforward=2)
    assert graph.tensors[1].nbytes == 0


@given(training_graphs())
def test_json_round_trip(graph: TrainingGraph) -> None:
    assert TrainingGraph.from_json(graph.to_json()) == graph


def test_json_keeps_every_field() -> None:
    op = Op(
        "x",
        "kind",
        (0,),
        (1,),
        seconds=1.5,
        recomputable=False,
        differentiates=0,
        after=(0,),
        handovers=(Handover(0, 0, True),),
        flops=7,
        traffic_nbytes=8,
        signature="s",
        mirror_stage="True",
    )
    graph = TrainingGraph((A, op), tensors(one=3, two=3), (1,), 1, 99, 2)
    again = TrainingGraph.from_json(graph.to_json())
    assert again == graph
    assert isinstance(again.ops[1].handovers[0], Handover)


@pytest.mark.parametrize(
    "text",
    [
        "not JSON",
        "[]",
        "{}",
        '{"format": "another/1"}',
        '{"format": "memplan.step.graph/1"}',
        '{"format": "memplan.step.graph/1", "ops": ["x"]}',
        '{"format": "memplan.step.graph/1", "ops": [{"name": "x"}]}',
        '{"format": "memplan.step.graph/1", "ops": [], "tensors": [{"nam": "x"}]}',
    ],
)
def test_other_text_is_no_graph(text: str) -> None:
    with pytest.raises(GraphError, match="not a memplan graph"):
        TrainingGraph.from_json(text)


def test_an_inconsistent_graph_in_json_says_what_is_wrong() -> None:
    data = json.loads(unit_chain(1).to_json())
    data["tensors"][1]["nbytes"] = -4
    with pytest.raises(GraphError, match=r"^tensor 'loss': nbytes must be"):
        TrainingGraph.from_json(json.dumps(data))


def test_networkx() -> None:
    graph = unit_chain(2).to_networkx()
    assert sorted(graph.edges) == [(0, 1), (0, 4), (1, 2), (1, 3), (2, 3), (3, 4)]
    assert graph.nodes[2]["name"] == "loss"
    assert graph.nodes[4]["differentiates"] == 0
