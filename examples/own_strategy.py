"""A strategy of one's own: thirty lines, then it is known by its name like the others.

A strategy is a frozen dataclass whose fields are its options, with one method: of a problem, which
is a training graph and a budget, it makes a schedule. It never reports its own score; memplan
measures that, and checks the schedule. In a package, an entry point makes it known without a call
of ``register``:

    setup(..., entry_points={"memplan.strategies": ["cheap_ops = my_package:CheapOps"]})
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import mxnet as mx
from mxnet.gluon.model_zoo import vision

import memplan
from memplan.strategies import Outcome, Problem


@dataclass(frozen=True)
class CheapOps:
    """Recomputes what gives the most bytes for a second, as many ops as the budget needs.

    ``nplans`` is how many lengths of that list are tried.
    """

    nplans: int = 16

    def solve(self, problem: Problem) -> Outcome:
        """The cheapest plan tried that fits the budget; without one, that of the least memory."""
        graph = problem.graph

        def nbytes_per_second(op: int) -> float:
            nbytes = sum(graph.tensors[tensor].nbytes for tensor in graph.ops[op].outputs)
            return nbytes / max(graph.ops[op].seconds, 1e-9)

        forward = [op for op in range(graph.nforward) if graph.ops[op].recomputable]
        ops = sorted(forward, key=nbytes_per_second, reverse=True)
        lengths = [len(ops) * number // self.nplans for number in range(self.nplans + 1)]
        return problem.best_of(problem.space.keeping(graph, ops[n:]) for n in lengths)


memplan.strategies.register("cheap_ops", CheapOps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="mobilenet1.0", help="of MXNet's model zoo")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224, help="of a picture")
    parser.add_argument("--budgets", nargs="+", default=["85%", "75%"])
    options = parser.parse_args()

    body = vision.get_model(options.network, classes=10)(mx.sym.Variable("data"))
    net = mx.sym.SoftmaxOutput(body, name="softmax")
    shape = (options.batch, 3, options.size, options.size)
    strategies = ["memonger", "cheap_ops", CheapOps(nplans=4)]
    table = memplan.compare(net, strategies=strategies, budgets=options.budgets, data=shape)
    print(table)

    assert "cheap_ops" in memplan.strategies.names(), "the strategy is not registered"
    plans = [row.plan for row in table.rows if row.strategy == "cheap_ops" and row.plan]
    assert plans, "it finds no plan within any budget"
    for plan in plans:
        assert plan.total_nbytes <= plan.budget_nbytes, "a plan must be within its budget"
        assert plan.schedule.recomputed, "and it recomputes what it takes for that"
    module = mx.mod.Module(plans[-1].symbol)
    module.bind([("data", shape)], [("softmax_label", shape[:1])])  # any Module takes it


if __name__ == "__main__":
    main()
