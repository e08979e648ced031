"""MXNet's generators of random numbers: which of them an operator draws from."""

from __future__ import annotations

import json
from typing import Any

import mxnet as mx
import pytest

from memplan.mxnet.trace.operators import PARALLEL_RANDOM, RANDOM, generator_of

_SHAPE = {"shape": (3,)}
_SIZE = {"size": (3,)}

# What an operator reads, each an array of halves of a shape, and its attributes.
OPERATORS: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "Dropout": (((8,),), {}),
    "_random_uniform": ((), _SHAPE),
    "_random_normal": ((), _SHAPE),
    "_random_gamma_like": (((8,),), {}),
    "_random_randint": ((), {"low": 0, "high": 9, **_SHAPE}),
    "_sample_normal": (((3,), (3,)), _SHAPE),
    "_sample_poisson": (((3,),), _SHAPE),
    "_sample_multinomial": (((2, 2),), {}),
    "_sample_unique_zipfian": ((), {"range_max": 10, "shape": (1, 3)}),
    "_shuffle": (((8,),), {}),
    "_image_random_brightness": (((4, 4, 3),), {"min_factor": 0.1, "max_factor": 0.5}),
    "_image_random_flip_left_right": (((4, 4, 3),), {}),
    "_npi_random_randint": ((), {"low": 0, "high": 9, **_SHAPE}),
    "_npi_uniform": ((), {"low": 0.0, "high": 1.0, **_SIZE}),
    "_npi_normal_n": ((), {"loc": 0.0, "scale": 1.0, **_SIZE}),
    "_npi_bernoulli": ((), {"prob": 0.5, "logit": None, "is_logit": False, **_SIZE}),
    "_npi_choice": ((), {"a": 9, **_SIZE}),
    "_npi_exponential": ((), {"scale": 1.0, **_SIZE}),
    "_npi_gamma": ((), {"shape": 2.0, "scale": 1.0, **_SIZE}),
    "_npi_gumbel": ((), {"loc": 0.0, "scale": 1.0, **_SIZE}),
    "_npi_powerd": ((), {"a": 1.0, **_SIZE}),
    "_npi_multinomial": ((), {"n": 9, "pvals": (0.5, 0.5), **_SIZE}),
}


def drawn_next() -> dict[str, list[float]]:
    """Numbers of each generator."""
    drawn = {
        RANDOM: mx.np.random.uniform(size=(5,)),
        PARALLEL_RANDOM: mx.nd.random.uniform(shape=5),
    }
    return {generator: array.asnumpy().tolist() for generator, array in drawn.items()}


def one_op(op: str, ninputs: int, attrs: dict[str, Any]) -> mx.sym.Symbol:
    """A Symbol of ``op``, which may have an underscore, alone."""
    nodes: list[Any] = [{"op": "null", "name": str(k), "inputs": []} for k in range(ninputs)]
    texts = {name: str(value) for name, value in attrs.items()}
    inputs = [[k, 0, 0] for k in range(ninputs)]
    nodes.append({"op": op, "name": "drawing", "attrs": texts, "inputs": inputs})
    heads, version = [[ninputs, 0, 0]], {"mxnet_version": ["int", 10901]}
    return mx.sym.load_json(
        json.dumps(
            {"nodes": nodes, "heads": heads, "attrs": version, "arg_nodes": [*range(ninputs)]}
        )
    )


@pytest.mark.parametrize("op", OPERATORS)
def test_an_operator_draws_from_one_generator(op: str) -> None:
    shapes, attrs = OPERATORS[op]
    inputs = [mx.nd.full(shape, 0.5) for shape in shapes]
    executor = one_op(op, len(inputs), attrs).bind(mx.cpu(), inputs, grad_req="null")
    mx.random.seed(5)
    expected = drawn_next()
    mx.random.seed(5)
    executor.forward(is_train=True)[0].wait_to_read()
    found = drawn_next()
    assert [each for each in expected if expected[each] != found[each]] == [generator_of(op)]
