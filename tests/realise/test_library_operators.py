"""Operators of C++ that mx.library.load brings, of which MXNet tells no more than of its own.

They are loaded in other processes: MXNet makes all its functions anew when it loads a library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import mxnet as mx
import pytest

from helpers.paths import ROOT
from helpers.script import printed_by

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile them"),
]

BEGIN = """
    import sys

    import mxnet as mx

    from helpers.networks import dense, loss, var
    from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
    from memplan.errors import TraceError
    from memplan.mxnet.gluon import planned
    from memplan.planning.realisation import trace
    from memplan.search.evicted_least import evicted_least
    from memplan.util.stop import Stop

    mx.library.load(sys.argv[1], verbose=False)

    def network(op):
        body = var()
        for i in range(3):
            inputs = [dense(body, 8)]
            if op == "noise":
                inputs.append(var(f"state{i}", shape=(1,)))
            body = mx.sym.sin(getattr(mx.sym, f"memplan_{op}")(*inputs, name=f"{op}{i}"))
        return loss(body)

    def traced(op, realisation):
        return trace(network(op), shapes={"data": (32, 8)}, realisation=realisation)

    def trained(traced):
        values, schedule = random_values(traced), evicted_least(traced.graph, Stop.after(1e5))
        assert schedule.recomputed
        steps = planned_steps(bound(traced, schedule, values))
        return differences(stock_steps(traced, values), steps)

    def refusal(run, *arguments):
        try:
            run(*arguments)
        except TraceError as error:
            return str(error)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mxnet = Path(mx.__file__).parent
    path = tmp_path_factory.mktemp("library") / "library.so"
    sources = [ROOT / "tests/helpers/library.cc", mxnet / "src/lib_api.cc"]
    options = ["-shared", "-fPIC", "-std=c++11", "-I", mxnet / "include", "-o", path]
    subprocess.run(["g++", *sources, *options], check=True, timeout=600)
    return path


def run(code: str, library: Path) -> None:
    code = textwrap.dedent(BEGIN) + textwrap.dedent(code)
    printed_by(
        "-c", code, str(library), PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    )


def test_what_may_draw_or_writes_a_state_runs_once_and_in_order(library: Path) -> None:
    code = """
        for realisation in ("mirror", "explicit", "packed", "updating"):
            ops = traced("noise", realisation).graph.ops
            order = [i for i, op in enumerate(ops) if op.kind == "memplan_noise"]
            assert len(order) == 3
            assert not any(ops[i].recomputable for i in order)
            for before, i in zip(order, order[1:]):
                assert realisation == "mirror" or before in ops[i].after
        for realisation in ("explicit", "packed"):
            assert not trained(traced("noise", realisation))
    """
    run(code, library)


def test_a_state_is_kept_as_by_mxnet_or_refused_by_name(library: Path) -> None:
    code = """
        assert not trained(traced("count", "explicit"))
        for realisation in ("packed", "updating"):
            message = refusal(traced, "count", realisation)
            assert "'count0' (memplan_count)" in message and "realisation='explicit'" in message

        class Counted(mx.gluon.HybridBlock):
            def hybrid_forward(self, F, data):
                return F.memplan_count(data)

        net = mx.gluon.nn.HybridSequential()
        net.add(mx.gluon.nn.Dense(8), Counted())
        net.initialize()
        planned(net)
        with mx.autograd.record():
            message = refusal(net, mx.nd.ones((4, 8)))
        assert "(memplan_count) has a state of its library" in message
    """
    run(code, library)
