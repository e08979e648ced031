"""The parameters of a block by their names, by which a plan tells them apart."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError
from memplan.mxnet.train.asked_gradients import every_parameter, own_parameters
from memplan.mxnet.train.composing_thread import called_in_it

Parameter = Any


def named_parameters(block: mx.gluon.Block) -> dict[str, Parameter]:
    """Those of ``block`` and of all that is in it; ArgumentError for two of one name.

    A ``collect_params`` of the user's may leave some out that the block reads, as frozen ones. It
    may leave out others of the names that it has, as those of an averaged copy of the network:
    these are left out here, too, and :func:`refusing_others` sees that no network reads them.
    """
    try:
        parameters = dict(block.collect_params().items())
    except AssertionError:  # MXNet's, for two of one name
        by_name((parameter.name, parameter) for parameter in every_parameter(block))
        raise
    for parameter in every_parameter(block):
        parameters.setdefault(parameter.name, parameter)
    return parameters


def by_name(pairs: Iterable[tuple[str, Parameter]]) -> dict[str, Parameter]:
    """Parameters that are given with their names; ArgumentError for two of one name."""
    parameters: dict[str, Parameter] = {}
    for name, parameter in pairs:
        if parameters.setdefault(name, parameter) is not parameter:
            _refuse(name)
    return parameters


@contextlib.contextmanager
def refusing_others(
    blocks: Iterable[mx.gluon.Block], parameters: Mapping[str, Parameter]
) -> Iterator[None]:
    """Within it ArgumentError where this thread reads others of the same names in ``blocks``.

    A step would take for them those that are given here by their names.
    """
    parts: list[mx.gluon.Block] = []
    for block in blocks:
        block.apply(parts.append)
    read: dict[Any, tuple[str, str]] = {}
    for part in parts:
        others = [p for p in own_parameters(part) if parameters.get(p.name, p) is not p]
        read |= {other: ("var", other.name) for other in others}
        if others and isinstance(part, mx.gluon.SymbolBlock):  # whose graph has their names
            read[part] = "forward", others[0].name
    for owner, (method, name) in read.items():
        usual = functools.partial(getattr(type(owner), method), owner)
        vars(owner)[method] = called_in_it(functools.partial(_refuse, name), usual)
    try:
        yield
    finally:
        for owner, (method, _) in read.items():
            del vars(owner)[method]


def _refuse(name: str, *_: Any) -> None:
    raise ArgumentError(
        f"two different parameters are both named {name!r}, and a plan tells parameters "
        f"apart by their names; make one of their layers with another prefix, or each of "
        f"them under name_scope() of its block. A deepcopy of a layer has its names: make "
        f"another one in its place, and give that the values by set_data()"
    )
