"""Whether blocks still compute what they did when they were planned."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import mxnet as mx

from memplan.mxnet.train.blocks.hooks import has_hooks
from memplan.mxnet.train.blocks.hybridized import hybridized, is_graph, with_children
from memplan.mxnet.train.blocks.named_parameters import named_parameters
from memplan.mxnet.train.blocks.read_by import FUNCTIONS, is_mxnets, read_by
from memplan.mxnet.train.blocks.settings import are_set, settings

# What MXNet keeps in every block: names, children, and its graph.
OF_MXNET = frozenset(vars(mx.gluon.HybridBlock(prefix="")))

# The attributes in which a block has its layers and its own parameters.
_REPLACED = ("_children", "_reg_params")

# After so many new plans, in one of so many steps each, a warning says what changes.
MANY, OFTEN = 4, 3

# The attributes of a block, and values of those that are settings.
Values = tuple[dict[str, Any], dict[str, Any]]


def losses_in(loss: Any) -> list[Any]:
    """The losses of a step: of a list or tuple each, and none of None."""
    if loss is None:
        return []
    return list(loss) if isinstance(loss, list | tuple) else [loss]


class BlockChanges:
    """Notices that ``blocks`` and a ``loss`` may compute something else than before.

    MXNet forgets its graph of a hybridized block when hybridize() is called, a layer is added or
    replaced, or a dtype is cast. A block that is not hybridized reads its attributes at every call,
    a hybridized one at its first, whatever the shapes of later ones; and hybrid_forward, or a
    function that is an attribute, as that of a HybridLambda, what they close over and what is
    global. A step takes the graph of a hybridized block of which ``is_kept`` says so.
    """

    def __init__(self, blocks: Sequence[Any], loss: Any, is_kept: Callable[[Any], bool]) -> None:
        self._blocks, self._is_kept = blocks, is_kept
        self._losses = [fn for fn in losses_in(loss) if not isinstance(fn, mx.gluon.Block)]
        # Of every hybridized block that has run, what its graph is called with, and the attributes
        # of which the graph was made.
        self._graphs_of: dict[Any, tuple[Any, list[Values]]] = {}
        # The hybridized blocks that are called, in no other's graph, for each kind of inputs.
        self._called: dict[Hashable, WeakKeyDictionary[Any, None]] = {}
        # Where blocks have the attributes of their graphs, those that they have without.
        self._outside: list[Values] = []
        self._nasked = self._nfound = 0
        # Kinds of inputs of which it is not known what is computed since the last change.
        self._due: set[Hashable] = set()
        self._names: list[str] = []
        self.look()

    def look(self) -> None:
        """Take what they compute now for what is known."""
        self._graphs = list(self._clearable(self._blocks))
        are_called = self.are_losses_called()
        run = list(self._run(self._blocks[:1] if are_called else self._blocks))
        self._read = [(a, len(a), _layers(a), values) for a, values in map(_values_of, run)]
        self._classes = {type(block): _methods(type(block)) for block in run}
        functions = [*_hybrid_forwards(run), *_own_functions(run)]
        functions += [] if are_called else self._losses
        self._found = [(function, settings(read_by(function))) for function in functions]

    def are_possible(self, kind: Hashable, others: Iterable[Hashable]) -> bool:
        """May there have been any since it was last known what is computed of this ``kind``?

        What is computed of ``others`` is looked at when these come: code of the script's may run.
        """
        self._nasked += 1
        self._names = self._changed()
        if self._names:
            self._due.update({kind, *others})
            self.look()
        return kind in self._due

    def are_unseen(self) -> bool:
        """May there be any that are not looked for, in what a function reads that is called, say?

        Code of the script's runs in every step then, as a block that is not hybridized runs it. In
        a graph none of it must: that was made once, and what makes it may compute another now. But
        it may where the graph of a hybridized block is kept, and nothing makes it anew.
        """
        return self._are_called(self._blocks[:1], is_kept=self._is_kept)

    def are_losses_called(self) -> bool:
        """Is it so for the losses? They run apart from the block then, and are not looked at."""
        return self._are_called(self._blocks[1:], self._losses)

    def _are_called(
        self,
        blocks: Sequence[Any],
        functions: Sequence[Any] = (),
        is_kept: Callable[[Any], bool] | None = None,
    ) -> bool:
        # Hooks within a graph MXNet calls as it makes that, and those of the block get arrays.
        hooked = (b for b in (*self._run(blocks), *hybridized(blocks)) if b is not self._blocks[0])
        if not (
            functions or any(map(_is_scripts, self._run(blocks))) or any(map(has_hooks, hooked))
        ):
            return False
        return not any(
            any(map(_is_scripts, with_children([root]))) and not (is_kept and is_kept(root))
            for root in hybridized(blocks)
        )

    def begin(self, kind: Hashable) -> None:
        """Whatever becomes of it, nothing is known of this ``kind`` until :meth:`end`.

        The script's code may raise, or be interrupted, and a notebook goes on after that.
        """
        self._due.add(kind)

    def end(self, kind: Hashable, name: str, *, are_found: bool) -> None:
        """It is known what is computed of this ``kind``.

        Where changes ``are_found`` block ``name`` is planned anew: too often, says a warning.
        """
        self._due.discard(kind)
        if not are_found:
            return
        self._nfound += 1
        if self._nfound == MANY and self._nasked <= MANY * OFTEN:
            what = (
                ", ".join(self._names) or "something that hybrid_forward or the loss draws or reads"
            )
            warnings.warn(
                f"block {name!r} has computed something else {MANY} times in {self._nasked} steps, "
                f"and was planned anew each time, because of {what}; make what "
                f"changes so often an input of the block, or one of the labels",
                stacklevel=2,
            )

    def _changed(self) -> list[str]:
        """What changed, in words."""
        names = [
            f"the graph of {block.name!r}"
            for block, arguments, is_active in self._graphs
            if block._cached_op_args is not arguments or block._active is not is_active
        ]
        for attributes, count, layers, values in self._read:
            if _layers(attributes) != layers:
                names.append(f"the layers of {attributes['_name']!r}")
            elif len(attributes) != count or not are_set(attributes, values):
                which = [n for n in values if not are_set(attributes, {n: values[n]})]
                names.append(f"{', '.join(which) or 'attributes'} of {attributes['_name']!r}")
        names += [
            f"methods of the class {kind.__name__}"
            for kind, methods in self._classes.items()
            if _methods(kind) != methods
        ]
        for function, values in self._found:
            found = read_by(function)
            if not are_set(found, values):
                names += [n for n in values if not are_set(found, {n: values[n]})]
        return names

    def is_graph_new(self, kind: Hashable) -> bool:
        """Does a step of this ``kind`` call a hybridized block that has not run?

        MXNet makes the graph of such a block in that call.
        """
        return bool(self._called_first(kind))

    def run(self, kind: Hashable, ctx: mx.Context) -> None:
        """A step of this ``kind`` runs on ``ctx``, with the blocks as they are now.

        Here MXNet makes graphs of those that are hybridized, and are called. One that no step has
        called has no graph, and its attributes may change until it has.
        """
        new = self._called_first(kind)
        if not new:
            return
        with ctx:  # on which MXNet finds the arrays of the parameters
            for block in new:
                _finish_graph(block)
        self._graphs_of = {
            block: self._graphs_of[block]
            for block in filter(is_graph, with_children(self._blocks))
            if self._has_run(block)
        }
        for block in new:
            values = [*map(_all_of, with_children([block]))]
            self._graphs_of[block] = block._cached_op_args, values
        self.look()

    def _called_first(self, kind: Hashable) -> list[Any]:
        """The hybridized blocks that a step of this ``kind`` calls, and that have not run."""
        called = dict.fromkeys((*self._blocks, *self._called.get(kind, ())))
        return [block for block in called if is_graph(block) and not self._has_run(block)]

    @contextlib.contextmanager
    def as_in_graphs(self, *, only_losses: bool = False) -> Iterator[None]:
        """Within it hybridized blocks that have run have the attributes and layers of then."""
        blocks = with_children(self._blocks[1:] if only_losses else self._blocks)
        run = (b for b in dict.fromkeys(filter(is_graph, blocks)) if self._has_run(b))
        try:
            with _having([pair for b in run for pair in self._graphs_of[b][1]]) as self._outside:
                yield
        finally:
            self._outside = []

    @contextlib.contextmanager
    def calls(
        self, kind: Hashable, *, are_known: bool
    ) -> Iterator[Callable[[Any], contextlib.AbstractContextManager[None]]]:
        """Within it, and :meth:`as_in_graphs`, blocks are called for a network of this ``kind``.

        They have the attributes of now. What is yielded gives what is around the call of a block
        that has a graph of its own: there it and the blocks within it have those of which that is
        made, others than in another graph in which they are, too.
        The calls ``are_known`` where the network is composed of what the blocks have returned.
        """
        if not are_known:
            self._called[kind] = WeakKeyDictionary()
        with _having(self._outside):
            yield functools.partial(self._call, self._called[kind])
            for attributes, values in self._outside:  # what the blocks have written stays
                values.update({n: attributes[n] for n in values if n in attributes})

    @contextlib.contextmanager
    def _call(self, called: WeakKeyDictionary[Any, None], block: Any) -> Iterator[None]:
        called[block] = None
        with _having(self._graphs_of[block][1] if self._has_run(block) else []):
            yield

    def parameters(self) -> list[tuple[str, Any]]:
        """Those of the blocks, by name, those of layers that are only in graphs by now included."""
        with self.as_in_graphs():
            pairs = [pair for block in self._blocks for pair in named_parameters(block).items()]
        names = {name for name, _ in pairs}
        # Those of layers that were replaced after MXNet had made its graph.
        others = (
            parameter
            for block in hybridized(self._blocks)
            for is_input, parameter in block._cached_op_args
            if not (is_input or block._backend or parameter.name in names)
        )
        return [*pairs, *((parameter.name, parameter) for parameter in others)]

    def _has_run(self, block: Any) -> bool:
        return block in self._graphs_of and self._graphs_of[block][0] is block._cached_op_args

    def _clearable(self, blocks: Iterable[Any]) -> Iterator[tuple[Any, Any, bool]]:
        """Every block in ``blocks`` whose graph may be forgotten, with what that is called with.

        MXNet makes that list anew when it forgets the graph. Of what is within another graph, which
        has run, it forgets nothing that is used. With ``hybridize(False, clear=False)`` it only
        stops to call the graph.
        """
        for block in blocks:
            if isinstance(block, mx.gluon.HybridBlock):
                yield block, block._cached_op_args, block._active
            if not (is_graph(block) and self._has_run(block)):
                yield from self._clearable(block._children.values())

    def _run(self, blocks: Iterable[Any]) -> Iterator[Any]:
        """Every block in ``blocks`` that is in no graph."""
        for block in blocks:
            is_hybridized = getattr(block, "_active", False)
            if not (is_hybridized and (block._cached_graph or self._has_run(block))):
                yield block
                yield from self._run(block._children.values())


def _finish_graph(block: Any) -> None:
    """Have MXNet make what it calls the graph of ``block`` with, if there is a graph, but not that.

    It is what ``export`` takes the parameters from, and it is not made anew by the next inference.
    """
    if block._cached_op is not None or not block._cached_graph or block._backend:
        return
    try:
        block._build_cache()
    except Exception:  # what MXNet cannot call it says when it is to
        block._clear_cached_op()


def _hybrid_forwards(blocks: Iterable[Any]) -> set[Any]:
    """What the blocks run, where MXNet has not written it."""
    functions = {getattr(type(block), "hybrid_forward", None) for block in blocks}
    return {fn for fn in functions if fn is not None and not is_mxnets(fn)}


def _own_functions(blocks: Iterable[Any]) -> list[Any]:
    """The functions that the blocks have as attributes, of the script's."""
    return [fn for block in blocks for fn in _functions(block).values() if not is_mxnets(fn)]


