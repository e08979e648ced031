"""The same schedule by an executor and in packed memory: bytes, seconds, results.

    python benchmarks/packed.py resnet50_v1 8 224 [--budget SHARE]

prints, for either, the bytes of activations that MXNet allocates, the growth of the peak resident
set in a step, CPU seconds of a step (one thread, so that other load does not count), and whether
outputs, gradients and states of three steps are equal bit for bit. MXNET_MKLDNN_ENABLED=0 in front
leaves out oneDNN's own buffers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

import memplan
from memplan.memory.blocks import best_allocation
from memplan.memory.packing import pack
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.train.random_run import random_arrays
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from networks import network
from this_process import memory_nbytes

WAYS = ("explicit", "packed")
STEPS = 3

# Imperative calls take workspaces in turn, each of which grows to the largest need: one is enough.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MXNET_CPU_TEMP_COPY": "1"}


def traced(options: argparse.Namespace, way: str) -> Trace:
    """The network of the command line."""
    shape = (options.batch, 3, options.size, options.size)
    return trace(network(options.network), realisation=way, shapes={"data": shape})


def run(traced: Trace, schedule: Schedule, path: str) -> dict[str, float]:
    """Train, and save what comes out; figures of it."""
    lowered = lower(traced, schedule).schedule
    blocks = best_allocation(lowered)
    nbytes = pack(lowered).nbytes if traced.form.name == "packed" else blocks.nbytes
    args, states = random_arrays(traced, mx.cpu(0))
    mx.nd.waitall()
    before = memory_nbytes("VmRSS")
    executor = TrainExecutor(
        traced, schedule, args=args, aux_states=states, match_range=blocks.match_range
    )
    executor.forward(is_train=True)
    mx.nd.waitall()
    grown = memory_nbytes("VmHWM") - before
    seconds: list[float] = []
    arrays: dict[str, Any] = {}
    for number in range(STEPS):
        begin = time.process_time()
        outputs = executor.forward(is_train=True)
        mx.nd.waitall()
        seconds.append(time.process_time() - begin)
        results = dict(enumerate(outputs)) | executor.grad_dict | executor.aux_dict
        arrays |= {f"{number} {name}": array.asnumpy() for name, array in results.items()}
        for name, gradient in executor.grad_dict.items():
            args[name] -= 0.001 * gradient
        mx.nd.waitall()
    np.savez(path, **arrays)
    return {
        "MiB": nbytes / 2**20,
        "grown MiB": grown / 2**20,
        "seconds": statistics.median(seconds),
    }


def planned(options: argparse.Namespace) -> Schedule:
    """A plan for packed memory."""
    plan = memplan.plan(
        network(options.network),
        realisation="packed",
        strategy=options.strategy,
        budget=options.budget,
        time_limit=options.time_limit,
        data=(options.batch, 3, options.size, options.size),
    )
    return plan.schedule


def in_a_process(options: argparse.Namespace, way: str, schedule: str, path: str) -> Any:
    """The figures of one way, run by itself."""
    process = subprocess.run(
        [sys.executable, *sys.argv, "--way", way, "--schedule", schedule, "--path", path],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        sys.exit(f"{way}: {process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def main() -> None:
    """Print both ways' figures, and what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network")
    parser.add_argument("batch", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--budget", type=float, help="share of the unplanned step; default: least")
    parser.add_argument("--time-limit", type=float, default=15.0)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--schedule", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        own = traced(options, options.way)
        schedule = Schedule.from_json(own.graph, Path(options.schedule).read_text())
        print(json.dumps(run(own, schedule, options.path)))
        return
    schedule = planned(options)
    overhead = schedule.seconds / schedule.graph.seconds - 1.0
    print(f"live peak {simulate(schedule).peak_nbytes / 2**20:.0f} MiB, overhead {overhead:.1%}")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/schedule.json"
        Path(path).write_text(schedule.to_json())
        places = [f"{folder}/{way}.npz" for way in WAYS]
        for way, place in zip(WAYS, places, strict=True):
            figures = in_a_process(options, way, path, place)
            print(f"{way:9}", ", ".join(f"{value:.3f} {name}" for name, value in figures.items()))
        one, other = (dict(np.load(place)) for place in places)
    unlike = [name for name in one if not np.array_equal(one[name], other[name])]
    print(f"{len(unlike)} of {len(one)} arrays differ {unlike[:3]}")


if __name__ == "__main__":
    main()
