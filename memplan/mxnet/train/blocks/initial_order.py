"""The order in which parameters whose shapes were not known are initialised by the first step.

MXNet draws random numbers for them then: for those of a hybridized block in the order of its graph,
for others when the layer is called that has them. So it does for operators that draw some: what a
step cannot do in the order of the calls it warns of.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.operators import (
    FOREACH,
    GENERATORS,
    PARALLEL_RANDOM,
    RANDOM,
    WHILE_LOOP,
    generator_of,
)
from memplan.mxnet.train.arrays.parameters import is_derived
from memplan.mxnet.train.blocks.calls import Call, Ops, symbols_in, with_copies
from memplan.mxnet.train.blocks.composing_thread import called_in_it
from memplan.mxnet.train.blocks.hybridized import call_hybridize, is_graph, is_one_graph
from memplan.mxnet.train.blocks.random_order import draws, noting_symbols, ops_of, other_draws
from memplan.mxnet.train.blocks.scaled_losses import noting_scaled_losses
from memplan.util.words import first_of

# How parameters end that MXNet's initializers fill with ones or zeros.
_CONSTANT = ("bias", "gamma", "beta", "mean", "var")

# MXNet's initializers that draw as mx.np does where that has the arrays, else as mx.nd.
_DRAWING = (mx.init.Uniform, mx.init.Normal, mx.init.Xavier, mx.init.MSRAPrelu)

_SEED = "the same seed gives other numbers than without a plan"

Block = Any
Parameter = Any


class Calls(list[str]):
    """Names, in order: of the operators that a block calls, and of parameters that it reads.

    ``derived`` are the parameters that are computed when they are read, ``waiting`` these, and
    those that are not initialised: of others no reads are noted. ``calls`` are those of operators
    and graphs.
    """

    def __init__(self, params: Mapping[str, Parameter]) -> None:
        super().__init__()
        self.derived = {name for name, p in params.items() if is_derived(p)}
        self.waiting = {n for n, p in params.items() if p._deferred_init or n in self.derived}
        self.calls: list[Call] = []

    def of_graph(
        self, block: Block, compute: Callable[..., Any], /, *inputs: Any, **params: Any
    ) -> Any:
        """What ``compute`` returns for ``inputs``, noted as a call of the graph of ``block``.

        In the first call MXNet initialises all that the graph reads, in the order of the graph, and
        nothing else that code of the script's has read while the graph was made. Variables of
        ``params`` that it gets have just been read.
        """
        nnames, ncalls = len(self), len(self.calls)
        given = {v.name for v in params.values() if isinstance(v, mx.sym.Symbol)}
        while nnames and self[nnames - 1] in given:
            nnames -= 1
        got = symbols_in(inputs)
        outputs, copies = with_copies(compute(*inputs, **params), got)
        made = symbols_in(outputs)
        self.calls[ncalls:] = [Call(got, made, block=block, copies=copies)]
        if self.waiting and made:
            # The graph of a SymbolBlock, and one that MXNet had before, are not noted otherwise.
            before, within = set(self[:nnames]), self[nnames:]
            names = self.waiting.intersection(within) | (self.waiting - before)
            read = [name for name in mx.sym.Group(made).list_inputs() if name in names]
            nodes = symbol_json.parse(mx.sym.Group(made))["nodes"]
            drawn = [node["name"] for node in nodes if draws(node) and node["name"] not in self]
            called = [name for name in within if name not in self.waiting]
            self[nnames:] = [*read, *called, *drawn]
        return outputs


@contextlib.contextmanager
def noting_calls(params: Mapping[str, Parameter]) -> Iterator[Calls]:
    """Within it what this thread calls, and what it reads of ``params``."""
    noted = Calls(params)
    waiting = [params[name] for name in params if name in noted.waiting]
    for parameter in waiting:
        var = functools.partial(type(parameter).var, parameter)
        parameter.var = called_in_it(functools.partial(_noted, parameter, noted), var)
    managers = {kind: kind.get for kind in (mx.name.NameManager, mx.name.Prefix)}
    for kind, get in managers.items():
        kind.get = called_in_it(_noting(kind, get, noted), get)
    try:
        with noting_symbols() as noted.calls, noting_scaled_losses(noted.calls):
            yield noted
    finally:
        for parameter in waiting:
            del parameter.var
        for kind, get in managers.items():
            kind.get = get


def _noting(kind: type, get: Callable[..., str], noted: Calls) -> Callable[..., str]:
    def get_and_note(manager: Any, name: str | None, hint: str) -> str:
        full = get(manager, name, hint)
        if kind is mx.name.Prefix or not isinstance(manager, mx.name.Prefix):
            noted.append(full)
        return full

    return get_and_note


def _noted(parameter: Parameter, noted: list[str]) -> Any:
    noted.append(parameter.name)
    return type(parameter).var(parameter)


def as_initialised(noted: Sequence[str], in_graph: Iterable[str]) -> list[str]:
    """The names ``in_graph``, of which some were ``noted`` as read, in MXNet's order."""
    places = {name: place for place, name in reversed(list(enumerate(noted)))}
    return sorted(in_graph, key=lambda name: places.get(name, len(noted)))


