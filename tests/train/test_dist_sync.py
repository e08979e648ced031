"""A planned Module in several processes, by dist_sync."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.fitting import differing

WORKER = """
import sys
import mxnet as mx, numpy as np
import memplan.mxnet

def network(prefix):
    body = mx.sym.Variable("data")
    for i in range(6):
        name = f"{prefix}_{i}"
        body = mx.sym.FullyConnected(body, num_hidden=16, name=f"{name}_fc")
        body = mx.sym.BatchNorm(body, fix_gamma=False, name=f"{name}_bn")
        body = mx.sym.relu(body, name=f"{name}_relu")
    return mx.sym.SoftmaxOutput(body, name="softmax")

def planned(net):
    return memplan.mxnet.Module(net, strategy="chen_greedy:linear", realisation="explicit")

kvstore = mx.kv.create("dist_sync")
random = np.random.default_rng(kvstore.rank)
data, label = random.normal(size=(16, 12)).astype("f4"), random.integers(0, 16, 16).astype("f4")
found = []
for prefix, make in (("a", mx.mod.Module), ("b", planned)):
    mx.random.seed(3), np.random.seed(3)
    module = make(network(prefix))
    module.fit(
        mx.io.NDArrayIter(data, label, batch_size=8), num_epoch=2, kvstore=kvstore,
        initializer=mx.init.Xavier(), optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
        batch_end_callback=lambda _: mx.nd.waitall(),
    )
    arguments, states = module.get_params()
    found.append([array.asnumpy() for _, array in sorted({**arguments, **states}.items())])
assert module.plan.schedule.recomputed
np.savez(sys.argv[1], *found[1])
assert all(map(np.array_equal, *found))
kvstore._barrier()
"""


@pytest.mark.long
def test_dist_sync(tmp_path: Path) -> None:
    """Two workers on different data hold the same weights, those of mx.mod.Module."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = os.environ | {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
        "OMP_NUM_THREADS": "1",
    }
    saved = [tmp_path / f"{rank}.npz" for rank in range(2)]
    roles = [("scheduler", "import mxnet", ()), ("server", "import mxnet", ())]
    roles += [("worker", WORKER, (str(path),)) for path in saved]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=environment | {"DMLC_ROLE": role},
            stderr=subprocess.PIPE,
            text=True,
        )
        for role, code, arguments in roles
    ]
    try:
        for process in reversed(processes):
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    one, other = (dict(np.load(path)) for path in saved)
    weights = [name for name in one if one[name].ndim == 2]
    assert weights
    assert not differing({n: one[n] for n in weights}, {n: other[n] for n in weights})
