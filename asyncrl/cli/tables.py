"""Tables and help texts of the commands on terminals of any width. Every decision about widths is made here.

Names, verdicts and figures are never cropped. What has no room beside them is left out or wrapped, by the kind of its column. Where
not even the most important columns fit side by side, each row becomes a paragraph.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# whole: never cropped; text: wrapped, words longer than _LONGEST_WORD are split; optional: left out where it does not fit;
# free: cropped, and left out where less than _LEAST_FREE characters remain
Kind = Literal["whole", "text", "optional", "free"]

_FRAME = 3  # characters around a cell
_LEAST_TEXT, _LONGEST_WORD, _LEAST_FREE = 16, 20, 12
_INDENT = 2  # of a row's paragraph, after its first line


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    kind: Kind = "whole"
    justify: Literal["left", "right"] = "left"


class FittedTable:
    """Drawn within the width at hand."""

    def __init__(
        self,
        title: str,
        columns: Sequence[Column | str],
        rows: Iterable[Sequence[str | Text]],
        *,
        show_header: bool = True,
        bold_row: int | None = None,
    ) -> None:
        """title: with markup; "": none. columns: a text is the name of a column that is never cropped. rows: of cells, each a text
        with markup or a Text. bold_row: the number of the row to be drawn bold."""
        self.title, self._show_header, self._bold_row = title, show_header, bold_row
        self._columns = [column if isinstance(column, Column) else Column(column) for column in columns]
        self._rows = [[cell if isinstance(cell, Text) else Text.from_markup(cell) for cell in row] for row in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text.from_markup(self.title, style="italic", overflow="fold")
        yield from self._table(options.max_width) or self._paragraphs(options.max_width)

    def _table(self, width: int) -> list[RenderableType]:
        """Empty if the width is too small."""
        needed = [self._needed(at) for at in range(len(self._columns))]
        shown = [at for at, column in enumerate(self._columns) if column.kind in ("whole", "text")]
        left = width - 1 - sum(needed[at] for at in shown)
        if left < 0:
            return []
        free = [at for at, column in enumerate(self._columns) if column.kind == "free"]
        for at in [at for at, column in enumerate(self._columns) if column.kind == "optional"]:
            if needed[at] + len(free) * (_LEAST_FREE + _FRAME) > left:
                break
            shown.append(at)
            left -= needed[at]
        free_width = left // max(len(free), 1) - _FRAME
        widths = {at: needed[at] - _FRAME for at in shown} | dict.fromkeys(
            free if free_width >= _LEAST_FREE else [], free_width
        )
        if not free:
            self._widen(widths, left)
        table = Table(show_header=self._show_header)
        for at in sorted(widths):
            column, crops = self._columns[at], self._columns[at].kind == "free"
            table.add_column(
                column.name,
                justify=column.justify,
                max_width=widths[at],
                min_width=None if crops else widths[at],
                no_wrap=crops,
                overflow="ellipsis" if crops else "fold",
            )
        for number, cells in enumerate(self._rows):
            table.add_row(*(cells[at] for at in sorted(widths)), style=self._style(number))
        return [table]

    def _style(self, number: int) -> str:
        return "bold" if number == self._bold_row else ""

    def _widen(self, widths: dict[int, int], left: int) -> None:
        """Give wrapped columns the characters that are left, the narrowest first: up to their longest word, then up to their
        longest line."""
        texts = [at for at in widths if self._columns[at].kind == "text"]
        for longest in (self._longest_word, self._longest_line):
            goals = {at: longest(at) for at in texts}
            while left > 0 and (narrow := [at for at in texts if widths[at] < goals[at]]):
                widths[min(narrow, key=widths.__getitem__)] += 1
                left -= 1

    def _longest_word(self, at: int) -> int:
        return max((cell_len(word) for row in self._rows for word in row[at].plain.split()), default=0)

    def _longest_line(self, at: int) -> int:
        return max((cell_len(line) for row in self._rows for line in row[at].plain.splitlines()), default=0)

    def _needed(self, at: int) -> int:
        """The smallest width of a column, with its frame."""
        column = self._columns[at]
        heads = column.name.split() if self._show_header else []
        least = self._longest_line(at)
        if column.kind == "text":
            least = max(min(self._longest_word(at), _LONGEST_WORD), min(least, _LEAST_TEXT))
        return max([least, *map(cell_len, heads)]) + _FRAME

    def _paragraphs(self, width: int) -> list[RenderableType]:
        """Each row as a paragraph: its first cell, and the others below it with the names of their columns. A cell is split only
        where it is longer than a line."""
        found: list[RenderableType] = []
        for number, cells in enumerate(self._rows):
            lines: list[Text] = []
            for column, cell in zip(self._columns, cells, strict=True):
                if not cell.plain or column.kind == "free":
                    continue
                named = self._show_header and column.name and lines
                text = Text(f"{column.name}: " if named else "").append_text(cell)
                starts = self._show_header and len(lines) < 2
                if lines and not starts and lines[-1].cell_len + 2 + text.cell_len <= width - _INDENT:
                    lines[-1].append("  ").append_text(text)
                else:
                    lines.append(text)
            for at, line in enumerate(lines):
                line.overflow, line.style = "fold", self._style(number)
                found.append(Padding(line, (0, 0, 0, _INDENT if at else 0)))
        return found


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps a text as it is written where it fits the terminal. Otherwise it wraps paragraphs, and what is written behind examples
    comes below them. Examples themselves stay whole, so that they can be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if all(len(line) <= self._width for line in text.splitlines()):
            return super()._fill_text(text, width, indent)
        lines: list[str] = []
        for line in text.splitlines():
            if lines and _is_prose(lines[-1]) and _is_prose(line):
                lines[-1] += f" {line}"
            else:
                lines.append(line)
        return "\n".join(part for line in lines for part in self._wrapped(line))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)

    def _wrapped(self, line: str) -> list[str]:
        wrap = partial(textwrap.wrap, width=self._width, break_long_words=False, break_on_hyphens=False)
        if len(line) <= self._width or _is_prose(line):
            return wrap(line) or [""]
        margin = " " * (len(line) - len(line.lstrip()))
        example, *rest = re.split(r"\s{3,}", line.strip(), maxsplit=1)
        meaning = [
            part
            for text in rest
            for part in wrap(text, initial_indent=f"{margin}    ", subsequent_indent=f"{margin}    ")
        ]
        return [margin + example, *meaning]


def _is_prose(line: str) -> bool:
    return bool(re.match(r"\S", line))
