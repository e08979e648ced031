"""Runs the command line on a small network, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from helpers.paths import ROOT

SHAPE = ("--shape", "data=2,3,8,8")
NET = ("net-symbol.json", *SHAPE)
QUICK = ("--strategy", "chen_sqrt")
MIRROR = ("--realisation", "mirror")


NETS = """
    import mxnet as mx

    def symbol():
        print("a print of the user's")
        hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="fc")
        return mx.sym.SoftmaxOutput(mx.sym.Activation(hidden, act_type="relu"), name="softmax")

    def block():
        net = mx.gluon.nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(mx.gluon.nn.Dense(8, activation="relu"), mx.gluon.nn.Dense(4))
        return net

    def half():
        net = block()
        net.cast("float16")
        return net

    def frozen():
        net = block()
        net[0].collect_params().setattr("grad_req", "null")
        return net, mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def broken():
        raise KeyError("no such layer")

    def number():
        return 3

    def unchecked():
        return mx.gluon.nn.Sequential()

    def twins():
        net = mx.gluon.nn.HybridSequential(prefix="net_")
        net.add(mx.gluon.nn.Dense(4, prefix="twin_"), mx.gluon.nn.Dense(4, prefix="twin_"))
        return net

    def unplannable():
        data = mx.sym.Variable("data") * mx.sym.Variable("weight", shape=(4, 2))
        return mx.sym.MakeLoss(mx.sym.contrib.boolean_mask(data, mx.sym.Variable("mask")))
"""


def process_of(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memplan", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
