"""memplan check: is a plan's promise kept on this machine?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

import memplan
from memplan.cli.options import Arguments, budget_option, planning_options, strategy_option
from memplan.cli.output import Exit, note, plan_figures, show_json
from memplan.util.interrupts import leaving_in_order

if TYPE_CHECKING:
    from memplan.mxnet.check import Check
    from memplan.planning.plan import Plan


_FOR_CPU = (
    "This plans for --ctx cpu, by its costs, and counts the workspace of operators: 'memplan plan' "
    "without --ctx makes another plan. Name --ctx in both."
)


@click.command()
@strategy_option
@budget_option
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Steps that are timed.",
)
@planning_options
def check(args: Arguments, strategy: str, budget: Any, steps: int) -> Exit:
    """Train NETWORK a few steps by a plan and without, and compare what was promised.

    NETWORK is planned as 'memplan plan' does it for --ctx (default here: cpu; name it in both, as a
    plan for no context is another one). Each of the two trains there in a process of its own, from
    equal random numbers, by --optimizer (default: sgd). Bytes are the device's own count: by how
    much the process grew, or on a GPU what the driver says is in use. Results are compared bit for
    bit. Where the step without a plan cannot run, as it does not fit, the exit code says whether
    the plan keeps its promise of memory, and nothing of results.

    \b
    Examples:
      memplan check model-symbol.json --shape data=8,3,64,64 --budget 60% --realisation packed
      memplan check model-symbol.json --shape data=32,3,224,224 --budget 4GiB --ctx gpu --json

    \b
    Keys of --json:
      plan (as of 'memplan plan'), device, within (the promise of memory), equal (the results;
      null where the unplanned step did not run), unplanned_error (why it did not, or null),
      overhead (promised, measured), unlike (names of what differs, by kind), largest_difference (in
      parts of the largest number of its array; null where one of the two has no numbers),
      repeatable (whether two runs without a plan are equal; true where nothing differs), and for
      planned and unplanned: promised_nbytes, grown_nbytes, seconds
    """
    from memplan.mxnet.check import check as checked
    from memplan.mxnet.load import context

    with args.working("checking", keeps_best=False) as (network, interrupt):
        options = args.options(network)
        if options.get("ctx") is None:
            note(_FOR_CPU)
            options["ctx"] = context("cpu")
        plan = memplan.plan(network.symbol, strategy=strategy, budget=budget, **options)
        if interrupt.has_come:  # and has ended the search with the best plan so far
            raise KeyboardInterrupt
        with leaving_in_order():
            result = checked(
                plan, ctx=options["ctx"], steps=steps, optimizer=args.optimizer or "sgd"
            )
    if args.as_json:
        show_json(_figures(plan, result))
    else:
        click.echo(f"{plan}\n\n{result}")
    return Exit.OK if result.is_within and result.is_equal is not False else Exit.BROKEN


def _figures(plan: Plan, result: Check) -> dict[str, Any]:
    """What ``--json`` shows."""
    from memplan.mxnet.check import promised_growth

    largest = result.largest_difference
    sides = {
        "planned": (plan.footprint, result.planned),
        "unplanned": (plan.unplanned, result.unplanned),
    }
    return {
        "plan": plan_figures(plan),
        "device": result.device,
        "within": result.is_within,
        "equal": result.is_equal,
        "unplanned_error": result.unplanned_error,
        "overhead": {"promised": plan.overhead, "measured": result.measured_overhead},
        "unlike": result.unlike,
        "largest_difference": None if math.isinf(largest) else largest,
        "repeatable": result.is_repeatable,
    } | {
        name: {
            "promised_nbytes": promised_growth(footprint),
            "grown_nbytes": None if trial is None else trial.grown_nbytes,
            "seconds": None if trial is None else trial.seconds,
        }
        for name, (footprint, trial) in sides.items()
    }
