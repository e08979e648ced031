"""A traced network on random numbers: what a trial or a measurement trains with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from memplan.mxnet.trace.arguments import wanted
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.operators import is_sparse_embedding

Arrays = dict[str, Any]


def bind(traced: Trace, symbol: mx.sym.Symbol, ctx: mx.Context) -> mx.executor.Executor:
    """``symbol``, the traced network or its flagged copy, bound on ``ctx`` to random numbers."""
    arguments, states = random_arrays(traced, ctx)
    return symbol.bind(
        ctx,
        arguments,
        args_grad=zero_gradients(traced, ctx, wanted(traced.grad_req)),
        grad_req=dict(traced.grad_req),
        aux_states=states,
    )


def zero_gradients(traced: Trace, ctx: mx.Context, names: Iterable[str]) -> Arrays:
    """An array on ``ctx`` for the gradient of each of ``names``, row_sparse for sparse embeddings.

    Make only what is kept: MXNet may free an array that is dropped at once after ``waitall``
    returns, and a measurement that begins there would take it for one that stays.
    """
    tables = {node.inputs[1][0].name for node in traced.nodes if is_sparse_embedding(node)}
    kinds = {name: "row_sparse" if name in tables else "default" for name in traced.shapes}
    return {
        name: mx.nd.zeros(traced.shapes[name], ctx, traced.dtypes[name], stype=kinds[name])
        for name in names
    }


def random_arrays(traced: Trace, ctx: mx.Context) -> tuple[Arrays, Arrays]:
    """Arguments and auxiliary states on ``ctx``, filled with the same random numbers each time."""
    random = np.random.default_rng(0)

    def values(names: Sequence[str]) -> Arrays:
        return {
            name: mx.nd.array(_numbers(traced, name, random), ctx, traced.dtypes[name])
            for name in names
        }

    symbol = traced.symbol
    return values(symbol.list_arguments()), values(symbol.list_auxiliary_states())


def _numbers(traced: Trace, name: str, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Numbers on which any network runs at its usual speed.

    From [0, 1), and so 0 as integers, they are valid labels, tokens and indices. Weights are
    scaled by their fan-in: no value in a deep network comes near the slow subnormal ones.
    """
    shape = traced.shapes[name]
    numbers = random.random(shape, np.float32)
    if len(shape) > 1 and traced.grad_req.get(name, "null") != "null":
        numbers -= 0.5
        numbers *= np.float32((24 / np.prod(shape[1:])) ** 0.5)
    return numbers.astype(traced.dtypes[name], copy=False)
