"""memplan compare, frontier, max-batch: many plans of one network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import memplan
from memplan.cli.options import (
    FILE,
    Arguments,
    default_of,
    parse_budget,
    parse_share,
    planning_options,
    strategy_option,
)
from memplan.cli.output import (
    Exit,
    attempt_figures,
    note,
    plan_figures,
    show_json,
    write,
)
from memplan.errors import ArgumentError
from memplan.planning.frontier import MOST_POINTS
from memplan.planning.plan import Attempt
from memplan.planning.realisation import usable
from memplan.strategies import Status

if TYPE_CHECKING:
    from memplan.planning.comparison import Comparison
    from memplan.planning.frontier import Frontier
    from memplan.planning.sizes_tried import BatchSize

_csv_option = click.option(
    "-o", "--output", type=FILE, help="Write the table there as CSV: bytes, and shares."
)


_STRATEGIES = default_of(memplan.compare, "strategies")


def _listed(text: str, option: str) -> list[str]:
    """What ``option`` lists; ArgumentError where that is nothing."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ArgumentError(f"{option} names none")
    return parts


@click.command()
@click.option(
    "--strategies",
    metavar="NAME,NAME,...",
    help="'memplan strategies' lists them.  [default: those of "
    f"{', '.join(_STRATEGIES)} that the realisation has]",
)
@click.option(
    "--budgets",
    metavar="BYTES,...",
    default="75%,50%,least",
    show_default=True,
    help="As of 'memplan plan'.",
)
@_csv_option
@planning_options
def compare(args: Arguments, strategies: str | None, budgets: str, output: Path | None) -> Exit:
    """Compare strategies at several budgets.

    A budget that a strategy does not meet is a row without figures; if no row has a plan, the exit
    code is 3 or 4. --time-limit is for each row.

    \b
    Examples:
      memplan compare model-symbol.json --shape data=32,3,224,224
      memplan compare model-symbol.json --shape data=32,3,224,224 --strategies chen_sqrt,search \\
          --budgets 4GiB,3GiB,least -o table.csv

    \b
    Keys of --json:
      rows, a list of: strategy, budget_nbytes, status, total_nbytes, allocated_nbytes, peak_nbytes,
      fixed_nbytes, optimizer_nbytes, workspace_nbytes, reserve_nbytes, overhead,
      lower_bound_overhead, planning_seconds, cut_by_clock, error (null where there is
      none)
    """
    with args.working("comparing", output, calls="compare") as (network, interrupt):
        options = args.options(network)
        names = memplan.strategies.names(usable(options["realisation"]))
        defaults = [name for name in _STRATEGIES if name in names]
        table = memplan.compare(
            network.symbol,
            strategies=defaults if strategies is None else _listed(strategies, "--strategies"),
            budgets=[parse_budget(text) for text in _listed(budgets, "--budgets")],
            **options,
        )
    _show(args, table, {"rows": list(map(attempt_figures, table.rows))}, output)
    return Exit.INTERRUPTED if interrupt.has_come else _code(table.rows)


def _show(
    args: Arguments,
    table: Comparison | Frontier | BatchSize,
    figures: Mapping[str, Any],
    output: Path | None,
) -> None:
    """Write ``table`` to ``output`` as CSV, and show it; as JSON the ``figures``."""
    if output is not None:
        write(output, table.to_csv())
        note(f"Wrote {output}.")
    if args.as_json:
        show_json(figures)
    else:
        click.echo(str(table))


def _code(rows: Iterable[Attempt]) -> Exit:
    """OK if any budget is met; else whether it is proved that none can be."""
    attempts = list(rows)
    if any(row.plan is not None for row in attempts):
        return Exit.OK
    is_proved = all(row.status is Status.INFEASIBLE for row in attempts)
    return Exit.PROVED if is_proved else Exit.NOT_FOUND


