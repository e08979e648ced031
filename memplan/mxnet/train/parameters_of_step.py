"""The parameters that a step of a block trains: initialised, and their contexts and requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError
from memplan.mxnet.train.arrays.parameters import is_derived
from memplan.mxnet.train.blocks.block_network import BlockNetwork
from memplan.util.words import first_of

Parameter = Any


def arguments_of(network: BlockNetwork, params: Mapping[str, Parameter]) -> list[Parameter]:
    """Those of ``params`` that the network reads, and may have gradients of."""
    return [params[name] for name in network.symbol.list_arguments() if name in params]


def contexts_of_params(params: Iterable[Parameter]) -> list[mx.Context]:
    """The contexts of the parameters, initialised or to be; else the current one."""
    for parameter in params:
        if parameter._data is not None or parameter._deferred_init:
            contexts: list[mx.Context] = parameter.list_ctx()
            return contexts
    return [mx.context.current_context()]


def gradient_requests(names: Iterable[str], params: Mapping[str, Parameter]) -> dict[str, str]:
    """What a plan does with the gradients of the arguments with these ``names``.

    Of those that are no ``params`` nothing; autograd adds those of what is derived.
    """

    def request(parameter: Parameter) -> str:
        has_gradient = parameter.grad_req != "null"
        return "write" if has_gradient and is_derived(parameter) else str(parameter.grad_req)

    return {name: request(params[name]) if name in params else "null" for name in names}


def initialised(
    network: BlockNetwork, params: Mapping[str, Parameter], shapes: Mapping[str, tuple[int, ...]]
) -> list[Parameter]:
    """Those that the ``network`` reads, behind deferred initialisation.

    That is done in the order of a hybridized block: the same numbers.
    """
    parameters = [params[name] for name in network.inputs if name in params]
    shapes = {**network.unread, **shapes}
    for parameter in parameters:
        if parameter._deferred_init:
            parameter.shape = shapes[parameter.name]
    for parameter in parameters:
        parameter._finish_deferred_init()
    return [p for p in parameters if p.name not in network.unread]


def check_inferred(unknown: Iterable[str], params: Mapping[str, Parameter]) -> None:
    """ArgumentError where the shapes of ``params`` are among those that are ``unknown``.

    MXNet, too, infers none of a layer in a branch of a hybridized block.
    """
    names = [name for name in unknown if name in params]
    if names:
        raise ArgumentError(
            f"the shape of {first_of(map(repr, names), 8)} cannot be inferred, as in branches of a "
            f"cond: give the layers their in_units, in_channels or input_size, or call the "
            f"block before hybridize(), on batches for which each branch runs"
        )


def place_of(parameter: Parameter, ctx: mx.Context) -> int:
    """Which of the parameter's arrays is on ``ctx``; ArgumentError where none is."""
    if parameter._data is None and not parameter._deferred_init:
        raise ArgumentError(
            f"parameter {parameter.name!r} is not initialized; call block.initialize()"
        )
    contexts = parameter.list_ctx()
    if ctx not in contexts:
        raise ArgumentError(
            f"the batch is on {ctx}, parameter {parameter.name!r} on "
            f"{', '.join(map(str, contexts))}; load the batch there, or call "
            f"block.collect_params().reset_ctx({ctx})"
        )
    return int(contexts.index(ctx))
