"""An experiment: a plan run in packed memory, op by op, by MXNet's imperative calls.

MXNet's executor places tensors in whole blocks, which neither split nor merge. Its imperative
call of an operator takes the arrays to write to. Here they lie at the offsets of a packing, in one
array: every tensor is an NDArray of its own on that memory (DLPack), handed over where the executor
would.

    python benchmarks/packed.py resnet18_v1 8 224

prints, for the executor and for this, the bytes of activations, the growth of the peak resident
set in a step, CPU seconds of a step (one thread), and whether outputs, gradients and states of
three steps are equal. MXNET_MKLDNN_ENABLED=0 in front leaves out oneDNN's own buffers.
Not for use: operators with state (Dropout, RNN, Custom) cannot be called so, outputs that
nobody reads are computed (the executor skips them), and the program waits after every op.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, c_str, c_str_array, check_call
from mxnet.gluon.model_zoo import vision

import memplan
from memplan.graph import Tensor
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.lowering import lower
from memplan.mxnet.nnvm import VARIABLE, EntryInfo, Node
from memplan.mxnet.profile import random_arrays
from memplan.result import Plan
from memplan.simulate import replay

ALIGNMENT = 64
STEPS = 3

# CPU seconds do not depend on other load if one thread computes. Imperative calls take workspaces
# in turn, each of which grows to the largest need: of one there is enough.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MXNET_CPU_TEMP_COPY": "1"}


@dataclass
class Buffer:
    """Memory that one tensor, or several handed over, take from step to step (inclusive)."""

    nbytes: int
    first: int
    last: int
    offset: int = -1


class Lifetimes:
    """An arena (see memplan.simulate) that notes which buffer each output lies in, and when."""

    def __init__(self, nsteps: int) -> None:
        self.step, self.nsteps = 0, nsteps
        self.buffers: list[Buffer] = []
        self.of: dict[tuple[int, str], int] = {}

    def request(self, tensor: Tensor) -> int:
        self.buffers.append(Buffer(tensor.nbytes, self.step, self.nsteps))
        self.of[self.step, tensor.name] = len(self.buffers) - 1
        return len(self.buffers) - 1

    def share(self, buffer: int, tensor: Tensor) -> None:
        self.of[self.step, tensor.name] = buffer

    def release(self, buffer: int) -> None:
        self.buffers[buffer].last = self.step - 1

    def end_of_requests(self) -> None:
        self.step += 1


def pack(buffers: list[Buffer]) -> int:
    """Give every buffer an offset, the largest first, each the lowest that is free; the total."""
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda b: (-b.nbytes, b.first)):
        rivals = [b for b in placed if b.first <= buffer.last and buffer.first <= b.last]
        size, offset = -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT, 0
        for rival in sorted(rivals, key=lambda b: b.offset):
            if offset + size <= rival.offset:
                break
            offset = max(offset, rival.offset + -(-rival.nbytes // ALIGNMENT) * ALIGNMENT)
        buffer.offset = offset
        placed.append(buffer)
    return max(b.offset + -(-b.nbytes // ALIGNMENT) * ALIGNMENT for b in buffers)


class Packed:
    """Runs training steps of an explicit plan in one array."""

    def __init__(self, plan: Plan, args: dict[str, Any], states: dict[str, Any]) -> None:
        lowered = lower(plan.trace, plan.schedule)
        lifetimes = Lifetimes(len(lowered.schedule.ops))
        replay(lowered.schedule, lifetimes)
        self.nbytes = pack(lifetimes.buffers)
        self._memory = np.empty(self.nbytes + ALIGNMENT, np.uint8)
        start = -self._memory.ctypes.data % ALIGNMENT
        self._memory = self._memory[start : start + self.nbytes]
        self._arrays: dict[tuple[int, tuple[int, ...], str], Any] = {}
        data = json.loads(plan.symbol.tojson())
        nodes = data["nodes"]
        values: dict[tuple[int, int], Any] = {}
        self._calls = []
        step = 0
        for place, node in enumerate(nodes):
            if node["op"] == VARIABLE:
                values[place, 0] = {**args, **states}[node["name"]]
                continue
            infos = _infos(lowered.nodes[lowered.schedule.ops[step]])
            op = lowered.schedule.graph.ops[lowered.schedule.ops[step]]
            for k, (tensor, info) in enumerate(zip(op.outputs, infos, strict=True)):
                name = lowered.schedule.graph.tensors[tensor].name
                buffer = lifetimes.of[step, name]
                values[place, k] = self._array(buffer, lifetimes.buffers[buffer], info)
            inputs = [values[i, k] for i, k, _ in node["inputs"]]
            outputs = [values[place, k] for k in range(len(infos))]
            self._calls.append(_call(node, inputs, outputs))
            step += 1
        self.outputs = [values[i, k] for i, k, _ in data["heads"]]

    def _array(self, number: int, buffer: Buffer, info: Any) -> Any:
        """The buffer as an array of this shape.

        Not a view of another shape's: views cannot hold oneDNN's layouts.
        """
        key = (number, info.shape, info.dtype)
        if key not in self._arrays:
            nbytes = int(np.prod(info.shape)) * np.dtype(info.dtype).itemsize
            flat = self._memory[buffer.offset : buffer.offset + nbytes]
            self._arrays[key] = mx.nd.from_numpy(flat.view(info.dtype).reshape(info.shape))
        return self._arrays[key]

    def step(self) -> list[Any]:
        """Outputs and gradients."""
        with mx.autograd.train_mode():
            for call in self._calls:
                check_call(_LIB.MXImperativeInvokeEx(*call))
                check_call(_LIB.MXNDArrayWaitAll())
        return self.outputs


def _infos(node: Node) -> tuple[Any, ...]:
    """Of the outputs; an anchor, which asks for a shape, has none."""
    if node.infos.outputs:
        return node.infos.outputs
    source, k = node.inputs[0]
    return (EntryInfo((len(source.infos.outputs[k].shape),), "int64", 8),)


def _call(node: dict[str, Any], inputs: list[Any], outputs: list[Any]) -> tuple[Any, ...]:
    op = ctypes.c_void_p()
    check_call(_LIB.NNGetOpHandle(c_str(node["op"]), ctypes.byref(op)))
    attrs = {k: v for k, v in node.get("attrs", {}).items() if not k.startswith("__")}
    handles = [
        (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays))
        for arrays in (inputs, outputs)
    ]
    return (
        op,
        len(inputs),
        handles[0],
        ctypes.byref(ctypes.c_int(len(outputs))),
        ctypes.byref(ctypes.cast(handles[1], ctypes.POINTER(ctypes.c_void_p))),
        len(attrs),
        c_str_array(list(attrs)),
        c_str_array(list(attrs.values())),
        ctypes.byref(ctypes.POINTER(ctypes.c_int)()),
    )


def _resident(field: str) -> float:
    """MiB, by the kernel: VmRSS now, VmHWM at most."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) / 1024


