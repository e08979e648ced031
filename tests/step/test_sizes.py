"""Numbers that a graph refuses: what would wrap, or turn every comparison false."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from helpers.graphs import unit_chain
from memplan.errors import GraphError
from memplan.step.graph import Handover, Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.nbytes import MAX_NBYTES

CHAIN = unit_chain(2)
TOO_MANY = [-1, math.inf, math.nan, 10**400, True, "7", None]


@pytest.mark.parametrize("field", ["seconds", "flops", "traffic_nbytes"])
@pytest.mark.parametrize("value", TOO_MANY)
def test_what_an_op_costs_is_finite(field: str, value: Any) -> None:
    with pytest.raises(GraphError, match=f"op 'x': {field} must be >= 0 and finite"):
        Op("x", "x", (), (), **{field: value})


@pytest.mark.parametrize("value", [math.inf, math.nan, True, 4.0])
def test_a_tensor_has_whole_sizes(value: Any) -> None:
    with pytest.raises(GraphError, match="tensor 'x': nbytes must be an integer >= 0"):
        Tensor("x", value, 1)


HUGE = 10**5000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tensor("x", -HUGE, 1), "nbytes must be an integer >= 0, got an integer of"),
        (lambda: Tensor("x", HUGE, 0), "tensor 'x' has an integer of 16610 bits bytes, but 0"),
        (lambda: dataclasses.replace(CHAIN, fixed_nbytes=HUGE), "holds an integer of 16610 bits"),
        (lambda: dataclasses.replace(CHAIN, nforward=HUGE), "nforward is an integer of"),
        (lambda: dataclasses.replace(CHAIN, heads=(HUGE,)), "head an integer of"),
        (lambda: Op("x", "x", (HUGE, 0.5), ()), "named by integers: a tuple with an integer"),
        (lambda: Op("x", "x", (), (), handovers=(Handover(HUGE, 0, True),)), "a Handover with"),
    ],
)
def test_an_integer_too_long_to_be_written_out_is_refused(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        make()


@pytest.mark.parametrize("field", ["fixed_nbytes", "match_range"])
@pytest.mark.parametrize("value", [-1, math.inf, math.nan, 4.0, True])
def test_what_a_graph_holds_beside_is_whole(field: str, value: Any) -> None:
    with pytest.raises(GraphError, match=f"{field} must be an integer >= 0"):
        dataclasses.replace(CHAIN, **{field: value})


def sized(nbytes: int, nelements: int, fixed_nbytes: int = 0) -> TrainingGraph:
    tensors = [dataclasses.replace(tensor) for tensor in CHAIN.tensors]
    tensors[1] = Tensor("huge", nbytes, nelements)
    return dataclasses.replace(CHAIN, tensors=tuple(tensors), fixed_nbytes=fixed_nbytes)


@pytest.mark.parametrize(
    ("sizes", "offender"),
    [
        ((2**62, 1), "holds .* bytes.*tensor 'huge', 4611686018427387904"),
        ((MAX_NBYTES, 1), "bytes.*tensor 'huge'"),
        ((1, MAX_NBYTES), "elements.*tensor 'huge'"),
        ((1, 1, 2**63), r"bytes.*fixed_nbytes\), 9223372036854775808"),
    ],
)
def test_sums_that_cannot_be_counted_name_their_largest_part(
    sizes: tuple[int, ...], offender: str
) -> None:
    with pytest.raises(GraphError, match=offender):
        sized(*sizes)


def test_the_most_that_can_be_counted() -> None:
    rest = sum(tensor.nbytes for tensor in CHAIN.tensors) - CHAIN.tensors[1].nbytes
    graph = sized(MAX_NBYTES - rest, 1)
    assert simulate(Schedule.unplanned(graph)).peak_nbytes > MAX_NBYTES // 2


def test_seconds_that_add_up_to_infinity_name_the_slowest_op() -> None:
    with pytest.raises(GraphError, match=f"op {CHAIN.ops[1].name!r}, 1.5e\\+308"):
        CHAIN.with_seconds([1e308, 1.5e308, *[0.0] * (len(CHAIN.ops) - 2)])


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_json_that_nests_too_deep_is_no_graph_and_no_schedule(text: str) -> None:
    with pytest.raises(GraphError, match="not a memplan graph: it nests too deep"):
        TrainingGraph.from_json(text)
    with pytest.raises(ValueError, match="not a memplan schedule: it nests too deep"):
        Schedule.from_json(CHAIN, text)


def test_numbers_of_json_that_python_refuses() -> None:
    """Python turns no more than 4300 digits into a number."""
    data = json.loads(CHAIN.to_json())
    text = json.dumps(data).replace('"fixed_nbytes": 0', '"fixed_nbytes": ' + "9" * 5000)
    with pytest.raises(GraphError, match="not a memplan graph"):
        TrainingGraph.from_json(text)
