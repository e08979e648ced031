"""What MXNet itself will allocate for a network: the last word on every plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx
from mxnet.base import MXNetError

from memplan.errors import TraceError
from memplan.memory.blocks import Allocation
from memplan.mxnet.realise.bind import ArraysToBind, bind_as_it_stands, why_unbound
from memplan.mxnet.trace.arguments import infer_arguments, storage_types
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.environment import match_range as under
from memplan.mxnet.trace.flags import check_symbol
from memplan.mxnet.trace.nnvm import shape_is_known
from memplan.mxnet.trace.probe import allocated_mib, description_of
from memplan.mxnet.trace.too_large import check_uninferred

CONTEXT = mx.cpu(0)

_ADVICE = "use realisation='packed'"


def executor_description(
    symbol: mx.sym.Symbol, trace: Trace, match_range: int | None = None
) -> str:
    """MXNet's description of ``symbol`` (the traced network, flagged or not) bound to train.

    ``match_range`` is NNVM_EXEC_MATCH_RANGE for this bind (None: as the process has set it).
    Nothing is computed, and the arrays it is bound to are never touched.
    """
    with under(match_range):
        if trace.form.spells_out_backward:
            return _explicit_description(symbol, trace)
        return _stock_description(symbol, trace.shapes, trace.dtypes, trace.grad_req)


def _stock_description(
    symbol: mx.sym.Symbol,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    grad_req: Mapping[str, str],
) -> str:
    """MXNet's description of a network whose gradients it derives itself."""
    arguments = symbol.list_arguments()

    def arrays(names: list[str]) -> dict[str, mx.nd.NDArray]:
        return {n: mx.nd.empty(shapes[n], CONTEXT, dtypes[n]) for n in names}

    requests = dict(grad_req)
    try:
        return description_of(
            lambda: symbol.bind(
                CONTEXT,
                arrays(arguments),
                args_grad=arrays([n for n in arguments if requests[n] != "null"]),
                grad_req=requests,
                aux_states=arrays(symbol.list_auxiliary_states()),
            )
        )
    except MXNetError:
        # Sparse arguments or gradients: only MXNet knows which, and makes (and fills) them itself.
        types = dict(dtypes)
        try:
            return description_of(
                lambda: symbol.simple_bind(CONTEXT, grad_req=requests, type_dict=types, **shapes)
            )
        except RuntimeError as error:  # what simple_bind makes of an MXNetError
            raise _refusal(symbol, error) from error


def _refusal(symbol: mx.sym.Symbol, error: Exception) -> TraceError:
    """Why ``symbol`` cannot be measured, and what to do if MXNet runs it, but cannot bind it."""
    return TraceError(
        f"MXNet cannot bind the network to train it, which it must to tell what that takes."
        f"{why_unbound(symbol, _ADVICE)} MXNet says: {error}"
    )


def _explicit_description(symbol: mx.sym.Symbol, trace: Trace) -> str:
    """MXNet's description of a training symbol, whose gradients are outputs."""
    shapes, dtypes = dict(trace.shapes), dict(trace.dtypes)
    for node in (*trace.head_grads.values(), *trace.old_gradients.values()):
        info = node.infos.outputs[0]
        if info is not None:
            shapes[node.name], dtypes[node.name] = info.shape, info.dtype
    names = (*symbol.list_arguments(), *symbol.list_auxiliary_states())
    arrays = {name: mx.nd.empty(shapes[name], CONTEXT, dtypes[name]) for name in names}
    to_bind = ArraysToBind(CONTEXT, arrays, arrays)
    try:
        return description_of(lambda: bind_as_it_stands(symbol, to_bind))
    except MXNetError:
        # An op that MXNet has for sparse arrays only, as _square_sum.
        for name, stype in storage_types(symbol).items():
            arrays[name] = mx.nd.zeros(shapes[name], CONTEXT, dtypes[name], stype=stype)
        try:
            return description_of(lambda: bind_as_it_stands(symbol, to_bind))
        except MXNetError as error:
            raise _refusal(symbol, error) from error


def reported_mib(symbol: mx.sym.Symbol, trace: Trace, match_range: int | None = None) -> int:
    """Whole MiB that MXNet says it allocates for activations (4 bytes for any element).

    ``match_range`` is that of :func:`executor_description`.
    """
    return allocated_mib(executor_description(symbol, trace, match_range))


def step_mib(
    symbol: mx.sym.Symbol,
    shapes: Mapping[str, Sequence[int]],
    type_dict: Mapping[str, Any] | None,
) -> int:
    """Whole MiB that MXNet says it allocates to train ``symbol``, by the flags that it carries.

    Every argument has a gradient. Raises what :func:`memplan.get_cost` raises.
    """
    check_symbol(symbol)
    known_shapes, dtypes = infer_arguments(symbol, shapes, type_dict)
    check_uninferred(symbol, known_shapes)
    _check_sizes(symbol, known_shapes)
    requests = dict.fromkeys(symbol.list_arguments(), "write")
    return allocated_mib(_stock_description(symbol, known_shapes, dtypes, requests))


def _check_sizes(symbol: mx.sym.Symbol, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """TraceError for an output of unknown shape, which MXNet leaves out of its total."""
    internals = symbol.get_internals()
    _, shapes_inside, _ = internals.infer_shape_partial(**shapes)
    for name, shape in zip(internals.list_outputs(), shapes_inside, strict=True):
        if not shape_is_known(shape):
            raise TraceError(
                f"the shape of {name!r} is not known before it runs, so its memory cannot be "
                f"counted; leave it out of the training network"
            )


def allocated_nbytes(
    symbol: mx.sym.Symbol, trace: Trace, allocation: Allocation, match_range: int | None = None
) -> int:
    """What MXNet allocates for ``symbol``: the bytes of ``allocation``, or more if MXNet says so.

    ``match_range`` is that of :func:`executor_description`.
    """
    mib = reported_mib(symbol, trace, match_range)
    return allocation.nbytes + max(0, (mib - (allocation.reported_nbytes >> 20)) << 20)
