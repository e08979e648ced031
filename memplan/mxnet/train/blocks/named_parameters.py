"""The parameters of a block by their names, by which a plan tells them apart."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError
from memplan.mxnet.train.arrays.nesting import of_semantics
from memplan.mxnet.train.arrays.parameters import every_parameter, own_parameters
from memplan.mxnet.train.blocks.composing_thread import called_in_it
from memplan.mxnet.train.blocks.read_by import is_mxnets

Parameter = Any

# How the names of variables begin that stand for parameters with the names of others.
_OTHER = "memplan_other"


def named_parameters(block: mx.gluon.Block) -> dict[str, Parameter]:
    """Those of ``block`` and of all that is in it; ArgumentError for two of one name.

    A ``collect_params`` of the user's may leave some out that the block reads, as frozen ones. It
    may leave out others of the names that it has, as those of an averaged copy of the network:
    these are left out here, too, and :func:`refuse_read` sees that no network reads them.
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
def telling_others_apart(
    blocks: Iterable[mx.gluon.Block], parameters: Mapping[str, Parameter]
) -> Iterator[dict[str, str]]:
    """Within it others of the same names in ``blocks`` have variables of other names here.

    A step would take for them those that are given here by their names. It gives the names by those
    of the variables, for :func:`refuse_read`: whatever ``hybrid_forward`` gets it need not read.
    """
    parts: list[mx.gluon.Block] = []
    for block in blocks:
        block.apply(parts.append)
    names: dict[str, str] = {}
    replaced: dict[Any, tuple[str, Callable[..., Any]]] = {}
    for part in parts:
        others = [p for p in own_parameters(part) if parameters.get(p.name, p) is not p]
        for other in others:
            variable = f"{_OTHER}{len(names)}"
            names[variable] = other.name
            replaced[other] = "var", functools.partial(_variable, variable, other)
        if others and isinstance(part, mx.gluon.SymbolBlock):  # whose graph has their names
            replaced[part] = "forward", functools.partial(_refuse, others[0].name)
    for owner, (method, function) in replaced.items():
        usual = functools.partial(getattr(type(owner), method), owner)
        vars(owner)[method] = called_in_it(function, usual)
    try:
        yield names
    finally:
        for owner, (method, _) in replaced.items():
            del vars(owner)[method]
        _forget_graphs(parts if names else [], names)


def refuse_read(names: Mapping[str, str], symbol: mx.sym.Symbol) -> None:
    """ArgumentError where ``symbol`` reads a parameter that has another's name.

    ``names`` are those that :func:`telling_others_apart` gives.
    """
    for variable in symbol.list_inputs():
        if variable in names:
            _refuse(names[variable])


def _variable(name: str, parameter: Parameter) -> mx.sym.Symbol:
    """A variable for ``parameter``, of this ``name``."""
    return of_semantics(mx.sym.var(name, shape=parameter.shape, dtype=parameter.dtype))


def give_variables(parameters: Iterable[Parameter]) -> None:
    """Give those a variable for which MXNet makes none: it cannot write what initialises them.

    So it is with ``mx.init.Constant`` of a list, or of an array for two parameters, and with
    initializers of a script's that hold arrays. A block that gets arrays trains all the same, and
    a step needs no initializer in the variable.
    """
    for parameter in parameters:
        init = parameter.init
        is_written = init is None or isinstance(init, str) or parameter._var is not None
        if is_written or not is_mxnets(type(parameter).var):
            continue
        try:
            parameter.var()
        except Exception:  # dumps() of an initializer raises whatever it likes
            parameter.init = None
            try:
                parameter.var()
            finally:
                parameter.init = init


def _forget_graphs(parts: Iterable[mx.gluon.Block], names: Collection[str]) -> None:
    """Leave MXNet no graph that reads variables of these ``names``, which it does not know.

    Such a graph was made for a step that is refused.
    """
    for part in parts:
        graph = getattr(part, "_cached_graph", ())
        if graph and not set(names).isdisjoint(graph[1].list_inputs()):
            part._clear_cached_op()


def _refuse(name: str, *_: Any) -> None:
    raise ArgumentError(
        f"two different parameters are both named {name!r}, and a plan tells parameters "
        f"apart by their names; make one of their layers with another prefix, or each of "
        f"them under name_scope() of its block. A deepcopy of a layer has its names: make "
        f"another one in its place, and give that the values by set_data()"
    )
