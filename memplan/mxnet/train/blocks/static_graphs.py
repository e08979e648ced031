"""MXNet's graphs that keep the arrays with which they ran, beside plans that give others.

A graph of ``hybridize(static_alloc=True, static_shape=True)`` writes gradients where its first
``backward`` wrote them: in place of an array that it gets later it takes the one that it has
(``StaticBackward`` in src/imperative/cached_op.cc). A plan gives the parameters other arrays for
their gradients, into which such a graph of theirs would write none. So before it is recorded it is
made anew, without static arrays. Weights and statistics stay where they are.

It keeps generators of random numbers, too, but for ops that read its inputs or compute its outputs:
those of the thread in which it was last made ready. A step takes those of the thread that runs it,
as other graphs do, and a warning tells of a second thread.

Such a graph keeps the objects of Custom ops, too, where others make one for every call: as long as
it is called with inputs of the same shapes, and is recorded or not as before (``StaticInitExec``
makes new ones). So does a step that stands for calls of it.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import mxnet as mx
from mxnet import autograd

from memplan.mxnet.realise.kept_operators import KeptOperators, Key, keys
from memplan.mxnet.realise.wrapped_functions import wrap
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.operators import CUSTOM
from memplan.mxnet.train.blocks.block_network import BlockNetwork

Block = Any
Parameter = Any

#: The parameters to which plans were bound: others are left to MXNet.
_PLANNED: WeakKeyDictionary[Parameter, None] = WeakKeyDictionary()

# Neither of the first two is kept: with static_alloc alone some gradients of MXNet's are wrong
# (docs/limits.md, Bits). Without it MXNet would run what has few operators one by one, and backward
# would not go through all of it.
_OTHERS = {"static_alloc": False, "static_shape": False, "inline_limit": 0}


class _Renewed(mx.nd.CachedOp):  # type: ignore[misc]
    """What runs a graph, made here."""

    __slots__ = ()


def renew_graphs_of(parameters: Iterable[Parameter]) -> None:
    """From now on static graphs of these ``parameters`` write into the gradients that they have."""
    _PLANNED.update(dict.fromkeys(parameters))
    _wrap()


@functools.cache
def _wrap() -> None:
    wrap(mx.gluon.HybridBlock, "_call_cached_op", _renewing)


def _renewing(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def renewing(block: Block, *args: Any) -> Any:
        is_made = block._cached_op is not None and not isinstance(block._cached_op, _Renewed)
        if is_made and autograd.is_recording() and _is_static(block):
            _renew_if_planned(block)
        elif block in _RAN_LAST and not autograd.is_recording():
            _begin_inference(block)
        return call(block, *args)

    return renewing


def _is_static(block: Block) -> bool:
    return ("static_shape", True) in block._flags


def _renew_if_planned(block: Block) -> None:
    if any(not is_input and p in _PLANNED for is_input, p in block._cached_op_args):
        block._cached_op = _made_anew(block, _Renewed, _OTHERS)


def _begin_inference(block: Block) -> None:
    """Have inference by the graph of ``block`` begin with new objects, if it follows a step."""
    last = _RAN_LAST[block].values()
    if not all(ran.has_inferred for ran in last):
        for ran in last:
            ran.has_inferred = True
        if block._cached_op is not None:
            block._cached_op = _made_anew(block, mx.nd.CachedOp, {})


def _made_anew(block: Block, kind: type[mx.nd.CachedOp], flags: Mapping[str, Any]) -> Any:
    """What runs the graph of ``block``, as MXNet's ``_build_cache`` makes it, with these ``flags``.

    The graph itself stays, and the list of what it is called with, by which steps know it.
    """
    inputs = [is_input for is_input, _ in block._cached_op_args]
    places = {
        "data_indices": [i for i, is_input in enumerate(inputs) if is_input],
        "param_indices": [i for i, is_input in enumerate(inputs) if not is_input],
    }
    every = {**places, **dict(block._flags), **flags}
    return kind(block._cached_graph[1], every.items())


@dataclass
class _Ran:
    """Which step stood for the last calls of a graph, and what the graph was called with.

    MXNet makes that list anew with the graph. ``has_inferred`` says that inference has run since.
    """

    step: object
    inputs: Any
    has_inferred: bool = False


#: For static graphs that have objects to keep, by context.
_RAN_LAST: WeakKeyDictionary[Block, dict[mx.Context, _Ran]] = WeakKeyDictionary()


#: In which thread the first step ran that drew in the place of a static graph, by context; None:
#: a warning has told that others do.
_DREW_FIRST: WeakKeyDictionary[Block, dict[mx.Context, threading.Thread | None]]
_DREW_FIRST = WeakKeyDictionary()


class StaticObjects:
    """The objects of Custom ops in packed steps of ``trace``, of a ``network``, if it has some."""

    def __init__(self, trace: Trace, network: BlockNetwork, ctx: mx.Context) -> None:
        nodes = trace.nodes if trace.form.in_one_array else ()
        self._ops = keys(node.name for node in nodes if node.op == CUSTOM)
        #: Those that are kept, for the step; None where there are no such ops.
        self.operators = KeptOperators(lambda op: op in self._kept) if self._ops else None
        self._network, self._ctx, self._step = network, ctx, object()
        self._kept: set[Key] = set()

    def begin(self) -> None:
        """Before a step, which stands for calls of the network's graphs.

        Each call of a graph in it has objects of its own. Inference uses those of the first call.
        """
        self._warn_of_threads()
        if self.operators is None:
            return
        self._kept.clear()
        are_new: dict[Block, bool] = {}
        for block, numbers in self._network.user_code:
            if not _is_static(block):
                continue
            ops = [self._ops[number] for number in numbers]
            self._kept.update(ops)
            has_inferred = False
            if block not in are_new:
                before = _RAN_LAST.setdefault(block, {}).get(self._ctx)
                now = _RAN_LAST[block][self._ctx] = _Ran(self._step, block._cached_op_args)
                are_new[block] = before is None or not _are_same(before, now)
                has_inferred = before is not None and before.has_inferred
            if are_new[block] or has_inferred:
                self.operators.forget(ops)

    def _warn_of_threads(self) -> None:
        """A warning where static graphs may draw the random numbers of another thread."""
        here = threading.current_thread()
        for block in filter(_is_static, self._network.drawing):
            threads = _DREW_FIRST.setdefault(block, {})
            first = threads.setdefault(self._ctx, here)
            if first is None or first is here:
                continue
            threads[self._ctx] = None
            warnings.warn(
                f"block {block.name!r} is hybridized with static_shape=True: MXNet's graph of it "
                f"draws the random numbers of the thread in which it was last made ready, as in "
                f"the first call, and a planned step those of the thread that runs it, which is "
                f"{here.name!r} and was {first.name!r}: masks of Dropout, and whatever else is "
                f"drawn, may be others. Let one thread train it, or hybridize it without "
                f"static_shape",
                stacklevel=3,
            )


def _are_same(one: _Ran, other: _Ran) -> bool:
    return one.step is other.step and one.inputs is other.inputs
