"""Sums of gradients, added in the order in which MXNet's own executor adds them.

Its add_n adds 3 or 4 terms from right to left, more from left to right (the kernel Sum of
src/operator/tensor/elemwise_sum.h, tag 1.9.1). On a CPU oneDNN adds from left to right where all
terms are in a layout of its own (ElementWiseSumComputeExCPU). Which are so depends on what is
written in place, and that differs in other memory, or in another order of the same ops. Where it
does not add, the sum is in the usual layout (FallBackCompute, src/operator/nn/mkldnn).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memplan.mxnet.trace.environment import is_by_onednn
from memplan.mxnet.trace.layouts import reads_any_layout
from memplan.mxnet.trace.nnvm import VARIABLE, Entry, Infos, Node, depth_first
from memplan.mxnet.trace.operators import ignored_inputs
from memplan.mxnet.trace.probe import handovers

# Says of a variable of whose gradient it is what was there before the step.
OLD_GRADIENT = "__memplan_old_gradient__"

# Tells the sums of two of which a chain consists from those that MXNet has written.
_IS_LINK = "__memplan_link__"

# Adds two arrays, in the place of either.
_PLAIN = ("elemwise_add", {_IS_LINK: "True"})

# Adds two arrays with oneDNN only where both are in layouts of its own, and _PLAIN always. So a
# chain of these ends in the usual layout if any of its terms is in it, as MXNet's one sum does. (A
# term may be so by the processor, too: a gradient that oneDNN computes as a product of matrices.)
_LIKE_ONE_SUM = ("add_n", {"num_args": "2", _IS_LINK: "True"})

# Adds two arrays without oneDNN. This is broadcast_add by its other name, which is in no network
# that MXNet has written.
FALLBACK_SUM = "broadcast_plus"
_FALLBACK = (FALLBACK_SUM, {_IS_LINK: "True"})

# add_n adds from left to right from this many terms on.
_LEFT_TO_RIGHT = 5

# Operators of oneDNN that write in the usual layout, where they write at all.
_COPIES = frozenset("_copy _backward_copy _backward_add".split())

# Those that write in the layout of their first input, in its place or not.
_LIKE_FIRST = frozenset("_backward_Activation _backward_LeakyReLU".split())

# Those that write all gradients but the first, of weights and biases, in the usual layout
# (CreateMKLDNNWeightGrad of src/operator/nn/mkldnn/mkldnn_base.cc).
_OF_WEIGHTS = frozenset(
    "_backward_Convolution _backward_Deconvolution _backward_FullyConnected".split()
)


def chain_sums(
    heads: Sequence[Entry],
    noutputs: int,
    device_type: str,
    *,
    in_one_array: bool,
    added: Mapping[Entry, str],
) -> None:
    """Spell out sums of gradients in MXNet's full graph term by term, to equal bits.

    ``heads`` are the ``noutputs`` outputs, then the gradients; the shapes are known. A sum of 5
    terms or more becomes a chain from left to right, so that each term can be dropped as soon as
    it is added; one of 3 or 4 becomes a chain from right to left where MXNet's executor adds so for
    certain, and a step with other hand-overs may not. Where MXNet adds without oneDNN for certain,
    so does the chain, if its ops are called one by one, ``in_one_array``. (In an executor they
    would leave the layout of what MXNet has them write over.)

    ``added`` are the arguments to whose gradients a step adds these entries. The kernel adds the
    first of 5 terms or more to what is there, and the others to that: so the chain begins with a
    variable for that where MXNet adds without oneDNN for certain, which would add the sum.
    """
    order = depth_first(heads)
    forward = set(depth_first(heads[:noutputs]))
    sums = [node for node in order if node.op == "add_n" and node not in forward]
    few = [node for node in sums if 2 < len(node.inputs) < _LEFT_TO_RIGHT]
    many = [node for node in sums if len(node.inputs) >= _LEFT_TO_RIGHT]
    from_right: set[Node] = set()
    without_onednn: set[Node] = set()
    has_layouts = is_by_onednn(device_type)
    link_elsewhere = _LIKE_ONE_SUM if has_layouts else _PLAIN
    if (few or many) and has_layouts:
        in_stock, in_any = _Usual(order, heads), _Usual(order)
        without_onednn = {node for node in few + many if in_stock.any_of(node)}
        from_right = {node for node in without_onednn.intersection(few) if not in_any.any_of(node)}
    read = {entry for node in order for entry in node.inputs} if added else set()
    for node in many:
        is_by_kernel = not has_layouts or node in without_onednn or _adds_parameters(node)
        if (node, 0) in added and (node, 0) not in read and is_by_kernel:
            # Behind the first term, in whose place add_n may write.
            node.inputs.insert(1, (_old_gradient(node, added[node, 0], order), 0))
    for node in sums:
        if node in many or node in from_right:
            link = _FALLBACK if in_one_array and node in without_onednn else link_elsewhere
            _chain(node, *link, from_right=node in from_right)


def is_link(node: Node) -> bool:
    """Is ``node`` one of the sums of two that a sum of gradients became?"""
    return _IS_LINK in node.attrs


def is_added_late(node: Node) -> bool:
    """Does MXNet add the terms of the sum that ends in ``node`` to what is there, but not a step?

    Where it is a gradient that is added up.
    """
    nterms, first = 1, None
    while is_link(node):
        node, nterms, first = node.inputs[0][0], nterms + 1, node.inputs[1][0]
    return nterms >= _LEFT_TO_RIGHT and first is not None and OLD_GRADIENT not in first.attrs


def _old_gradient(total: Node, argument: str, order: Sequence[Node]) -> Node:
    """The variable for the gradient of ``argument`` as it is before ``total`` is added to it."""
    name, names = f"_old_grad_{argument}", {node.name for node in order}
    while name in names:
        name = f"_{name}"
    return Node(VARIABLE, name, {OLD_GRADIENT: argument}, infos=Infos((), total.infos.outputs))


def _adds_parameters(node: Node) -> bool:
    """Does the sum ``node`` add gradients of parameters, which oneDNN leaves in the usual layout?

    Those of one dimension have no other.
    """
    is_vector = any(info is not None and len(info.shape) == 1 for info in node.infos.outputs)
    return is_vector or any(source.op in _OF_WEIGHTS and k > 0 for source, k in node.inputs)


def _chain(node: Node, op: str, attrs: Mapping[str, str], *, from_right: bool) -> None:
    """Make ``node`` the last of sums of two by ``op``, from its first term on, or its last."""
    info = node.infos.outputs[0]
    infos = Infos((info, info), (info,))
    total, *terms = reversed(node.inputs) if from_right else node.inputs
    for i, term in enumerate(terms[:-1], 1):
        total = (Node(op, f"sum_grad_{i}", dict(attrs), [total, term], infos=infos), 0)
    node.op, node.name, node.attrs = op, f"sum_grad_{len(terms)}", dict(attrs)
    node.inputs, node.infos = [total, terms[-1]], infos


class _Usual:
    """The arrays that are in the usual layout for certain, not in one of oneDNN's.

    In MXNet's executor, where ``heads`` are its graph's; without, whatever is written in place.
    """

    def __init__(self, order: Sequence[Node], heads: Sequence[Entry] | None = None) -> None:
        self.is_stock = heads is not None
        self.heads = set(heads or ())
        self.readers: dict[Entry, list[int]] = {}
        for index, node in enumerate(order):
            for place, entry in enumerate(node.inputs):
                if place not in ignored_inputs(node):
                    self.readers.setdefault(entry, []).append(index)
        self.usual: set[Entry] = set()
        for index, node in enumerate(order):
            outputs = ((node, k) for k in range(node.noutputs))
            self.usual.update(entry for entry in outputs if self._writes(index, node, entry[1]))

    def any_of(self, node: Node) -> bool:
        """Is any input of ``node`` in the usual layout?"""
        return any(entry in self.usual for entry in node.inputs)

    def _writes(self, index: int, node: Node, output: int) -> bool:
        if node.is_variable:
            return True
        usual = [entry in self.usual for entry in node.inputs]
        if node.op in _LIKE_FIRST:
            return usual[0]
        if node.op == "add_n":
            return any(usual)
        if node.op in _COPIES or not reads_any_layout(node):
            # A fallback writes where it is told, in the layout of what lay there.
            return all(usual[place] for place in self._places(index, node, output))
        if node.op == "_backward_Pooling" and self.is_stock:
            # In the place of the zeros that are the gradient of its workspace, whose only reader
            # it is: so MXNet copies what oneDNN writes.
            return any(usual[place] for place in self._places(index, node, output))
        return False

    def _places(self, index: int, node: Node, output: int) -> list[int]:
        """The inputs in whose place ``node`` may write an output."""
        result: list[int] = []
        other_places: set[int] = set()
        for place, other, alias in handovers(node):
            if other == output and place not in other_places:
                if alias or self._may_die(index, node.inputs[place]):
                    result.append(place)
            elif self.is_stock and other < output and (node, other) in self.readers:
                other_places.add(place)  # of several outputs, by the first that is read
        return result

    def _may_die(self, index: int, entry: Entry) -> bool:
        if not self.is_stock:
            return True
        is_kept = entry[0].is_variable or entry in self.heads
        return not is_kept and self.readers[entry][-1] == index
