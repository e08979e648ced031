"""What recurrent layers keep between their forward and backward ops."""

from __future__ import annotations

import json
import subprocess
import sys

import mxnet as mx
import pytest

from helpers import recurrent
from helpers.recurrent import Layers
from memplan.mxnet.realise.estimate import workspace_estimate
from memplan.mxnet.realise.estimate.recurrent_workspace import nbytes_kept, nbytes_moved
from memplan.mxnet.realise.estimate.workspace_estimate import executor_nbytes, packed_nbytes
from memplan.mxnet.trace import symbol_json
from memplan.planning.realisation import trace

MEASURED = {
    "two layers": Layers("lstm", 60, 32, 256, 256, 2),
    "both directions": Layers("lstm", 60, 32, 256, 256, 2, is_both=True),
    "other inputs": Layers("gru", 100, 32, 64, 128, 2),
    "plain": Layers("rnn_relu", 100, 64, 128, 128, 1, is_both=True),
}


def kept(layers: Layers, realisation: str = "mirror") -> int:
    net, shapes = layers.network()
    traced = trace(net, shapes=shapes, realisation=realisation)
    return sum(nbytes_kept(node) for node in traced.nodes if node.op == "RNN")


@pytest.mark.long
@pytest.mark.parametrize("name", MEASURED)
def test_a_process_keeps_about_as_much(name: str) -> None:
    layers = MEASURED[name]
    command = [sys.executable, recurrent.__file__, json.dumps(layers)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    grown = int(run.stdout.splitlines()[-1])
    assert 0.85 * grown < kept(layers) < 1.15 * grown


def test_layers_of_one_width_are_computed_together() -> None:
    states, parameters = 4 * 10 * 2 * 8, 4 * 4 * 8 * (8 + 8 + 2)
    one = Layers("lstm", 10, 2, 8, 8, 1)
    assert kept(one) == round(19.3 * states + 5.3 * parameters)
    assert kept(one._replace(nlayers=2)) == round(28.8 * states + 5.3 * 2 * parameters)
    # Of other inputs the first layer is computed by itself.
    fewer = parameters - 4 * 4 * 8 * 4
    expected = round(38.6 * states + 5.3 * (parameters + fewer))
    assert kept(one._replace(nlayers=2, ninputs=4)) == expected


def test_a_layer_in_both_directions_reads_both_of_the_one_before() -> None:
    one = Layers("gru", 10, 2, 8, 8, 1, is_both=True)
    states, parameters = 4 * 10 * 2 * 8, 2 * 4 * 3 * 8 * (8 + 8 + 2)
    assert kept(one) == round(26.25 * states + 5.3 * parameters)
    more = parameters + 2 * 4 * 3 * 8 * 8
    expected = round((2 * 26.25 + 10.9 + 2.5) * states + 5.3 * (parameters + more))
    assert kept(one._replace(nlayers=2)) == expected


# By how many states of a layer a process was seen to grow beside arrays: length 200, batch 64,
# inputs of 64, states of 128 (helpers/recurrent.py under MXNET_USE_MKLDNN_RNN=0).
WRITTEN_BY_MXNET = {
    ("lstm", 1, False): 10.3,
    ("lstm", 2, False): 17.3,
    ("lstm", 3, False): 23.31,
    ("lstm", 1, True): 16.27,
    ("lstm", 2, True): 30.27,
    ("gru", 1, False): 13.26,
    ("gru", 2, False): 19.25,
    ("gru", 3, False): 25.18,
    ("rnn_tanh", 1, False): 4.16,
    ("rnn_tanh", 2, False): 7.15,
    ("rnn_tanh", 3, False): 9.16,
    ("rnn_tanh", 1, True): 7.13,
    ("rnn_tanh", 2, True): 13.14,
}


@pytest.mark.parametrize(("mode", "nlayers", "is_both"), WRITTEN_BY_MXNET)
def test_layers_that_mxnet_computes_by_itself(
    mode: str, nlayers: int, is_both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = Layers(mode, 200, 64, 64, 128, nlayers, is_both)
    states = 4 * 200 * 64 * 128
    net, shapes = layers.network()
    types = dict.fromkeys(net.list_arguments(), "float64")
    traced = trace(net, shapes=shapes, type_dict=types, realisation="packed")
    [of_float64] = [nbytes_kept(node) for node in traced.nodes if node.op == "RNN"]
    monkeypatch.setenv("MXNET_USE_MKLDNN_RNN", "0")
    assert of_float64 == 2 * kept(layers)
    expected = WRITTEN_BY_MXNET[mode, nlayers, is_both] * states
    assert 0.96 * expected < kept(layers) < expected


def test_masks_of_a_dropout_are_written_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXNET_USE_MKLDNN_RNN", "0")
    layers = Layers("gru", 10, 2, 8, 8, 3, is_both=True)
    net, shapes = layers.network()
    data = symbol_json.parse(net)
    for node in data["nodes"]:
        if node["op"] == "RNN":
            node["attrs"]["p"] = "0.5"
    traced = trace(symbol_json.load(data), shapes=shapes)
    [found] = [nbytes_kept(node) for node in traced.nodes if node.op == "RNN"]
    assert found == kept(layers) + 4 * 2 * 2 * 10 * 2 * 8


def test_estimates_have_room_for_it() -> None:
    layers = MEASURED["two layers"]
    net, shapes = layers.network()
    traced = trace(net, shapes=shapes)
    nbytes, *_ = executor_nbytes(traced.graph, traced.nodes, leaves_holes=False)
    packed = trace(net, shapes=shapes, realisation="packed")
    assert min(nbytes, packed_nbytes(packed.graph, packed.nodes)) >= kept(layers) > 0


# Arrays of gates that count for pieces that are made anew elsewhere in the heap, by their rows.
MOVED = {
    "one part": (Layers("gru", 80, 32, 160, 160, 2), 4 * 3 * 160),
    "two widths": (Layers("gru", 80, 32, 128, 160, 2), 2 * 4 * 3 * 160),
    "both directions": (Layers("lstm", 80, 24, 128, 160, 2, is_both=True), 2 * 4 * 4 * 160),
    "longer rows": (Layers("lstm", 80, 24, 128, 128, 1), 4 * (4 * 128 + 16)),
    "large scratchpads go back": (Layers("lstm", 100, 32, 128, 128, 1), 0),
}


@pytest.mark.parametrize("name", MOVED)
def test_packed_steps_make_them_anew_in_other_places(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, row = MOVED[name]
    net, shapes = layers.network()
    traced = trace(net, shapes=shapes, realisation="packed")
    [node] = [node for node in traced.nodes if node.op == "RNN"]
    parameters = node.infos.inputs[1]
    assert parameters is not None
    in_heap = 4 * parameters.nbytes
    moved = nbytes_moved(node)
    assert moved == 4 * layers.length * layers.batch * row + in_heap
    counted = packed_nbytes(traced.graph, traced.nodes)
    monkeypatch.setattr(workspace_estimate, "all_nbytes_moved", lambda nodes: 0)
    assert packed_nbytes(traced.graph, traced.nodes) == counted - moved


def test_what_mxnet_computes_by_itself_stays_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXNET_USE_MKLDNN_RNN", "0")
    net, shapes = MEASURED["two layers"].network()
    traced = trace(net, shapes=shapes, realisation="packed")
    assert [nbytes_moved(node) for node in traced.nodes if node.op == "RNN"] == [0]


def test_a_layer_of_np_blocks_keeps_the_same() -> None:
    with mx.util.np_shape(True), mx.util.np_array(True):
        sources = (mx.sym.var(name).as_np_ndarray() for name in ("data", "parameters", "state"))
        net = mx.sym.npx.rnn(*sources, mode="gru", state_size=8, num_layers=1)
        shapes = {"data": (10, 2, 8), "state": (1, 2, 8)}
        traced = trace(mx.sym.np.sum(net), shapes=shapes, realisation="packed")
        [found] = [nbytes_kept(node) for node in traced.nodes if node.op == "RNN"]
    assert found == kept(Layers("gru", 10, 2, 8, 8, 1))
