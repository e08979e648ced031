"""memplan profile: what the ops of a network cost on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import click

import memplan
from memplan.cli.options import FILE, Arguments, step_options
from memplan.cli.output import Exit, note, show_json, write
from memplan.step.costs import CostTable

SHOWN = 10


@click.command()
@click.option("-o", "--output", type=FILE, help="Write the costs there as JSON, for --costs.")
@click.option("--repeats", default=5, show_default=True, help="Steps that are measured.")
@click.option("--warmup", default=2, show_default=True, help="Steps before them.")
@step_options
def profile(args: Arguments, output: Path | None, repeats: int, warmup: int) -> Exit:
    """Measure every op of a training step of NETWORK on this machine.

    The costs are for the same network, shapes and --realisation, and for mirrored plans. Measure
    where you train; the file serves for planning anywhere.

    \b
    Examples:
      memplan profile model-symbol.json --shape data=32,3,224,224 --ctx gpu -o costs.json
      memplan plan model-symbol.json --shape data=32,3,224,224 --budget 4GiB --costs costs.json

    \b
    Keys of --json:
      device, shapes, output, seconds (of each op by its signature: operator, attributes, shapes and
      dtypes)
    """
    with args.working("profiling", output, calls="profile", keeps_best=False) as (network, _):
        options = args.options(network)
        table = memplan.profile(network.symbol, repeats=repeats, warmup=warmup, **options)
        if output is not None:
            write(output, table.to_json())
    if args.as_json:
        place = None if output is None else str(output)
        data = {"device": table.device, "shapes": table.shapes, "output": place}
        show_json(data | {"seconds": table.seconds})
    else:
        click.echo(_summary(table))
        note(f"\nWrote {output}." if output else "\nTo keep the costs: -o FILE")
    return Exit.OK


def _summary(table: CostTable) -> str:
    """The most expensive ops."""
    ranked = sorted(table.seconds.items(), key=lambda item: -item[1])
    lines = [f"{len(ranked)} different ops, measured on {table.device}. The most expensive:", ""]
    for signature, seconds in ranked[:SHOWN]:
        kind, _, inputs, _ = json.loads(signature)
        shapes = ["x".join(map(str, info[:-1])) for info in inputs if info]
        lines.append(f"{1e3 * seconds:10.3f} ms  {kind}  {', '.join(shapes[:3])}")
    return "\n".join(lines)
