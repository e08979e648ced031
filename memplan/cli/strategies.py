"""memplan strategies: what there is to choose from."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import click

import memplan
from memplan.cli.output import Exit, show_json
from memplan.errors import MemplanError
from memplan.strategies import REALISATIONS, in_words


@click.command()
@click.option("--realisation", type=click.Choice(REALISATIONS), help="Only those for it.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def strategies(realisation: str | None, as_json: bool) -> Exit:
    """The strategies, those of installed packages included.

    \b
    Examples:
      memplan strategies
      memplan strategies --realisation explicit

    \b
    Keys of --json:
      strategies, a list of: name, realisation, summary, options (name: default)
    """
    kinds = REALISATIONS if realisation is None else (realisation,)
    table = [_described(name, kind) for kind in kinds for name in memplan.strategies.names(kind)]
    if as_json:
        show_json({"strategies": table})
        return Exit.OK
    for kind in kinds:
        rows = [row for row in table if row["realisation"] == kind]
        width = max(len(row["name"]) for row in rows)
        click.echo(f"For --realisation {kind}:")
        for row in rows:
            click.echo(f"  {row['name']:{width}}  {row['summary']}")
    return Exit.OK


def _described(name: str, realisation: str) -> dict[str, Any]:
    try:
        strategy = memplan.strategies.create(name, realisation=realisation)
    except Exception as error:  # a plugin raises whatever it likes
        summary = str(error) if isinstance(error, MemplanError) else f"does not load: {error!r}"
        return {"name": name, "realisation": realisation, "summary": summary, "options": {}}
    fields: tuple[Any, ...] = ()
    if dataclasses.is_dataclass(strategy):  # which one of a plugin may not be
        fields = dataclasses.fields(strategy)
    names = in_words(field.name for field in fields)
    summary = (inspect.getdoc(strategy) or "").partition("\n\n")[0].replace("\n", " ")
    return {
        "name": name,
        "realisation": realisation,
        "summary": re.sub(r"(:\w+:)?`+([^`]+)`+", r"\2", summary),
        "options": {option: repr(getattr(strategy, option)) for option in names},
    }
