"""Recurrent layers, and by how much a process grows that trains them: run this file for that."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import mxnet as mx


class Layers(NamedTuple):
    """``nlayers`` layers, of ``ninputs`` inputs and states of ``width``, in one or two ways."""

    mode: str
    length: int
    batch: int
    ninputs: int
    width: int
    nlayers: int
    is_both: bool = False

    def network(self) -> tuple[mx.sym.Symbol, dict[str, tuple[int, ...]]]:
        """The network, and its shapes."""
        names = ("state", "cell") if self.mode == "lstm" else ("state",)
        call = mx.sym.RNN(
            mx.sym.Variable("data"),
            mx.sym.Variable("parameters"),
            *map(mx.sym.Variable, names),
            state_size=self.width,
            num_layers=self.nlayers,
            mode=self.mode,
            bidirectional=self.is_both,
            name="layers",
        )
        state = ((2 if self.is_both else 1) * self.nlayers, self.batch, self.width)
        data = (self.length, self.batch, self.ninputs)
        return mx.sym.MakeLoss(call), {"data": data, **dict.fromkeys(names, state)}


def growth_nbytes(layers: Layers) -> int:
    """By how much this process grows in three steps, beyond what MXNet allocates for arrays."""
    net, shapes = layers.network()
    executor = net.simple_bind(mx.cpu(), **shapes)
    for array in executor.arg_arrays + executor.grad_arrays:
        array[:] = 0.01
    mx.nd.waitall()
    before = _resident_nbytes()
    for _ in range(3):
        executor.forward(is_train=True)
        executor.backward()
        mx.nd.waitall()
    allocated = int(re.findall(r"Total (\d+) MB", executor.debug_str())[-1])
    return _resident_nbytes() - before - (allocated << 20)


def _resident_nbytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.findall(r"VmRSS:\s+(\d+)", text)[0])


if __name__ == "__main__":
    asked = Layers(*json.loads(sys.argv[1]))
    growth_nbytes(asked._replace(length=3, batch=2, ninputs=4, width=4))  # MXNet's own code
    print(growth_nbytes(asked))