@click.command()
@strategy_option
@click.option(
    "--budgets",
    metavar="COUNT|BYTES,...",
    help="How many, spread evenly from the unplanned step to the least memory, or which.  "
    "[default: 8]",
)
@_csv_option
@planning_options
def frontier(args: Arguments, strategy: str, budgets: str | None, output: Path | None) -> Exit:
    """What less memory costs: plans from the unplanned step down to the least memory.

    A budget without a plan is named below the table; if none has a plan, the exit code is 3 or 4.
    --time-limit is for each point.

    \b
    Examples:
      memplan frontier model-symbol.json --shape data=32,3,224,224
      memplan frontier model-symbol.json --shape data=32,3,224,224 --budgets 12 -o frontier.csv
      memplan frontier model-symbol.json --shape data=32,3,224,224 --budgets 4GiB,3GiB,2GiB

    \b
    Keys of --json:
      rows, a list of: strategy, budget_nbytes, status, total_nbytes, allocated_nbytes, peak_nbytes,
      fixed_nbytes, optimizer_nbytes, workspace_nbytes, reserve_nbytes, overhead,
      lower_bound_overhead, planning_seconds, cut_by_clock, error; from the most bytes to
      the fewest
      left_out, a list of the same: budgets without a plan, and plans that another one beats
    """
    with args.working("looking for the frontier", output, calls="frontier") as (network, interrupt):
        options = args.options(network)
        if budgets is not None:
            # Few digits are a count, more are bytes.
            digits = re.fullmatch("[0-9]{1,4}", budgets.strip())
            count = digits is not None and int(budgets) <= MOST_POINTS
            options["budgets"] = (
                int(budgets) if count else list(map(parse_budget, _listed(budgets, "--budgets")))
            )
        curve = memplan.frontier(network.symbol, strategy=strategy, **options)
    lists = {"rows": curve.points, "left_out": curve.left_out}
    figures = {name: list(map(attempt_figures, attempts)) for name, attempts in lists.items()}
    _show(args, curve, figures, output)
    # The first point is the unplanned step, which needs no plan.
    attempts = (*curve.points[1:], *curve.left_out)
    return Exit.INTERRUPTED if interrupt.has_come else _code(attempts)


@click.command("max-batch")
@strategy_option
@click.option(
    "--budget",
    metavar="BYTES",
    required=True,
    help="For the whole step on the device, such as 16GiB.",
)
@click.option(
    "--max-overhead",
    type=parse_share,
    metavar="SHARE",
    help="Recompute at most this share of the step's time, such as 0.3 or 30%.",
)
@_csv_option
@planning_options
def max_batch(
    args: Arguments, strategy: str, budget: str, max_overhead: float | None, output: Path | None
) -> Exit:
    """The largest batch that trains within a budget.

    In --shape the letter N stands for the batch. --time-limit is for the whole search.

    \b
    Examples:
      memplan max-batch model-symbol.json --shape data=N,3,224,224 --budget 16GiB
      memplan max-batch nets:lstm --shape data=35,N,512 --shape label=35,N --budget 8GiB \\
          --max-overhead 0.2

    \b
    Keys of --json:
      batch_size, too_large (the smallest that did not fit, or only at more than --max-overhead,
      or null), plan (as of 'memplan plan'), tried, a list of: batch_size, fits (the budget and
      --max-overhead), strategy, budget_nbytes, status, total_nbytes,
      allocated_nbytes, peak_nbytes, fixed_nbytes, optimizer_nbytes, workspace_nbytes,
      reserve_nbytes, overhead, lower_bound_overhead, planning_seconds, cut_by_clock, error
    """
    title = "looking for the batch size"
    with args.working(title, output, calls="max_batch_size") as (network, interrupt):
        result = memplan.max_batch_size(
            network.symbol,
            budget,
            strategy=strategy,
            max_overhead=max_overhead,
            **args.options(network),
        )
    trials = [
        {"batch_size": trial.batch_size, "fits": trial.fits, **attempt_figures(trial.attempt)}
        for trial in result.tried
    ]
    sizes = {"batch_size": result.batch_size, "too_large": result.too_large}
    figures = sizes | {"plan": plan_figures(result.plan), "tried": trials}
    _show(args, result, figures, output)
    return Exit.INTERRUPTED if interrupt.has_come else Exit.OK