def warn_of_order(
    block: Block,
    noted: Calls,
    symbol: mx.sym.Symbol,
    names: Iterable[str],
    params: Mapping[str, Parameter],
) -> None:
    """Warn where a step draws other numbers than ``block``.

    ``symbol`` is what its calls have made, which draws in the order of a step; ``names`` are those
    of the ``params`` that the step initialises.
    """
    is_hybridized = is_graph(block)  # beside a loss that may not be, or by a ``forward`` of its own
    what, as_mxnet, or_hybridize = f"a planned step of block {block.name!r}", "", ""
    if not is_hybridized:
        what = f"block {block.name!r} is not hybridized, and a planned step"
        as_mxnet = f"; {call_hybridize(block)}, with which MXNet does so, too"
        or_hybridize = f", or {call_hybridize(block)}"
    _warn_of_draws(block, what, noted, symbol)
    nodes = symbol_json.parse(symbol)["nodes"]
    drawn = {node["name"]: generator_of(node["op"]) for node in nodes if draws(node)}
    called = [name for name in noted if name in drawn]
    reads = [name for name in noted if name in noted.derived]
    early = noted.index(called[0]) if called else len(noted)
    if len(set(reads)) < len(reads) or any(name in noted.derived for name in noted[early:]):
        warnings.warn(
            f"{what} computes what it reads of {reads[0]} once, and first: if random numbers are "
            f"drawn for that, {_SEED}{as_mxnet}",
            stacklevel=2,
        )
    early_op = _drawn_before(noted, drawn, {name: params[name] for name in names})
    if early_op is not None:
        warnings.warn(
            f"{what} initialises parameters before random numbers are drawn for {early_op}: "
            f"{_SEED}; call the block on a batch before training{or_hybridize}",
            stacklevel=2,
        )


def _drawn_before(
    noted: Calls, drawn: Mapping[str, str], begun: Mapping[str, Parameter]
) -> str | None:
    """The operator after which a parameter that is ``begun`` gets numbers of the same generator.

    It is the first to draw from that. The operators ``drawn`` have each its generator.
    """
    first: dict[str, str] = {}
    for name in dict.fromkeys(noted):
        if name in drawn:
            first.setdefault(drawn[name], name)
        elif name in begun and not name.endswith(_CONSTANT):
            found = [first[each] for each in _generators(begun[name]) if each in first]
            if found:
                return found[0]
    return None


