"""A table that fits: low-priority columns are dropped, flexible ones grow, rows scroll.

Everything but `GridState`, which holds the user's cursor and scroll position, is pure. `render`
returns text for exactly the given cells, so one table serves 80 and 200 columns and is tested
without a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from textual.content import Content

from atoll.coordinator.run.text import fit

RowT = TypeVar("RowT")


@dataclass(frozen=True, kw_only=True)
class Column(Generic[RowT]):
    """One column of a table whose rows are `RowT`."""

    title: str
    width: int
    """Minimum width in cells."""
    draw: Callable[[RowT, int], Content]
    """Returns the row's cell for a given width; may be shorter, never longer."""
    priority: int
    """Columns with the highest number are dropped first; 0 always stays."""
    grow_to: int = 0
    """Maximum width of a flexible column, in cells."""
    right: bool = False


@dataclass(kw_only=True)
class GridState:
    """The user's cursor and scroll position."""

    cursor: int = 0
    top: int = 0

    def move(self, rows: int, num_rows: int, page: int) -> None:
        """Move the cursor and keep it within a view of `page` rows."""
        self.cursor = min(max(0, self.cursor + rows), max(0, num_rows - 1))
        self.top = min(self.top, self.cursor, max(0, num_rows - page))
        self.top = max(self.top, self.cursor - page + 1, 0)


def chosen(columns: Sequence[Column[RowT]], width: int) -> list[tuple[Column[RowT], int]]:
    """Return the columns that fit side by side in `width` cells, with their widths."""
    kept = list(columns)
    while len(kept) > 1 and sum(column.width for column in kept) + len(kept) - 1 > width:
        kept.remove(max(kept, key=lambda column: column.priority))
    widths = [max(1, min(column.width, width)) for column in kept]
    spare = width - sum(widths) - (len(kept) - 1)
    while spare > 0 and (i := _neediest(kept, widths)) is not None:
        widths[i] += 1
        spare -= 1
    return list(zip(kept, widths, strict=True))


def _neediest(columns: Sequence[Column[RowT]], widths: Sequence[int]) -> int | None:
    """The flexible column that is furthest below its maximum width."""
    wanting = [i for i, column in enumerate(columns) if widths[i] < column.grow_to]
    return min(wanting, key=lambda i: widths[i] / columns[i].grow_to, default=None)


def render(
    columns: Sequence[Column[RowT]],
    rows: Sequence[RowT],
    width: int,
    height: int,
    state: GridState,
    *,
    row_style: Callable[[RowT], str] = lambda row: "",
    active: bool = False,
) -> Content:
    """Draw the heading and as many rows as fit in `width` x `height` cells."""
    if width < 2 or height < 1:
        return Content("")
    page = height - 1
    state.move(0, len(rows), max(1, page))
    bar = _scrollbar(len(rows), page, state.top)
    fitted = chosen(columns, width - bool(bar))
    gap = _gap(fitted, width - bool(bar))
    lines = [_heading(fitted, gap)]
    for i, row in enumerate(rows[state.top : state.top + page]):
        line = Content(" " * gap).join([_cell(column, row, cells) for column, cells in fitted])
        line = line.stylize_before(row_style(row))
        if state.top + i == state.cursor:
            line = line.pad_right(max(0, width - bool(bar) - line.cell_length))
            line = line.stylize_before("on $cursor-focus" if active else "on $cursor")
        lines.append(line + bar[i] if bar else line)
    return Content("\n").join(lines)


def _gap(fitted: Sequence[tuple[Column[RowT], int]], width: int) -> int:
    """Spaces between columns, up to three, from the cells that no column takes."""
    used = sum(cells for _, cells in fitted)
    return min(3, max(1, (width - used) // max(1, len(fitted) - 1)))


def _heading(fitted: Sequence[tuple[Column[RowT], int]], gap: int) -> Content:
    titles = [fit(column.title, cells, right=column.right) for column, cells in fitted]
    return Content.assemble((" " * gap).join(titles)).stylize("$dim")


def _cell(column: Column[RowT], row: RowT, cells: int) -> Content:
    content = column.draw(row, cells).truncate(cells, ellipsis=True)
    pad = max(0, cells - content.cell_length)
    return content.pad_left(pad) if column.right else content.pad_right(pad)


def _scrollbar(num_rows: int, page: int, top: int) -> list[Content]:
    """One cell for each visible row, or nothing if all rows are visible."""
    if page < 1 or num_rows <= page:
        return []
    thumb = max(1, page * page // num_rows)
    start = round(top / (num_rows - page) * (page - thumb))
    inside = range(start, start + thumb)
    return [
        Content.styled("┃", "$dim") if i in inside else Content.styled("│", "$track")
        for i in range(page)
    ]
