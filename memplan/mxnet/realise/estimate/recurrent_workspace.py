"""What a recurrent layer of MXNet's keeps on a CPU from its forward to its backward op.

oneDNN computes layers of one width together, and others one by one; both directions of a layer are
computed together. For each such part it keeps gates and states of every time step, in rows as wide
as the input or the state, whichever is wider (MXNet's src/operator/nn/mkldnn/mkldnn_rnn.cc). Other
dtypes than float32, or all where it is told so, MXNet computes by itself, in space that is known.
All that is in no array of an executor's, and no plan changes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from memplan.mxnet.trace.environment import onednn_has_recurrent_layers
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import CONVOLUTIONS, is_true
from memplan.util.heap import KEPT_NBYTES

_NGATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}

# In states of a layer, for all time steps of one direction: a linear fit to the growth of processes
# that train one such op, of three modes, of 1 to 3 layers, in one and in both directions, with
# inputs of 1/4, 1 and 4 times the state (length 200, batch 32, state 64). It is within 13% of them,
# and was within 8% for other lengths, batches and states. A pair is by the number of gates, and
# beside it.
_OF_PART, _OF_LAYER, _OF_WIDTH = (2.2, 1.0), (2.0, 1.5), 3.25
_OF_BOTH_DIRECTIONS, _OF_BOTH_WIDTHS, _BETWEEN_LAYERS = (5.65, 9.3), 10.9, 2.5

# How often the parameters are kept, in layouts of oneDNN's and as gradients: on the same, and on
# states of 256 and 512.
_COPIES_OF_PARAMETERS = 5.3

# A packed step makes all that anew. From the third step on pieces small enough for keep_below come
# from the heap, and lie elsewhere than those of the step before. Of these each part has a
# scratchpad forward and one backward, as large as five arrays of gates each, of which a step writes
# little: four arrays count. The parameters in oneDNN's layouts and their gradients, four pieces by
# layer, count once more. Set on 15 networks with an LSTM, a GRU or an RNN of 1 to 3 layers, over 6
# to 14 steps, which then take 0.78 to 1.08 of their promise, mostly 0.87 to 1.03. Rows of a
# multiple of 256 gates are longer (get_good_ld of oneDNN's src/cpu/rnn/rnn_utils.cpp).
_GATES_OF_SCRATCHPAD, _GATES_MOVED, _PIECES_OF_PARAMETERS = 5, 4, 4
_LONGER_IF_MULTIPLE_OF, _LONGER_BY = 256, 16

# That is so with one operator alone. With several, pieces of one lie where those of another were,
# now and then elsewhere again: oneDNN asks for them at a multiple of 64 bytes, the C library keeps
# the slivers that it cuts off for the thread, and what is free is not joined over these. What was
# ever written to grows until the 60th to 100th step, to 1.6 times what is promised without this. On
# 19 networks of 2 to 6 operators, over 100 steps, up to 4.5 times what moves of the second largest
# came on top, but little or nothing where all that they keep and what moves is large anyway.
_TIMES_SECOND_LARGEST, _MOST_WITH_IT = 5, 130_000_000

# A single operator grows so, too, beside convolutions or several dense layers, even if these take
# nothing as large: what any operator allocates, of a few bytes, comes to lie between its pieces. By
# how much differs from run to run, by 65 to 105 MB in one network, and one grew after 200 steps
# alone. On 26 networks, over 100 steps, up to twice what moves came on top, up to three times where
# that is below 10 MB, and some take little more than half of their promise. With it all that the
# operator keeps and moves came to 91 MB at most; where that is more anyway, nothing came on top.
# Nor did it on eleven with one or two dense layers, as of scores, on five of them over 300 steps.
_TIMES_LARGEST, _FEW_DENSE_LAYERS, _MOST_BESIDE_LAYERS = 2, 2, 100_000_000


def nbytes_kept(node: Node) -> int:
    """Bytes that a recurrent layer ``node`` keeps; 0 where its shapes are unknown."""
    data, parameters = node.infos.inputs[:2]
    if data is None or parameters is None:
        return 0
    length, batch, ninputs = data.shape
    width = int(node.attrs["state_size"])
    if data.dtype != "float32" or not onednn_has_recurrent_layers():
        return _numbers_written(node, length, batch, width) * data.itemsize
    states = length * batch * width * data.itemsize
    kept = states * _states_kept(node, max(1.0, ninputs / width), is_equal=ninputs == width)
    return round(kept + _COPIES_OF_PARAMETERS * parameters.nbytes)


def all_nbytes_moved(nodes: Sequence[Node]) -> int:
    """Bytes that packed steps of ``nodes`` take more for recurrent layers, which they make anew."""
    layers = [node for node in nodes if node.op == "RNN"]
    moved = sorted(map(nbytes_moved, layers))
    counted = sum(moved) + sum(map(nbytes_kept, layers))
    second = moved[-2] if len(moved) > 1 else 0
    again = min(_TIMES_SECOND_LARGEST * second, _MOST_WITH_IT - counted)
    if _spread(nodes):
        of_one = _TIMES_LARGEST * max(moved, default=0)
        again = max(again, min(of_one, _MOST_BESIDE_LAYERS - counted))
    return sum(moved) + max(0, again)


def _spread(nodes: Sequence[Node]) -> bool:
    """Do ``nodes`` spread a recurrent layer that would stay in place if it were alone?"""
    ops = [node.op for node in nodes]
    return any(op in CONVOLUTIONS for op in ops) or ops.count("FullyConnected") > _FEW_DENSE_LAYERS


def nbytes_moved(node: Node) -> int:
    """Bytes that packed steps take more for a recurrent layer ``node``, if it is alone in them.

    0 where shapes are unknown or MXNet computes it by itself, and for what is so large that it goes
    back to the system.
    """
    data, parameters = node.infos.inputs[:2]
    if data is None or parameters is None:
        return 0
    if data.dtype != "float32" or not onednn_has_recurrent_layers():
        return 0
    length, batch, ninputs = data.shape
    width, nlayers = int(node.attrs["state_size"]), int(node.attrs["num_layers"])
    row = _NGATES[node.attrs["mode"]] * width
    row += 0 if row % _LONGER_IF_MULTIPLE_OF else _LONGER_BY
    gates = length * batch * row * data.itemsize
    moved = 0
    if _GATES_OF_SCRATCHPAD * gates < KEPT_NBYTES:
        moved += _GATES_MOVED * gates * _nparts(node, is_equal=ninputs == width)
    if parameters.nbytes // nlayers < KEPT_NBYTES:
        moved += _PIECES_OF_PARAMETERS * parameters.nbytes
    return moved


def _numbers_written(node: Node, length: int, batch: int, width: int) -> int:
    """How many numbers MXNet writes where it computes a layer by itself, forward and backward.

    It asks for more (GetRNNReserveSpaceSize and GetRNNWorkspaceSize of src/operator/rnn-inl.h). Of
    the first come gates and states of all layers, then the masks of a dropout, and behind these,
    but for an LSTM, what the forward op needs for one layer and what the backward op does, which
    overlap with one or two layers. An LSTM has that in the second (the *Training and *Backward
    functions of src/operator/rnn_impl.h).
    """
    mode, nlayers = node.attrs["mode"], int(node.attrs["num_layers"])
    ways = 2 if is_true(node.attrs.get("bidirectional")) else 1
    step = length * width
    if mode == "lstm":
        # The gradients that go from layer to layer are in one place, or in two in turn.
        nplaces = min(nlayers - 1, ways)
        states, beside = ways * (6 * nlayers + nplaces) + 4, 8 * step + 6 * batch * width
    elif mode == "gru":
        states, beside = ways * (5 * nlayers + 4 - max(0, 3 - nlayers)) + 6, 6 * step
    else:
        states, beside = ways * (2 * nlayers + 1 + min(nlayers - 1, 1)) + 1, 2 * step
    if float(node.attrs.get("p", "0")):
        states += ways * (nlayers - 1)
    return states * length * batch * width + beside


def _states_kept(node: Node, width: float, *, is_equal: bool) -> float:
    """How many states of a layer; ``width`` is that of the input of the first, in states."""
    ngates, nlayers = _NGATES[node.attrs["mode"]], int(node.attrs["num_layers"])
    if is_true(node.attrs.get("bidirectional")):
        widths = width - 1.0 + (nlayers - 1)  # other layers read both directions of the one before
        of_layers = nlayers * _by_gates(_OF_BOTH_DIRECTIONS, ngates)
        return of_layers + _OF_BOTH_WIDTHS * widths + (_BETWEEN_LAYERS if nlayers > 1 else 0.0)
    nparts = _nparts(node, is_equal=is_equal)
    of_parts, of_layers = _by_gates(_OF_PART, ngates), _by_gates(_OF_LAYER, ngates)
    return nparts * of_parts + nlayers * of_layers + _OF_WIDTH * (width - 1.0)


def _nparts(node: Node, *, is_equal: bool) -> int:
    """Of how many parts is it? The input of the first layer ``is_equal`` in width to the state."""
    nlayers = int(node.attrs["num_layers"])
    if is_true(node.attrs.get("bidirectional")):
        return nlayers
    return 1 if is_equal or nlayers == 1 else 2


def _by_gates(pair: tuple[float, float], ngates: int) -> float:
    by_gate, beside = pair
    return by_gate * ngates + beside
