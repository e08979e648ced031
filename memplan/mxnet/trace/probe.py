"""Asks MXNet what it does not document: which buffers an op may take over, which ops it merges.

Each question is a graph of a few nodes, bound but never run, and the answer is read from the
executor's own description. Binding allocates nothing for the tensors in question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

import mxnet as mx
from mxnet.base import MXNetError

from memplan.mxnet.trace.environment import generators_of_random_numbers, match_range
from memplan.mxnet.trace.nnvm import (
    Attrs,
    Entry,
    EntryInfo,
    Node,
    call_of,
    to_symbol,
    variables,
)
from memplan.mxnet.trace.operators import is_made_of_symbol
from memplan.mxnet.trace.user_operators import is_of_library
from memplan.step.graph import Handover

# MXNet's CPU subgraph backend, which would rewrite a graph bound without gradients, is tied to
# cpu(0); a graph bound to another CPU context is taken as it is.
CONTEXT = mx.cpu(1)

_MIB = 1 << 20

Candidate = tuple[int, int, bool]
_handovers: dict[tuple[str, Attrs, tuple[Candidate, ...]], tuple[Handover, ...]] = {}


def handovers(node: Node) -> tuple[Handover, ...]:
    """The hand-overs that MXNet may make at ``node``, whose ``infos`` are known.

    None where MXNet cannot bind the op by itself: memory is then over-estimated, never under.
    """
    candidates = tuple(
        (i, o, source.dtype == target.dtype)
        for i, source in enumerate(node.infos.inputs)
        for o, target in enumerate(node.infos.outputs)
        if source is not None
        and target is not None
        and source.nelements == target.nelements
        and source.itemsize == target.itemsize
    )
    if not candidates:
        return ()
    key = (node.op, node.key, candidates)
    if key not in _handovers:
        try:
            _handovers[key] = _Probe(node).ask(candidates)
        except MXNetError:
            _handovers[key] = ()
    return _handovers[key]


class _Probe:
    """One op, of which some inputs are copies of variables, whose buffers MXNet may hand over."""

    def __init__(self, node: Node) -> None:
        self.arrays: dict[str, mx.nd.NDArray] = {}
        self.values = self._variables("value", node.infos.inputs)
        self.copies = [Node("_copy", f"input{i}", inputs=[v]) for i, v in enumerate(self.values)]
        self.node = call_of(node, "probed", [*self.values])
        infos = [*node.infos.outputs]
        if node.control and node.forward is not None:
            # A backward op may need its forward op's state: run that on variables of its own.
            forward = node.forward
            sources = self._variables("forward", forward.infos.inputs)
            self.node.control += (call_of(forward, "forward", sources),)
            infos += forward.infos.outputs
        self.sizes = [self.arrays[f"value{i}"].size for i in range(len(self.values))]
        self.nwritten = sum(info.nelements for info in infos if info is not None)

    def _variables(self, kind: str, infos: Sequence[EntryInfo | None]) -> list[Entry]:
        for i, info in enumerate(infos):
            if info is None:
                raise MXNetError(f"the shape of {kind}{i} is unknown")
            self.arrays[f"{kind}{i}"] = mx.nd.empty(info.shape, CONTEXT, info.dtype)
        return variables(kind, len(infos))

    def ask(self, candidates: tuple[Candidate, ...]) -> tuple[Handover, ...]:
        if not self._shares(range(len(self.values)), range(self.node.noutputs)):
            return ()
        return tuple(
            Handover(i, o, same_dtype and self._shares([i], [o], survive=True))
            for i, o, same_dtype in candidates
            if self._shares([i], [o])
        )

    def _shares(
        self, copied: Sequence[int], outputs: Sequence[int], *, survive: bool = False
    ) -> bool:
        """Does any output in ``outputs`` get the buffer of an input in ``copied``?

        These are copies that the op alone reads, unless they ``survive`` it. The other inputs are
        variables, whose buffers MXNet hands over to no op. Copies of them would be no answer even
        if they survived: an identity of several inputs (FInplaceIdentity), as amp_multicast is,
        shares the buffer of such a one, too.
        """
        read = [(self.copies[i], 0) if i in copied else v for i, v in enumerate(self.values)]
        self.node.inputs[:] = read
        heads: list[Entry] = [(self.node, o) for o in outputs]
        heads += [read[i] for i in copied if survive]
        full_nbytes = 4 * (self.nwritten + sum(self.sizes[i] for i in copied))
        # Padded to a whole number of MiB, the total that MXNet prints tells the last byte.
        padding = -full_nbytes % _MIB // 4
        heads.append((Node("_zeros", "padding", {"shape": f"({padding or _MIB // 4},)"}), 0))
        expected = -(-full_nbytes // _MIB) + (0 if padding else 1)
        with match_range(0):
            return allocated_mib(describe(to_symbol(heads), self.arrays)) < expected


def merges(node: Node) -> bool:
    """Does MXNet replace two calls of ``node``'s op on the same inputs by one?"""
    infos = node.infos.inputs
    arrays = {
        f"value{i}": mx.nd.empty(info.shape, CONTEXT, info.dtype)
        for i, info in enumerate(infos)
        if info is not None
    }
    if len(arrays) < len(infos):
        return False
    sources = variables("value", len(infos))
    calls = [(call_of(node, name, sources), 0) for name in ("one", "two")]
    return not re.search(r", Name=two$", describe(to_symbol(calls), arrays), re.MULTILINE)


