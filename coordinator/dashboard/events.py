"""The event log as lines of styled text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from textual.content import Content

from atoll.coordinator.report.view import IMPORTANT, event_text, names, naming
from atoll.coordinator.run import text
from atoll.coordinator.run.status import Event, RunStatus

LEVEL_STYLES: Final = {
    "info": "$accent",
    "warning": "$warn",
    "error": "$bad",
}
_MARKS: Final = {"info": "•", "warning": "▲", "error": "■"}
NEWS_S: Final = 60.0  # a few rounds: a viewer has read it by then, and the log keeps it
_SOURCE_CELLS: Final = 12
_SOURCE_FROM_CELLS: Final = 72  # in a narrower pane a source column leaves too little for the text


def _event_lines(
    event: Event, width: int, known: Mapping[str, str], name: Callable[[str], str]
) -> list[Content]:
    """One event; a long one wraps under its own text."""
    style = LEVEL_STYLES[event.level]
    head = Content.assemble(
        (f" {text.clock_time(event.at)} ", "$dim"),
        (f"{_MARKS[event.level]} ", style),
    )
    source = known.get(event.source) or text.short_id(event.source)
    if width >= _SOURCE_FROM_CELLS:
        head += Content.assemble((f"{text.fit(source, _SOURCE_CELLS)} ", "$dim"))
    loud = style if event.level in IMPORTANT else "$text-plain"
    prefix = f"{source}: " if source and width < _SOURCE_FROM_CELLS else ""
    body = Content.assemble((prefix, "$dim"), (event_text(event, name), loud))
    wrapped = body.wrap(max(8, width - head.cell_length))
    indent = Content(" " * head.cell_length)
    return [(head if i == 0 else indent) + line for i, line in enumerate(wrapped)]


def alert(status: RunStatus, width: int) -> Content | None:
    """Return the newest recent warning or error in one line, or None."""
    news = [
        event
        for event in status.events
        if event.level in IMPORTANT and status.now - event.at < NEWS_S
    ]
    if not news:
        return None
    newest, known = news[-1], names(status)
    source = known.get(newest.source) or text.short_id(newest.source)
    more = f" · {len(news) - 1} more" if len(news) > 1 else ""
    style = LEVEL_STYLES[newest.level]
    line = Content.assemble(
        (f" {_MARKS[newest.level]} ", style),
        (f"{text.clock_time(newest.at)} {source}: ", "$dim"),
        (event_text(newest, naming(known)), style),
    )
    room = max(0, width - text.cells(more) - 1)
    return line.truncate(room, ellipsis=True) + Content.assemble((more, "$dim"))


def log_lines(status: RunStatus, width: int) -> list[Content]:
    """Return all events as lines, oldest first."""
    known = names(status)
    name = naming(known)
    return [line for event in status.events for line in _event_lines(event, width, known, name)]
