"""Measure on the machine with the GPU, plan on a laptop: what an op costs is a file of JSON.

On the machine that trains (on one without a GPU, --ctx cpu measures that):

    python examples/profile_and_plan.py measure --ctx gpu --costs costs.json

Anywhere else, with the CPU's MXNet, whose plan is a Symbol to train there:

    python examples/profile_and_plan.py plan --costs costs.json --budget 60% --out planned.json
"""

from __future__ import annotations

import argparse

import mxnet as mx
from mxnet.gluon.model_zoo import vision

import memplan


def network(name: str) -> mx.sym.Symbol:
    """The same on both machines."""
    body = vision.get_model(name, classes=10, prefix="net_")(mx.sym.Variable("data"))
    return mx.sym.SoftmaxOutput(body, name="softmax")


def measure(options: argparse.Namespace) -> None:
    """Run some training steps here and write down what each op took."""
    table = memplan.profile(
        network(options.network), ctx=mx.Context(options.ctx), data=options.shape
    )
    table.save(options.costs)
    step = sum(table.seconds.values())
    print(f"{len(table.seconds)} different ops measured on {table.device}: {options.costs}")
    assert step > 0, "a step takes time"


def plan(options: argparse.Namespace) -> None:
    """Plan by the file; nothing runs here."""
    table = memplan.CostTable.load(options.costs)
    print(f"Planning for {table.device} ...", flush=True)
    net = network(options.network)
    common = {"budget": options.budget, "time_limit": options.seconds, "data": options.shape}
    plan = memplan.plan(net, costs=table, **common)
    guessed = memplan.plan(net, costs="roofline:v100", **common)
    print(plan)
    print(f"\nWithout measurements, by a V100's data sheet: {guessed.overhead:+.1%} time")
    if options.out:
        plan.symbol.save(options.out)

    whole = memplan.plan(net, costs=options.costs, strategy="store_all", data=options.shape)
    assert whole.unplanned.seconds == plan.unplanned.seconds, "a table can be named by its file"
    assert plan.total_nbytes <= plan.budget_nbytes < plan.unplanned.total_nbytes, "over budget"
    assert plan.schedule.recomputed, "the budget asks for recomputation"
    if options.out:
        symbol = mx.sym.load(options.out)
        assert symbol.attr_dict() == plan.symbol.attr_dict(), "the plan must survive the file"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["measure", "plan"])
    parser.add_argument("--costs", default="costs.json", help="the file of measurements")
    parser.add_argument("--ctx", default="cpu", choices=["cpu", "gpu"], help="to measure on")
    parser.add_argument("--network", default="mobilenet0.25", help="of MXNet's model zoo")
    parser.add_argument("--shape", type=int, nargs=4, default=[16, 3, 96, 96], help="of a batch")
    parser.add_argument("--budget", default="70%", help="of the unplanned step, or bytes")
    parser.add_argument("--seconds", type=float, default=10, help="for planning, at most")
    parser.add_argument("--out", help="where to write the planned Symbol")
    options = parser.parse_args()
    options.shape = tuple(options.shape)
    {"measure": measure, "plan": plan}[options.what](options)


if __name__ == "__main__":
    main()