@cache
def _changed_inputs(op: str, attrs: Attrs, ninputs: int, noutputs: int) -> tuple[int, ...]:
    sources = variables("value", ninputs)
    call = Node(op, "asked", dict(attrs), sources, noutputs=noutputs)
    changed = set(to_symbol([(call, 0)]).list_auxiliary_states())
    return tuple(place for place, (source, _) in enumerate(sources) if source.name in changed)


def changed_inputs(node: Node) -> tuple[int, ...]:
    """The places of the inputs that ``node``, or its backward op, writes into.

    They are statistics, or states of an optimizer.
    """
    return _changed_inputs(node.op, node.key, len(node.inputs), node.noutputs)


@cache
def _keeps_state(op: str, attrs: Attrs, ninputs: int, noutputs: int) -> bool:
    # Its backward op, alone, which MXNet refuses to bind where that needs what the call has left.
    sources = variables("value", ninputs + 2 * noutputs)
    terms = variables("term", ninputs)  # from which MXNet infers the shapes
    call = Node(f"_backward_{op}", "asked", dict(attrs), sources, noutputs=ninputs)
    sums = [
        Node("elemwise_add", f"sum{k}", inputs=[(call, k), term]) for k, term in enumerate(terms)
    ]
    arrays = {source.name: mx.nd.empty((1,), CONTEXT) for source, _ in [*sources, *terms]}
    try:
        describe(to_symbol([(node, 0) for node in sums]), arrays)
    except MXNetError as error:
        return "control_deps" in str(error)
    return False


def keeps_state_of_library(node: Node) -> bool:
    """Does ``node`` run an operator of a loaded library that has a state (CustomStatefulOp)?"""
    if not is_of_library(node.op):
        return False
    return _keeps_state(node.op, node.key, len(node.inputs), node.noutputs)


@cache
def _counts_as_backward(op: str, attrs: Attrs, ninputs: int, noutputs: int) -> bool:
    # Of an op whose gradient MXNet can look up without knowing any shape.
    other = Node("FullyConnected", "other", {"num_hidden": "1"}, variables("other", 3))
    call = Node(op, "asked", dict(attrs), variables("value", ninputs), (other,), noutputs)
    try:
        to_symbol([(call, 0)]).infer_shape_partial(other0=(1, 1))
    except MXNetError as error:
        return "Cannot find matching backward op" in str(error)
    return False


def counts_as_backward(node: Node) -> bool:
    """Does MXNet take the first control dependency of ``node`` for its forward op?

    It does so for backward ops, and for gather_nd and scatter_nd.
    """
    if is_made_of_symbol(node):
        return False
    return _counts_as_backward(node.op, node.key, len(node.inputs), node.noutputs)


def describe(symbol: mx.sym.Symbol, arrays: dict[str, mx.nd.NDArray]) -> str:
    """MXNet's description of ``symbol`` bound without gradients to ``arrays``."""
    return description_of(
        lambda: symbol.bind(
            CONTEXT,
            {name: arrays[name] for name in symbol.list_arguments()},
            grad_req="null",
            aux_states={name: arrays[name] for name in symbol.list_auxiliary_states()},
        )
    )


def description_of(bind: Callable[[], mx.executor.Executor]) -> str:
    """MXNet's description of what ``bind`` binds, which changes no random number of the script's.

    A bind asks for the next generator for every op that draws, and so moves MXNet's turn
    (ResourceParallelRandom::GetNext, src/resource.cc): the same network is bound once for every
    generator, which leads the turn back to where it was.
    """
    description = bind().debug_str()
    for _ in range(generators_of_random_numbers() - 1):
        bind()
    return description


def allocated_mib(description: str) -> int:
    """Whole MiB in "Total N MB allocated"."""
    return int(re.findall(r"^Total (\d+) MB allocated$", description, re.MULTILINE)[-1])