def run(way: str, plan: Plan, path: str) -> dict[str, float]:
    """Train and save what came out; figures of it."""
    args, states = random_arrays(plan.trace, mx.cpu(0))
    mx.nd.waitall()
    before = _resident("VmRSS")
    if way == "packed":
        packed = Packed(plan, args, states)
        step, nbytes = packed.step, packed.nbytes
    else:
        executor = TrainExecutor(
            plan.trace, plan.schedule, args=args, aux_states=states, match_range=plan.match_range
        )
        nbytes = plan.allocated_nbytes

        def step() -> list[Any]:
            return [*executor.forward(is_train=True), *executor.grad_dict.values()]

    step()
    mx.nd.waitall()
    grown = _resident("VmHWM") - before
    wanted = [name for name, request in plan.trace.grad_req.items() if request == "write"]
    seconds, found = [], {}
    for number in range(STEPS):
        begin = time.process_time()
        outputs = step()
        mx.nd.waitall()
        seconds.append(time.process_time() - begin)
        for i, array in enumerate(outputs):
            found[f"{number} output {i}"] = array.asnumpy()
        for name, gradient in zip(wanted, outputs[-len(wanted) :], strict=True):
            args[name] -= 0.001 * gradient
        mx.nd.waitall()
        found |= {f"{number} {name}": array.asnumpy() for name, array in states.items()}
    np.savez(path, **found)
    return {"MiB": nbytes / 2**20, "grown MiB": grown, "seconds": statistics.median(seconds)}


def planned(options: argparse.Namespace) -> Plan:
    net = getattr(vision, options.network)(classes=10, prefix="net_")
    symbol = mx.sym.SoftmaxOutput(net(mx.sym.Variable("data")), name="softmax")
    return memplan.plan(
        symbol,
        realisation="explicit",
        strategy=options.strategy,
        budget=options.budget,
        data=(options.batch, 3, options.size, options.size),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network")
    parser.add_argument("batch", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("--strategy", default="chen_greedy_linear")
    parser.add_argument("--budget", type=float)
    parser.add_argument("--way", choices=["executor", "packed"], help="one only, in this process")
    parser.add_argument("--path")
    options = parser.parse_args()
    plan = planned(options)
    if options.way:
        print(json.dumps(run(options.way, plan, options.path)))
        return
    print(f"peak of live bytes {plan.peak_nbytes / 2**20:.0f} MiB, overhead {plan.overhead:.1%}")
    with tempfile.TemporaryDirectory() as folder:
        paths = {way: f"{folder}/{way}.npz" for way in ("executor", "packed")}
        for way, path in paths.items():
            done = subprocess.run(
                [sys.executable, *sys.argv, "--way", way, "--path", path],
                env=os.environ | ENVIRONMENT,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                sys.exit(f"{way}: {done.stderr[-2000:]}")
            figures = json.loads(done.stdout.splitlines()[-1])
            print(f"{way:9}", ", ".join(f"{value:.3f} {name}" for name, value in figures.items()))
        one, other = (dict(np.load(path)) for path in paths.values())
    unlike = [name for name in one if not np.array_equal(one[name], other[name])]
    print(f"{len(unlike)} of {len(one)} arrays differ {unlike[:3]}")


if __name__ == "__main__":
    main()
