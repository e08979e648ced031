"""memplan plan, memplan explain: one plan, and why it is as it is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

import memplan
from memplan.cli.next_step import next_step
from memplan.cli.options import (
    FILE,
    Arguments,
    budget_option,
    planning_options,
    strategy_option,
)
from memplan.cli.output import Exit, note, plan_figures, show_json, write
from memplan.cli.progress import working
from memplan.errors import ArgumentError
from memplan.planning.plan import Plan
from memplan.step.liveness import at_peak
from memplan.views.explain import memory, why
from memplan.views.report import report_html


@click.command()
@strategy_option
@budget_option
@click.option("-o", "--output", type=FILE, help="Write the planned network there.")
@click.option("--report", type=FILE, help="Write a report there: one HTML file, with pictures.")
@planning_options
def plan(
    args: Arguments, strategy: str, budget: Any, output: Path | None, report: Path | None
) -> Exit:
    """Plan NETWORK to train within a budget.

    The output is a plan file: memplan.mxnet.Module(net, plan=load_plan(FILE)) trains by it
    (load_plan is in memplan.mxnet.plan_file). With --realisation mirror it is a Symbol with MXNet's
    attributes set, for any training script.

    \b
    Examples:
      memplan plan model-symbol.json --shape data=32,3,224,224 --budget 4GiB -o plan.json
      memplan plan model-symbol.json --shape data=32,3,224,224 --realisation mirror -o planned.json
      memplan plan model-symbol.json --shape data=8,3,512,512 --budget 60% --costs costs.json
      memplan plan nets:unet --shape data=1,3,1024,1024 --shape label=1,1024,1024 --report plan.html
      memplan plan model-symbol.json --shape data=64,128 --dtype data=float16 --json

    \b
    Keys of --json:
      status, strategy, realisation, costs, budget_nbytes (null: least), overhead,
      lower_bound_overhead, planning_seconds, cut_by_clock, recomputed (names of ops), output,
      report, and for planned and unplanned: peak_nbytes, allocated_nbytes, fixed_nbytes,
      optimizer_nbytes, workspace_nbytes, workspace_source, reserve_nbytes, total_nbytes, seconds,
      match_range
    """
    with args.working("planning", output, report) as (network, interrupt):
        options = args.options(network)
        result = memplan.plan(network.symbol, strategy=strategy, budget=budget, **options)
        if output is not None:
            _write_network(result, output)
        if report is not None:
            write(report, report_html(result))
    if args.as_json:
        paths = {"output": output, "report": report}
        names = {name: None if path is None else str(path) for name, path in paths.items()}
        show_json(plan_figures(result) | names)
    else:
        click.echo(str(result))
        note(next_step(result, output, args, network))
    return Exit.INTERRUPTED if interrupt.has_come else Exit.OK


def _write_network(plan: Plan, output: Path) -> None:
    from memplan.mxnet.plan_file import plan_text
    from memplan.mxnet.trace.symbol_json import text_of

    is_file = plan.trace.form.spells_out_backward
    write(output, plan_text(plan) if is_file else text_of(plan.symbol))


@click.command()
@strategy_option
@budget_option
@planning_options
@click.argument("name", required=False)
def explain(args: Arguments, strategy: str, budget: Any, name: str | None) -> Exit:
    """What holds the memory, or why NAME (an op or tensor) is kept or recomputed.

    NETWORK is planned as 'memplan plan' does it, or is a plan file that it wrote, for which there
    are no options but --json. What it writes with --realisation mirror is a Symbol, which is
    planned anew.

    \b
    Examples:
      memplan explain model-symbol.json --shape data=32,3,224,224 --budget 60%
      memplan explain model-symbol.json --shape data=32,3,224,224 --budget 60% stage1_conv1
      memplan explain model-symbol.json --shape data=32,3,224,224 --strategy store_all
      memplan explain plan.json --json

    \b
    Keys of --json:
      plan (as of 'memplan plan'); with NAME: name, reason; without: peak_nbytes and alive, a list
      of tensor, op, kind, layer, role, nbytes, since and until (steps), reader
    """
    with working("planning") as interrupt:
        plan, is_other = _planned(args, strategy, budget)
        if name is not None:
            reason = why(plan.schedule, name, plan.trace.shapes)
    if is_other:
        note(
            f"{args.network} is a Symbol with flags of a mirror plan, which do not say all of the "
            f"plan: this is about a new one, by the options given here."
        )
    if not args.as_json:
        click.echo(memory(plan) if name is None else reason)
    elif name is not None:
        show_json({"plan": plan_figures(plan), "name": name, "reason": reason})
    else:
        alive = [
            dataclasses.asdict(tensor) | {"role": tensor.role.value}
            for tensor in at_peak(plan.schedule)
        ]
        show_json({"plan": plan_figures(plan), "peak_nbytes": plan.peak_nbytes, "alive": alive})
    return Exit.INTERRUPTED if interrupt.has_come else Exit.OK


def _planned(args: Arguments, strategy: str, budget: Any) -> tuple[Plan, bool]:
    """The plan to explain; is it another one than that by which NETWORK was flagged?"""
    from memplan.mxnet.plan_file import is_plan, load_plan
    from memplan.mxnet.trace.flags import has_flags

    if is_plan(Path(args.network)):
        _refuse_options(args.network)
        return load_plan(args.network), False
    network = args.load()
    options = args.options(network)
    plan = memplan.plan(network.symbol, strategy=strategy, budget=budget, **options)
    return plan, has_flags(network.symbol)


def _refuse_options(path: str) -> None:
    """ArgumentError for an option that says how to plan what is a plan already."""
    context = click.get_current_context()
    for option in context.command.params:
        is_given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if isinstance(option, click.Option) and option.name != "as_json" and is_given:
            raise ArgumentError(
                f"{path!r} is a plan already, so {option.opts[0]} says nothing of it; leave the "
                "option out, or name the network"
            )