def _is_scripts(block: Any) -> bool:
    """Is any of what ``block`` runs code that MXNet has not written?"""
    kind = type(block)
    forward = getattr(kind, "hybrid_forward", None)
    if kind.__module__.split(".")[0] != "mxnet" or (forward is not None and not is_mxnets(forward)):
        return True
    return bool(_own_functions([block]))


def _methods(kind: type) -> tuple[Any, Any]:
    """What blocks of this class run: a script may put other functions into it at any time."""
    return getattr(kind, "hybrid_forward", None), getattr(kind, "forward", None)


def _functions(block: Any) -> dict[str, Any]:
    return {name: fn for name, fn in vars(block).items() if isinstance(fn, FUNCTIONS)}


def _all_of(block: Any) -> Values:
    """Its attributes, and of these what its graph is made of: settings and layers."""
    attributes, values = _values_of(block)
    layers = {n: layer for n, layer in attributes.items() if isinstance(layer, mx.gluon.Block)}
    replaced = {name: attributes[name].copy() for name in _REPLACED}
    return attributes, {**values, **layers, **replaced}


@contextlib.contextmanager
def _having(pairs: Iterable[Values]) -> Iterator[list[Values]]:
    """Within it blocks have these values of attributes; those that they replace, which come back.

    A block may be there twice, if it is in two graphs.
    """
    others = [
        (attributes, values, {name: attributes[name] for name in values if name in attributes})
        for attributes, values in pairs
        if not are_set(attributes, values)
    ]
    for attributes, values, _ in others:
        attributes.update(values)
    try:
        yield [(attributes, before) for attributes, _, before in others]
    finally:
        for attributes, values, before in others:
            for name in values.keys() - before.keys():
                attributes.pop(name, None)
            attributes.update(before)


def _layers(attributes: dict[str, Any]) -> tuple[Any, ...]:
    """Of a block with these, and its parameters: scripts replace them in the dicts, too.

    MXNet is not told of that.
    """
    return tuple(part for name in _REPLACED for part in attributes[name].values())


def _values_of(block: Any) -> Values:
    values = {**settings(vars(block)), **_functions(block)}.items()
    return vars(block), {name: value for name, value in values if name not in OF_MXNET}
