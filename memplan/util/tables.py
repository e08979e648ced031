"""Tables in plain text."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence

# Columns: wider than any terminal, as whoever prints a table cuts it to his own.
WIDEST = 10_000


def text_table(
    rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,), widths: Sequence[int] = ()
) -> list[str]:
    """The lines of a table of ``rows``, two spaces between columns.

    The columns in ``left`` begin at one place, the others end at one. The first columns are at
    least as wide as ``widths``.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for place in range(len(rows[0])):
        width = widths[place] if place < len(widths) else 0
        justify = "left" if place in left else "right"
        table.add_column(justify=justify, min_width=width, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=WIDEST, markup=False, emoji=False, highlight=False).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]
