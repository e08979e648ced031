"""Networks with Custom ops, which other processes know only if they import who defines them."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mxnet as mx
import pytest

from helpers.networks import residual_net
from memplan.cli import main as cli
from memplan.cli.output import Exit
from memplan.errors import ArgumentError, CostError
from memplan.mxnet.plan_file import load_plan, plan_text
from memplan.mxnet.train import trial
from memplan.planning.plan import Plan
from memplan.planning.planner import plan

SHAPE = ("--shape", "data=2,6")

MODULE = """
    import mxnet as mx

    class Double(mx.operator.CustomOp):
        def forward(self, is_train, req, in_data, out_data, aux):
            self.assign(out_data[0], req[0], in_data[0] * 2)

        def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
            self.assign(in_grad[0], req[0], out_grad[0] * 2)

    @mx.operator.register("cli_double")
    class DoubleProp(mx.operator.CustomOpProp):
        def create_operator(self, ctx, shapes, dtypes):
            return Double()

    def network():
        hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="fc")
        return mx.sym.SoftmaxOutput(mx.sym.Custom(hidden, op_type="cli_double"), name="softmax")
"""


@pytest.fixture(autouse=True)
def _module() -> Iterator[None]:
    Path("doubling.py").write_text(textwrap.dedent(MODULE), encoding="utf-8")
    yield
    sys.modules.pop("doubling", None)


def planned() -> Plan:
    sys.path.insert(0, "")
    import doubling

    options: dict[str, Any] = {"strategy": "store_all", "realisation": "packed"}
    return plan(doubling.network(), data=(2, 6), **options)


@pytest.mark.long
def test_a_check_imports_the_module_of_the_operator(capsys: pytest.CaptureFixture[str]) -> None:
    """A thread of MXNet's that runs Custom ops takes 5 MB, or two do where the machine is busy."""
    arguments = ("--strategy", "store_all", "--realisation", "packed", "--steps", "1")
    code = cli.run(["check", "doubling:network", *SHAPE, *arguments, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["equal"]
    assert code == (Exit.OK if said["within"] else Exit.BROKEN)


@pytest.mark.long
def test_an_operator_of_the_script_itself_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned()
    monkeypatch.setattr(trial, "defining_modules", lambda: ["__main__", "no.such.module"])
    with pytest.raises(CostError, match="no Custom op 'cli_double'; define the op in a module"):
        trial.run_apart(made.schedule, made.trace, ctx=mx.cpu(0))


def unregistered(text: str) -> None:
    """Writes ``text`` with an operator that nobody defined to a file."""
    Path("lost.json").write_text(text.replace("cli_double", "nobodys"), encoding="utf-8")


def test_a_file_with_an_operator_that_is_not_defined_names_it(error: Any) -> None:
    made = planned()
    unregistered(made.trace.symbol.tojson())
    assert "module:function" in error(2, "plan", "lost.json", *SHAPE)
    unregistered(plan_text(made))
    with pytest.raises(ArgumentError, match=r"the Custom op 'nobodys'.*import the module"):
        load_plan("lost.json")


def test_a_plan_with_an_operator_that_mxnet_does_not_have_names_it() -> None:
    text = plan_text(planned()).replace("FullyConnected", "NobodysLayer")
    Path("plan.json").write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"the operator 'NobodysLayer'.*mx\.library\.load"):
        load_plan("plan.json")


def test_a_plan_where_a_network_is_asked_for_is_told(error: Any) -> None:
    symbol, shapes = residual_net(units=1)
    made = plan(symbol, strategy="store_all", **shapes)
    Path("plan.json").write_text(plan_text(made), encoding="utf-8")
    assert "is a plan; name the network" in error(2, "check", "plan.json", *SHAPE)
