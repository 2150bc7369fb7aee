"""Tables that fit a terminal: where it is too narrow, whole columns are left out, and no text is cut."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 10_000
_GAP = 2


def open_console() -> Console:
    """Return the console of standard output; without a terminal it is as wide as its lines, unless COLUMNS is set."""
    console = Console(highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = _PIPE_WIDTH
    return console


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a :class:`FittedTable`.

    Attributes:
        name: Head of the column.
        justify: Side to which its cells are aligned.
        rank: Where there is too little room, the columns of the highest rank are left out first; 0: never left out.
    """

    name: str
    justify: Literal["left", "right"] = "right"
    rank: int = 0


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table with as many of its columns as the console has room for.

    Names are in columns of rank 0: where even these do not fit, they continue on the next line.

    Attributes:
        columns: The columns.
        rows: Cells of each row, one per column.
        styles: Style of each row; empty: none.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Text]]
    styles: Sequence[str] = ()

    def fitting(self, width: int) -> list[int]:
        """Return the positions of the columns that are shown in so many terminal columns."""
        widths = [
            max([cell_len(column.name), *(row[at].cell_len for row in self.rows)])
            for at, column in enumerate(self.columns)
        ]
        shown = list(range(len(self.columns)))
        for rank in sorted({column.rank for column in self.columns} - {0}, reverse=True):
            if sum(widths[at] + _GAP for at in shown) - _GAP <= width:
                break
            shown = [at for at in shown if self.columns[at].rank != rank]
        return shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the columns that fit."""
        shown = self.fitting(options.max_width)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        for at in shown:
            column = self.columns[at]
            table.add_column(Text(column.name, style="dim"), justify=column.justify, overflow="fold")
        for row, style in zip(self.rows, self.styles or [""] * len(self.rows), strict=True):
            table.add_row(*(row[at] for at in shown), style=style)
        yield table


@dataclass(frozen=True, slots=True)
class Facts:
    """Short texts one after the other, broken into lines between them alone.

    Attributes:
        texts: The texts.
    """

    texts: Sequence[Text]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the texts, as many on a line as fit."""
        line = Text()
        for text in self.texts:
            if line and line.cell_len + 3 + text.cell_len > options.max_width:
                yield line
                line = Text()
            line = Text.assemble(line, "   ", text) if line else text.copy()
        if line:
            yield line