def _generators(parameter: Parameter) -> Sequence[str]:
    """The generators that initial values of ``parameter`` may come from.

    They are those of the CPU, whatever device it is for.
    """
    initializers = (
        mx.init.create(init) if isinstance(init, str) else init
        for init in (parameter._deferred_init[0], parameter._deferred_init[2])
    )
    if any(type(init) not in _DRAWING for init in initializers):
        return GENERATORS  # a script's may draw as it likes, and Orthogonal does as mx.nd
    return [RANDOM if mx.util.is_np_array() else PARALLEL_RANDOM]


def _warn_of_draws(block: Block, what: str, noted: Calls, symbol: mx.sym.Symbol) -> None:
    order = f"{call_hybridize(block)}, with which MXNet draws in that order, too"
    unused = f"do not compute what is not used, or {call_hybridize(block)}"
    if is_graph(block):
        order = "have block and loss compute, and return, first what is read first"
        unused = "do not compute, or return, what is not read"
    other = other_draws(symbol, noted.calls)
    if other.moved:
        warnings.warn(
            f"{what} draws random numbers in another order, for {_some(other.moved)}: "
            f"{_SEED}; {order}",
            stacklevel=3,
        )
    if other.missing:
        warnings.warn(
            f"{what} draws no random numbers for {_some(other.missing)}, of which it computes "
            f"nothing: {_SEED}; {unused}",
            stacklevel=3,
        )


def _some(names: Iterable[str]) -> str:
    return first_of(dict.fromkeys(names), 1)


def warn_of_pause(
    block: Block, calls: Calls, graph: Mapping[str, Any], trained: Collection[str]
) -> None:
    """Warn of gradients of ``trained`` parameters that ``block`` stops, if it is not hybridized.

    Its ``graph`` knows of no pause, but of BlockGrad.
    """
    paused = [call for call in calls.calls if call.outputs and not call.is_recorded]
    if is_one_graph(block) or not paused:
        return
    made = mx.sym.Group([output for call in paused for output in call.outputs])
    called, _, places_of = ops_of(made, paused)
    unrecorded = {called[place]["name"] for places in places_of for place in places}
    nodes, needed = graph["nodes"], {source for source, *_ in graph["heads"]}
    for place in reversed(range(len(nodes))):
        if place in needed and nodes[place]["op"] != "BlockGrad":
            needed.update(source for source, *_ in nodes[place]["inputs"])
    reached: set[int] = set()
    for place, node in enumerate(nodes):
        reads = not reached.isdisjoint(source for source, *_ in node["inputs"])
        if node["name"] in trained or (reads and place in needed and node["op"] != "BlockGrad"):
            reached.add(place)
    names = (nodes[place]["name"] for place in sorted(reached))
    stopped = next((name for name in names if name in unrecorded), None)
    if stopped is not None:
        warnings.warn(
            f"block {block.name!r} calls {stopped} under autograd.pause(), which stops no gradient "
            f"in a planned step, as in a hybridized block; write F.stop_gradient() for it",
            stacklevel=2,
        )


def warn_of_loops(block: Block, ops: Ops) -> None:
    """Warn of loops among the ``ops`` of ``block`` and its loss where they are in no graph.

    MXNet runs these in Python then, and autograd adds up the gradients of what all iterations read
    behind the last of them. The operator that a graph has for a loop adds them one by one.
    """
    if is_one_graph(block):
        return
    nodes = enumerate(ops.nodes[: ops.nknown])
    loops = [place for place, node in nodes if node["op"] in (FOREACH, WHILE_LOOP)]
    loop = next((ops.nodes[k]["name"] for k in loops if k not in ops.graph_of), None)
    if loop is not None:
        why = "has a forward of its own" if is_graph(block) else "is not hybridized"
        warnings.warn(
            f"block {block.name!r} {why}, and a planned step runs its loop {loop} as "
            f"an operator, which adds up gradients in another order than a loop of Python: the "
            f"last bits may differ; {call_hybridize(block)}, with which MXNet does so, too",
            stacklevel=2,
        )
