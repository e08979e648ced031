"""What a trace was made of, as plain data, for another process or machine to make it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mxnet as mx

from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.build import Trace, trace
from memplan.mxnet.trace.environment import match_range as under
from memplan.mxnet.trace.form import Form


def request_of(traced: Trace, *, device_type: str) -> dict[str, Any]:
    """All that makes ``traced`` again by :func:`trace_again`, fit for JSON."""
    arguments = traced.symbol.list_arguments()
    return {
        "symbol": symbol_json.text_of(traced.symbol),
        "shapes": {name: traced.shapes[name] for name in arguments},
        "type_dict": {name: traced.dtypes[name] for name in arguments},
        "grad_req": dict(traced.grad_req),
        "realisation": traced.form.name,
        "device_type": device_type,
        "numpy_shapes": traced.numpy_shapes,
    }


def trace_again(request: Mapping[str, Any], *, form: Form, match_range: int) -> Trace:
    """The trace that :func:`request_of` describes, under this NNVM_EXEC_MATCH_RANGE.

    ``form`` is that of its realisation.
    """
    names = ("shapes", "type_dict", "grad_req", "device_type")
    options = {name: request[name] for name in names}
    with _settings(match_range, request["numpy_shapes"]):
        return trace(mx.sym.load_json(request["symbol"]), form=form, **options)


def as_traced(traced: Trace) -> AbstractContextManager[None]:
    """Within, MXNet has the settings that ``traced`` was made under."""
    return _settings(traced.graph.match_range, traced.numpy_shapes)


@contextmanager
def _settings(match_range: int, numpy_shapes: bool) -> Iterator[None]:
    with under(match_range), mx.util.np_shape(numpy_shapes):
        yield
