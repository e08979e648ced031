"""Tables in plain text."""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Collection, Sequence
from typing import Any

# Columns: wider than any terminal, as whoever prints a table cuts it to his own.
WIDEST = 10_000


def text_table(
    rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,), widths: Sequence[int] = ()
) -> list[str]:
    """The lines of a table of ``rows``, two spaces between columns.

    The columns in ``left`` begin at one place, the others end at one. The first columns are at
    least as wide as ``widths``.
    """
    console_of, table_of = _rich()
    table = table_of.grid(padding=(0, 2))
    for place in range(len(rows[0])):
        width = widths[place] if place < len(widths) else 0
        justify = "left" if place in left else "right"
        table.add_column(justify=justify, min_width=width, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    # In a notebook rich would display the table, and write nothing here; where FORCE_COLOR is set
    # it takes the text for a terminal, of 80 columns if that is a dumb one.
    console = console_of(
        file=text,
        width=WIDEST,
        force_terminal=False,
        force_jupyter=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    console.print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


@functools.cache
def _rich() -> tuple[Any, Any]:
    """rich's Console and Table.

    rich draws one of Python's random numbers as it is loaded: that is put back, or a script that
    shows a plan would go on with other numbers than one that does not.
    """
    state = random.getstate()
    try:
        from rich.console import Console
        from rich.table import Table
    finally:
        random.setstate(state)
    return Console, Table
