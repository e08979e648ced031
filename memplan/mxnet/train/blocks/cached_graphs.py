"""MXNet's graph of a hybridized block: what a planned block trains by, as the block itself does.

MXNet makes it in the first call, of training or of inference, and runs it from then on in both,
whatever hybrid_forward would write now: blocks ask which mode they are in, draw numbers of Python's
and are edited. So a hybridized block has no graph yet, one that MXNet has made in a call of the
script's, or one that MXNet has made for a step (``_MADE``). A planned block trains by any, a
TrainStep by the last kind alone: others may be of inference.

While a thread composes a network (:meth:`KeptGraphs.in_network`), a call of a hybridized block is

- none of its own graph, where another thread makes it, or the graph of another block that runs:
  ``forward`` is the usual one, with arrays, or writes ops into that other graph;
- else a call of the graph that it has, if a step is to train by that: that is written out;
- else a call of the graph that MXNet would make: its ``hybrid_forward`` is run, as for that.

:class:`memplan.mxnet.train.blocks.lists_of_graphs.GraphCalls` tells the first from the others.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import mxnet as mx
from mxnet.gluon.block import _flatten, _regroup

from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.nnvm import VARIABLE, output_of
from memplan.mxnet.trace.operators import LOOP
from memplan.mxnet.train.arrays.nesting import alike, leaves, of_semantics
from memplan.mxnet.train.blocks.hybridized import is_graph, with_children
from memplan.mxnet.train.blocks.kept_by_cells import has_cells
from memplan.mxnet.train.blocks.lists_of_graphs import GraphCalls, OfGraph, as_graph
from memplan.mxnet.train.blocks.named_parameters import named_parameters
from memplan.mxnet.train.blocks.refused_symbols import is_scripts_own

Block = Any
Parameter = Any

# Gives what is around a call of a block.
Around = Callable[[Block], AbstractContextManager[None]]

# The name of a variable that is none of a graph's.
_LAST = "memplan_last"

#: The last graph of each block that a step has made. MXNet has one, whichever step trains by it.
_MADE: WeakKeyDictionary[Block, Any] = WeakKeyDictionary()

# Graphs with a Custom op must not outlive MXNet's functions that free it, in Python's last
# collection: the process would end in a segmentation fault.
atexit.register(_MADE.clear)


def make_graph(block: Block, args: tuple[Any, ...], ctx: mx.Context) -> None:
    """Have MXNet make its graph, as a call with ``args`` would, unless there is one.

    It hands the graph to whatever saves the network: ``export``, and the CheckpointHandler of its
    Estimator. Where it cannot be made there is none, and what the step does instead says why.
    An error of a class of the script's own is raised, as MXNet's call raises it.
    """
    if not block._active or block._cached_op is not None:
        return
    try:
        with ctx:
            block._build_cache(*args)
        _MADE[block] = block._cached_graph
    except Exception as error:  # the user's code raises whatever it likes
        block._clear_cached_op()
        if is_scripts_own(error):
            raise


def has_graph(block: Block, inputs: Any) -> bool:
    """Is there a graph of planned ``block`` for inputs that are nested so, which a step can train?

    One that was partitioned for inference has ops without gradients, and a ``forward`` of the
    user's calls the graph with what it has made of these inputs.
    """
    is_made = block._active and block._cached_graph and not block._backend
    if not is_made or block._memplan_unplanned.forward is not mx.gluon.HybridBlock.forward:
        return False
    return _takes(block, inputs)


def may_read_trained(block: Block, inputs: Any) -> bool:
    """May planned ``block`` read a parameter that is trained, as far as its graph tells?"""
    if block._cached_op is None or not has_graph(block, inputs):
        return True
    read = (parameter for is_input, parameter in block._cached_op_args if not is_input)
    return any(parameter.grad_req != "null" for parameter in read)


def _takes(block: Block, inputs: Any) -> bool:
    """Is the graph of ``block`` for inputs that are nested so?"""
    return _without_defaults(_flatten(inputs, "input")[1]) == _without_defaults(block._in_format)


def _without_defaults(form: list[Any]) -> list[Any]:
    """A ``form`` of inputs, without those at its end that are None, which MXNet leaves out."""
    while form and form[-1] == -1:
        form = form[:-1]
    return form


def outputs_of_graph(block: Block, *inputs: Any) -> Any:
    """What the graph of ``block`` computes of these Symbols, nested as the block returns it."""
    variables, graph = block._cached_graph
    given = zip(variables, leaves(inputs), strict=True)
    inputs_of = {variable.name: symbol for variable, symbol in given}
    data = symbol_json.parse(graph)
    for node in data["nodes"]:
        if node["op"] == VARIABLE and node["name"] in inputs_of:
            symbol = inputs_of[node["name"]]
            node["name"], node["attrs"] = symbol.name, symbol.list_attr()
    return _nested(block, symbol_json.load(data))


def _nested(block: Block, outputs: mx.sym.Symbol) -> Any:
    """The first of these ``outputs``, as many as ``block`` returns, nested as it does."""
    count = len(outputs.list_outputs())
    return _regroup([of_semantics(output_of(outputs, k)) for k in range(count)], block._out_format)


class KeptGraphs:
    """MXNet's graphs of hybridized blocks, which a step trains as MXNet does, and makes.

    A planned block trains whatever graph there is. A TrainStep trains what blocks compute in
    training: graphs that a step has made, and none that may be of inference.
    """

    def __init__(self) -> None:
        #: Is it a step of a planned block, which has been called when the step begins?
        self.of_calls = False

    def is_kept(self, root: Block) -> bool:
        """Does a step of a block that holds hybridized ``root``, or is it, train its graph?

        A block with recurrent cells is left to itself: its cells begin anew.
        """
        if not _calls(root, mx.gluon.HybridBlock.forward) or root._backend or has_cells(root):
            return False
        graph = root._cached_graph
        return self.of_calls or not graph or _MADE.get(root) is graph

    @contextmanager
    def in_network(
        self,
        calls: Callable[[], AbstractContextManager[Around]],
        blocks: Sequence[Block],
        params: Mapping[str, Parameter],
        of_graph: OfGraph,
        *,
        are_made: bool,
    ) -> Iterator[None]:
        """Within, the first of ``blocks`` computes what MXNet's graphs of it, or in it, do.

        The others are losses, of which no step has graphs. Within ``calls`` all are called; it
        gives what is around a call of a hybridized block, of a loss, too, that is in no graph of
        another one. There ``of_graph`` computes what MXNet has a graph for.
        ``params`` are those of the blocks, by name. Graphs that MXNet does not have yet
        ``are_made`` where a step runs, as MXNet makes them in the first call.
        """
        kept = {b for b in filter(is_graph, with_children(blocks[:1])) if self.is_kept(b)}
        if self.of_calls and not blocks[0]._cached_graph:
            kept.discard(blocks[0])  # its call has just tried to make one
        # A script may call layers of a hybridized block by themselves, and have a child twice.
        called = list(dict.fromkeys(filter(is_graph, with_children(blocks))))
        graph_calls = GraphCalls(of_graph)
        with calls() as around:
            # What blocks have when ``calls`` ends stays, so theirs are back by then.
            before = [{n: f for n, f in vars(b).items() if n == "forward"} for b in called]
            try:
                for block in called:
                    usual = by_graph = block.forward
                    if block in kept:
                        forward = functools.partial(self._forward, block, params, are_made)
                        by_graph = functools.partial(of_graph, block, forward)
                    elif isinstance(block, mx.gluon.SymbolBlock):
                        by_graph = functools.partial(of_graph, block, self._forward_of(block))
                    given = functools.partial(_alone, block, around, graph_calls)
                    block.__dict__["forward"] = _Outermost(by_graph, usual, given, graph_calls)
                yield
            finally:
                for block, own in zip(called, before, strict=True):
                    block.__dict__.pop("forward", None)
                    block.__dict__.update(own)

    def _forward_of(self, block: mx.gluon.SymbolBlock) -> Callable[..., Any]:
        """What computes a SymbolBlock of Symbols: its graph, unless a script has another forward.

        MXNet's own takes a graph of mx.np with one output for a list of outputs, and fails.
        """
        if not _calls(block, mx.gluon.SymbolBlock.forward):
            return cast(Callable[..., Any], block.forward)
        return functools.partial(self._forward, block, {}, False)

    def _forward(
        self, root: Block, params: Mapping[str, Parameter], is_made: bool, *args: Any
    ) -> Any:
        """What ``root`` computes of Symbols, by its graph.

        What MXNet calls the graph with is made when the parameters are initialised.
        """
        if is_made and not root._cached_graph:
            with _out_of_scopes():
                _MADE[root] = root._get_graph(*_stand_ins(args))
        if not root._cached_graph or not _takes(root, args):
            return type(root).forward(root, *args)
        variables, graph = root._cached_graph
        names = graph.list_inputs()
        known = {**params, **named_parameters(root)}  # the block may have others of these names
        read = {name: known[name].var() for name in names if name in params}
        _declare_shapes(read, known, graph)
        given = zip(variables, leaves(args), strict=True)
        # The graph has no variable for an input that the block ignores.
        given_of = {variable.name: symbol for variable, symbol in given if variable.name in names}
        # MXNet replaces a variable that is an output, unless no other node is one.
        outputs = mx.sym.Group([_in_loop(graph.as_nd_ndarray()), mx.sym.Variable(_LAST)])
        return _nested(root, outputs(**read | given_of))


def _declare_shapes(
    read: Mapping[str, Any], params: Mapping[str, Parameter], graph: mx.sym.Symbol
) -> None:
    """Let the variables in ``read`` have the shapes of those of ``graph``.

    Those of ``params`` without a shape: a SymbolBlock gives them one in its first call.
    """
    unknown = [name for name in read if params[name].shape is None]
    attributes = graph.attr_dict() if unknown else {}
    for name in unknown:
        if "__shape__" in attributes.get(name, {}):
            read[name]._set_attr(__shape__=attributes[name]["__shape__"])


def _calls(block: Block, forward: Callable[..., Any]) -> bool:
    """Is this ``forward`` of MXNet's what a call of ``block`` runs?"""
    own = vars(block).get("forward")
    is_replaced = own is not None and not isinstance(own, _Outermost)
    kind = getattr(block, "_memplan_unplanned", type(block))
    return kind.forward is forward and not is_replaced


