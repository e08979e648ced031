"""The copies that an executor makes on a CPU where operators want arrays in other layouts.

The operators of oneDNN write arrays in layouts of its own. MXNet's executor gives every other
operator buffers of its own for the inputs and outputs that are in such a layout, and keeps them
(StorageFallbackOpExecutor of MXNet's src/executor/attach_op_execs_pass.cc). An operator of oneDNN
brings its inputs into the layout that it wants in temporary space. Which arrays are so follows from
shapes: an estimate, for a processor with AVX2 or AVX-512.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from memplan.memory.layouts import INPUT, OWN, PLACE, USUAL, Rule
from memplan.mxnet.realise.estimate.layout_rules import (
    BRING_DATA,
    SUM,
    falls_back,
    follows,
    leader_and_other,
    ndim,
    rules_of_ops,
    takes_parts,
)
from memplan.mxnet.realise.estimate.onednn_kernels import kernels, knows_dtype
from memplan.mxnet.realise.estimate.reshaped import Reshaped, handed_on, nbrought, ncopies
from memplan.mxnet.realise.estimate.whole_pictures import Turned, is_of_whole_pictures, is_turned
from memplan.mxnet.trace.environment import onednn_is_enabled
from memplan.mxnet.trace.layouts import (
    KEEPS_LAYOUT,
    is_of_views,
    must_be_in_place,
    reads_any_layout,
    writes_in_layout_of_place,
)
from memplan.mxnet.trace.nnvm import EntryInfo, Node
from memplan.mxnet.trace.operators import CONVOLUTIONS, places_of_tensors
from memplan.step.graph import TrainingGraph

# oneDNN's copies, which are none where MXNet writes them over what they are of.
COPIES = ("_copy", "_backward_copy")

# For each input of an op, what tells the layout of oneDNN's in which it is; None for the usual one.
Layouts = tuple[Hashable, ...]


@dataclass(frozen=True)
class Copies:
    """Bytes of copies by op: ``kept`` to the end by the executor, ``temporary`` while it runs.

    ``layouts`` tells of each op in which layouts it reads its inputs. The temporary copies of the
    ops ``beside`` are arrays beside MXNet's temporary space: MXNet's own code computes these, and
    gets copies in the usual layout (FallBackCompute of src/operator/nn/mkldnn/mkldnn_base.cc), or
    the executor has one array more to make those that it keeps.
    """

    kept_nbytes: tuple[int, ...]
    temporary_nbytes: tuple[int, ...]
    layouts: tuple[Layouts, ...]
    beside: frozenset[int] = frozenset()


def copies(graph: TrainingGraph, nodes: Sequence[Node], *, by_executor: bool = True) -> Copies:
    """The copies for the ops of ``graph``, which ``nodes`` are, run in the base order.

    None where MXNet is told not to use oneDNN. Are they run ``by_executor``? Packed steps give an
    operator that reads only the shape of an input another array, and their norms of volumes leave
    the usual layout: bytes were set without that, layouts are told as they are.
    """
    if not onednn_is_enabled():
        nothing = (0,) * len(nodes)
        return Copies(nothing, nothing, ((),) * len(nodes))
    found, met = (_Layouts(graph, nodes, range(len(nodes))) for _ in range(2))
    if not by_executor:
        ruled = zip(met.rules, nodes, strict=True)
        met.rules = tuple(Rule(USUAL) if is_of_views(node.call) else rule for rule, node in ruled)
    pairs, layouts = [], []
    for index in range(len(nodes)):
        layouts.append(met.read_by(index))
        met.run(index)
        of_ignored = found.ignored_nbytes(index) if by_executor else 0
        kept_nbytes, temporary_nbytes = found.run(index)
        pairs.append((kept_nbytes + of_ignored, temporary_nbytes))
    kept, temporary = (tuple(pair[place] for pair in pairs) for place in (0, 1))
    beside = frozenset(n for n, node in enumerate(nodes) if _copies_beside(node))
    return Copies(kept, temporary, tuple(layouts), beside)


def own_layouts(
    graph: TrainingGraph,
    nodes: Sequence[Node],
    order: Sequence[int],
    source_of: Mapping[int, int],
    turned: Mapping[int, Collection[int]],
) -> tuple[list[frozenset[int]], set[int]]:
    """For each op of ``graph``, which ``nodes`` are: its inputs that are in layouts of oneDNN's.

    As the ops are run in this ``order``, each tensor is written over that of ``source_of``, and
    ``turned`` are the tensors that an op puts into the usual layout. And the tensors that are in
    layouts for another shape than their own.
    """
    found = _Layouts(graph, nodes, order, source_of)
    inputs, reshaped = [frozenset[int]()] * len(nodes), set[int]()
    for index in order:
        op = graph.ops[index]
        inputs[index] = frozenset(found.own.keys() & op.inputs)
        found.run(index)
        reshaped.update(t for t in op.outputs if isinstance(found.own.get(t), Reshaped))
        for tensor in turned.get(index, ()):
            found.own.pop(tensor, None)
    return inputs, reshaped


class _Layouts:
    """Which tensors are in a layout of oneDNN's, as the ops are run in this ``order``."""

    def __init__(
        self,
        graph: TrainingGraph,
        nodes: Sequence[Node],
        order: Sequence[int],
        source_of: Mapping[int, int] | None = None,
    ) -> None:
        self.graph, self.nodes, self.rules = graph, nodes, rules_of_ops(graph, nodes)
        self.info_of = _info_of_tensors(graph, nodes)
        self.place_of = {index: place for place, index in enumerate(order)}
        self.own: dict[int, Hashable] = {}
        self.written_over: dict[int, int] = {}
        self.source_of = source_of

    def ignored_nbytes(self, index: int) -> int:
        """The bytes of the copies that are kept of inputs of which an op reads only the shape.

        What lies there decides, which may be another tensor by now.
        """
        return self._nbytes([t for t in self.rules[index].ignored if self._lies_at(t) in self.own])

    def _lies_at(self, tensor: int) -> int:
        """The tensor that was written last where ``tensor`` was."""
        while tensor in self.written_over:
            tensor = self.written_over[tensor]
        return tensor

    def run(self, index: int) -> tuple[int, int]:
        """Run an op: the bytes of the copies that are kept, and of those that are not."""
        op, rule = self.graph.ops[index], self.rules[index]
        own = [tensor for tensor in op.inputs if tensor in self.own]
        in_place = self._in_place(index)
        self.written_over.update((tensor, output) for output, tensor in in_place.items())
        if rule.leaves == PLACE:
            # What it writes where an array of such a layout lay is brought into that layout, too.
            outputs = [o for o, i in in_place.items() if i in own]
            reshaped = [tensor for tensor in own if isinstance(self.own[tensor], Reshaped)]
            for output in outputs:
                read, written = map(self.info_of.get, (in_place[output], output))
                self.own[output] = handed_on(self.own[in_place[output]], read, written)
            return self._nbytes(own) + self._nbytes(outputs), self._nbytes(reshaped)
        are_own = [tensor in self.own for tensor in op.inputs]
        leaves_own = rule.leaves_own(are_own, [i in self.own for i in in_place.values()])
        temporary = self._temporary(index, own, leaves_own=leaves_own)
        if rule.leaves == USUAL and self.source_of is None:
            # A Reshape, or the like, converts the array that it shares.
            for place in (place for place, _, alias in op.handovers if alias):
                self.own.pop(op.inputs[place], None)
        if leaves_own:
            self.own[op.outputs[0]] = self._layout(index, own)
        elif self.source_of is not None and _has_layout_of_place(self.nodes[index]):
            # Estimates of memory were set without that.
            source = in_place.get(op.outputs[0])
            if source in self.own:
                self.own[op.outputs[0]] = self.own[source]
        return 0, temporary

    def _layout(self, index: int, own: Sequence[int]) -> Hashable:
        """What tells the layout of oneDNN's in which an op leaves its first output.

        Equal operators of equal shapes leave the same one; most leave that of what they read.
        """
        rule, node = self.rules[index], self.nodes[index]
        what = node.op, node.call.key, node.call.infos
        if is_of_whole_pictures(node):
            data, _ = leader_and_other(node)
            if is_turned(node, in_blocks=self._are_own(index)[data]):
                return Turned(what)
        if rule.leaves == OWN:
            return what
        op = self.graph.ops[index]
        leader = op.inputs[rule.place] if rule.leaves == INPUT else own[0]
        if node.op in COPIES:  # in place, of another shape maybe
            return handed_on(self.own[leader], *map(self.info_of.get, (leader, op.outputs[0])))
        return self.own[leader]

    def _temporary(self, index: int, own: Sequence[int], *, leaves_own: bool) -> int:
        """The bytes of the copies of an op of oneDNN's, whose inputs ``own`` are in its layouts."""
        op, node = self.graph.ops[index], self.nodes[index]
        call = node.call
        if not knows_dtype(call):
            return self._nbytes(own)
        if call.op in CONVOLUTIONS:
            return self._convolve(index, call)
        if takes_parts(node):
            return 0  # parts of the array are brought into the usual layout as they are written
        if follows(node):
            leader, other = leader_and_other(node)
            layouts = self.read_by(index)
            # An LRN's own layout is that of the gradient, and its data is brought into the usual.
            is_own = node.op != "_backward_LRN" and layouts[leader] is not None
            return _sizes(node)[other] * ncopies(layouts[other], is_own=is_own)
        if node.op in BRING_DATA:
            wanted, of_data = (self.read_by(index)[place] for place in leader_and_other(node))
            return self._size(op.outputs[0]) * nbrought(of_data, wanted)
        if node.op not in KEEPS_LAYOUT or falls_back(node):
            return self._nbytes(own)
        if node.op in (SUM, "add_n") and not leaves_own:
            return self._nbytes(own)
        if node.op == "_backward_BatchNorm" and ndim(call) > 4:
            # What it reads is brought into one layout, whatever that of the two arrays is.
            return 2 * self._size(op.outputs[0])
        own_sizes = {self._size(tensor) for tensor in own}
        unlike = [t for t in op.inputs if t not in own and self._size(t) in own_sizes]
        return 0 if node.forward is None else self._nbytes(unlike)

    def _convolve(self, index: int, call: Node) -> int:
        """A convolution, or its gradients: the bytes of copies in the layouts that it wants."""
        op, node = self.graph.ops[index], self.nodes[index]
        forward, of_data, of_weight = kernels(call)
        # Which inputs are wanted in which layouts: the weight is in that of the data.
        wanted: set[tuple[int, bool]] = {(0, forward.data), (1, forward.data)}
        if call is not node:
            # The gradient is brought into the layout for that of the data even where nobody reads
            # this (MKLDNNConvolutionBackward of src/operator/nn/mkldnn/mkldnn_convolution.cc).
            wanted = {(0, of_weight.output), (1, of_weight.data), (0, of_data.output)}
            if self.graph.readers[op.outputs[0]] or op.outputs[0] in self.graph.heads:
                wanted.add((2, of_data.data))
        layouts, sizes = self.read_by(index), _sizes(node)
        temporary = sum(
            sizes[place] * ncopies(layouts[place], is_own=is_own) for place, is_own in wanted
        )
        if call is not node and of_weight.data:
            temporary += sizes[2]  # the gradient of the weight is written in that layout, too
        return temporary

    def _are_own(self, index: int) -> list[bool]:
        """For each input of the node of an op: is it a tensor in a layout of oneDNN's?"""
        return [layout is not None for layout in self.read_by(index)]

    def read_by(self, index: int) -> Layouts:
        """The layouts of the inputs of the node of an op, before it runs."""
        node, inputs = self.nodes[index], self.graph.ops[index].inputs
        tensor_of = dict(zip(places_of_tensors(node), inputs, strict=False))
        return tuple(self.own.get(tensor_of.get(n, -1)) for n in range(len(node.inputs)))

    def _in_place(self, index: int) -> dict[int, int]:
        """For each tensor that an op writes over one that it reads: which one that is."""
        op, inputs_of = self.graph.ops[index], dict[int, int]()
        if self.source_of is not None:
            return {t: self.source_of[t] for t in op.outputs if t in self.source_of}
        for place, output, _ in op.handovers:
            tensor = op.inputs[place]
            last = max(self.graph.readers[tensor], key=self.place_of.__getitem__)
            dies = last == index and tensor not in self.graph.heads
            if dies and tensor not in inputs_of.values():
                inputs_of.setdefault(op.outputs[output], tensor)
        return inputs_of

    def _size(self, tensor: int) -> int:
        return self.graph.tensors[tensor].nbytes

    def _nbytes(self, tensors: Sequence[int]) -> int:
        return sum(map(self._size, tensors))


def _has_layout_of_place(node: Node) -> bool:
    """Is ``node`` the gradient of a dense layer's data, or a softmax of the rows of pictures?"""
    return writes_in_layout_of_place(node) or must_be_in_place(node)


def _copies_beside(node: Node) -> bool:
    """Does ``node`` have its temporary copies beside MXNet's temporary space?"""
    by_mxnet = node.op in ("add_n", "SoftmaxOutput")  # the latter in training
    return by_mxnet or falls_back(node) or not reads_any_layout(node)


def _info_of_tensors(graph: TrainingGraph, nodes: Sequence[Node]) -> dict[int, EntryInfo | None]:
    """The shape and dtype of each tensor of ``graph``, whose ops ``nodes`` are."""
    return {
        tensor: info
        for op, node in zip(graph.ops, nodes, strict=True)
        for tensor, info in zip(op.outputs, node.infos.outputs, strict=False)
    }


def _sizes(node: Node) -> list[int]:
    """The bytes of what ``node`` reads."""
    return [0 if info is None else info.nbytes for info in node.infos.inputs]
