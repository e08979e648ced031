"""What MXNet itself will allocate for a network: the last word on every plan."""

from __future__ import annotations

import mxnet as mx

from memplan.mxnet.probe import allocated_mib
from memplan.mxnet.trace import Trace

CONTEXT = mx.cpu(0)


def executor_description(symbol: mx.sym.Symbol, trace: Trace) -> str:
    """MXNet's description of ``symbol`` (the traced network, flagged or not) bound to train.

    Nothing is computed, and the arrays it is bound to are never touched.
    """
    arguments = symbol.list_arguments()

    def arrays(names: list[str]) -> dict[str, mx.nd.NDArray]:
        return {n: mx.nd.empty(trace.shapes[n], CONTEXT, trace.dtypes[n]) for n in names}

    executor = symbol.bind(
        CONTEXT,
        arrays(arguments),
        args_grad=arrays([n for n in arguments if trace.grad_req[n] != "null"]),
        grad_req=dict(trace.grad_req),
        aux_states=arrays(symbol.list_auxiliary_states()),
    )
    return executor.debug_str()


def reported_mib(symbol: mx.sym.Symbol, trace: Trace) -> int:
    """Whole MiB that MXNet says it allocates for activations (4 bytes for any element)."""
    return allocated_mib(executor_description(symbol, trace))
