"""The parameters that blocks have, and which of them are trained, or computed of others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mxnet as mx

Parameter = Any


def own_parameters(block: mx.gluon.Block) -> list[Parameter]:
    """Those of ``block`` itself: where it was made with ``params=``, some are attributes only."""
    return list(dict.fromkeys((*block.params.values(), *block._reg_params.values())))


def every_parameter(block: mx.gluon.Block) -> Iterator[Parameter]:
    """Those of ``block`` and of all that is in it; a shared one comes several times."""
    yield from own_parameters(block)
    for child in block._children.values():
        yield from every_parameter(child)


def is_trained(block: mx.gluon.Block) -> bool:
    """Does any parameter of ``block`` want a gradient?"""
    return any(parameter.grad_req != "null" for parameter in every_parameter(block))


def is_derived(parameter: Parameter) -> bool:
    """Does the block get something computed from ``parameter``, as GluonNLP's dropped weights?

    The class says so, or a script that has replaced ``data`` on the object.
    """
    return type(parameter).data is not mx.gluon.Parameter.data or "data" in vars(parameter)
