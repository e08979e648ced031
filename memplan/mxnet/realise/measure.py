"""What MXNet itself will allocate for a network: the last word on every plan."""

from __future__ import annotations

import mxnet as mx
from mxnet.base import MXNetError

from memplan.mxnet.realise.bind import bind_as_it_stands
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.environment import match_range as under
from memplan.mxnet.trace.nnvm import depth_first
from memplan.mxnet.trace.probe import allocated_mib

CONTEXT = mx.cpu(0)


def executor_description(
    symbol: mx.sym.Symbol, trace: Trace, match_range: int | None = None
) -> str:
    """MXNet's description of ``symbol`` (the traced network, flagged or not) bound to train.

    ``match_range`` is NNVM_EXEC_MATCH_RANGE for this bind (None: as the process has set it).
    Nothing is computed, and the arrays it is bound to are never touched.
    """
    with under(match_range):
        if trace.realisation != "mirror":
            return _explicit_description(symbol, trace)
        return _stock_description(symbol, trace)


def _stock_description(symbol: mx.sym.Symbol, trace: Trace) -> str:
    """That of a network whose gradients MXNet derives."""
    arguments = symbol.list_arguments()

    def arrays(names: list[str]) -> dict[str, mx.nd.NDArray]:
        return {n: mx.nd.empty(trace.shapes[n], CONTEXT, trace.dtypes[n]) for n in names}

    requests = dict(trace.grad_req)
    try:
        executor = symbol.bind(
            CONTEXT,
            arrays(arguments),
            args_grad=arrays([n for n in arguments if requests[n] != "null"]),
            grad_req=requests,
            aux_states=arrays(symbol.list_auxiliary_states()),
        )
    except MXNetError:
        # Sparse arguments or gradients: only MXNet knows which, and makes (and fills) them itself.
        executor = symbol.simple_bind(
            CONTEXT, grad_req=requests, type_dict=dict(trace.dtypes), **trace.shapes
        )
    return executor.debug_str()


def _explicit_description(symbol: mx.sym.Symbol, trace: Trace) -> str:
    """That of a training symbol, whose gradients are outputs."""
    shapes, dtypes = dict(trace.shapes), dict(trace.dtypes)
    for node in depth_first(trace.heads):
        info = node.infos.outputs[0] if node.is_variable else None
        if info is not None:
            shapes[node.name], dtypes[node.name] = info.shape, info.dtype
    names = (*symbol.list_arguments(), *symbol.list_auxiliary_states())
    arrays = {name: mx.nd.empty(shapes[name], CONTEXT, dtypes[name]) for name in names}
    return bind_as_it_stands(symbol, CONTEXT, arrays, arrays).debug_str()


def reported_mib(symbol: mx.sym.Symbol, trace: Trace, match_range: int | None = None) -> int:
    """Whole MiB that MXNet says it allocates for activations (4 bytes for any element).

    ``match_range`` is that of :func:`executor_description`.
    """
    return allocated_mib(executor_description(symbol, trace, match_range))