@contextmanager
def _alone(block: Block, around: Around, calls: GraphCalls) -> Iterator[None]:
    """What is around a call of hybridized ``block`` by itself."""
    # The first may give it the hybrid_forward of which its graph was made.
    with around(block), as_graph(block, calls):
        yield


@dataclass(frozen=True)
class _Outermost:
    """The ``forward`` of a hybridized block, ``by_graph``, unless a block that has one calls it.

    MXNet runs the ``usual`` one then, which writes the ops of the block into the graph of that
    other block. Another thread runs that, too.

    It is no function, so that it is not taken for one that a script gave the block.
    """

    by_graph: Callable[..., Any]
    usual: Callable[..., Any]
    around: Callable[[], AbstractContextManager[None]]
    calls: GraphCalls

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self.calls.are_next():
            return self.usual(*args, **options)
        with self.around():
            return self.by_graph(*args, **options)


@contextmanager
def _out_of_scopes() -> Iterator[None]:
    """Within, ops get no attributes of the loops around, of which a graph that is kept has none."""
    current = mx.AttrScope._current
    scope, current.value = current.value, mx.AttrScope()
    try:
        yield
    finally:
        current.value = scope


def _in_loop(graph: mx.sym.Symbol) -> mx.sym.Symbol:
    """``graph``, but its ops with the mark of the loop whose body calls it, if one does.

    MXNet cuts a body out of all that is without.
    """
    scope = getattr(mx.AttrScope._current, "value", None)
    mark = {} if scope is None else {k: v for k, v in scope._attr.items() if k == LOOP}
    if not mark:
        return graph
    data = symbol_json.parse(graph)
    for node in data["nodes"]:
        if node["op"] != VARIABLE:
            node["attrs"] = node.get("attrs", {}) | mark
    return symbol_json.load(data)


def _stand_ins(args: tuple[Any, ...]) -> Any:
    """For Symbols of mx.np arrays, of which MXNet sees that its graph is to be of mx.np."""
    return alike(lambda _: mx.np.zeros(()), args) if mx.util.is_np_array() else args
