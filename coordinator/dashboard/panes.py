"""The widgets: each turns a `View` into text for its own size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Generic

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Size
from textual.markup import escape
from textual.message import Message
from textual.widget import Widget

from atoll.coordinator.dashboard import peers, rounds, stages
from atoll.coordinator.dashboard.arranging import Arrangement
from atoll.coordinator.dashboard.chart import Series, plot, smoothed
from atoll.coordinator.dashboard.events import log_lines
from atoll.coordinator.dashboard.grid import GridState, RowT
from atoll.coordinator.dashboard.grid import render as render_grid
from atoll.coordinator.dashboard.header import header, num_lines
from atoll.coordinator.dashboard.losses import LossCurve, loss_curve
from atoll.coordinator.report.mine import tokens_of
from atoll.coordinator.report.view import View, label, names, num_present, sorted_peers
from atoll.coordinator.run import text
from atoll.coordinator.run.status import PeerStatus, RoundSummary

MIN_SMOOTHED = 3  # fewer rounds have no noise to smooth
WHEEL_ROWS = 3  # as terminals scroll for one notch


class Drawn(Widget):
    """A widget that draws a view."""

    view = View()

    def show(self, view: View) -> None:
        """Draw this view."""
        raise NotImplementedError


class RunHeader(Drawn):
    """The run at a glance."""

    def show(self, view: View) -> None:
        """Draw this view; its age changes each time."""
        lines_before = num_lines(self.view, self.size.width)
        self.view = view
        self.refresh(layout=num_lines(view, self.size.width) != lines_before)

    def render(self) -> Content:
        """The header's text."""
        return header(self.view, self.size.width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return as many lines as the facts need at this width."""
        return num_lines(self.view, width)


class Pane(Drawn, can_focus=True):
    """A framed part of the screen: can be focused, zoomed and, if space is short, hidden."""

    heading: ClassVar[str] = ""

    class Seen(Message):
        """The pane was hidden or shown."""

    def on_show(self) -> None:
        """Notify the app."""
        self.post_message(self.Seen())

    def on_hide(self) -> None:
        """Notify the app."""
        self.post_message(self.Seen())

    def show(self, view: View) -> None:
        """Draw this view if anything that the pane shows has changed."""
        changed = self.facts(view) != self.facts(self.view)
        self.view = view
        if changed:
            self.changed()
            self.refresh()

    def facts(self, view: View) -> object:
        """Return the facts that the pane shows: it is redrawn when they change."""
        raise NotImplementedError

    def changed(self) -> None:
        """Prepare to draw new facts."""


class LinesPane(Pane):
    """A pane with more lines than fit; keys and the wheel scroll it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
    ]

    @property
    def page_rows(self) -> int:
        """Lines per page."""
        raise NotImplementedError

    def action_move(self, num_rows: int) -> None:
        """Move by this many lines."""
        raise NotImplementedError

    def action_page(self, num_pages: int) -> None:
        """Move by this many pages."""
        self.action_move(num_pages * self.page_rows)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll down."""
        event.stop()
        self.action_move(WHEEL_ROWS)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll up."""
        event.stop()
        self.action_move(-WHEEL_ROWS)


class GridPane(LinesPane, Generic[RowT]):
    """A table with a cursor that stays on its row when rows come and go."""

    class Moved(Message):
        """The cursor moved to another row."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.state = GridState()
        self._key: object = None

    def rows(self) -> Sequence[RowT]:
        """Return the rows, in order."""
        raise NotImplementedError

    def key(self, row: RowT) -> object:
        """Return the value that identifies the row in the next view."""
        raise NotImplementedError

    @property
    def chosen(self) -> RowT | None:
        """The row under the cursor."""
        found = self.rows()
        return found[min(self.state.cursor, len(found) - 1)] if found else None

    num_detail_lines: ClassVar[int]
    """Lines of detail on the chosen row, under the table."""

    @property
    def grid_height(self) -> int:
        """Lines of the table with its heading; without room for a row, details are omitted."""
        left = self.size.height - self.num_detail_lines
        return left if left >= 2 else max(1, self.size.height)

    @property
    def page_rows(self) -> int:
        """Rows in view between the heading and the details."""
        return max(1, self.grid_height - 1)

    def with_details(self, grid: Content, details: Content) -> Content:
        """Append the details at the foot of the pane if there is room for them."""
        height = self.grid_height
        if height == self.size.height:
            return grid
        gap = height - (grid.plain.count("\n") + 1)
        return grid + Content("\n" * (1 + gap)) + details

    def changed(self) -> None:
        """Put the cursor back on its row."""
        keys = [self.key(row) for row in self.rows()]
        if self._key in keys:
            self.state.cursor = keys.index(self._key)

    def action_move(self, num_rows: int) -> None:
        """Move the cursor."""
        self.state.move(num_rows, len(self.rows()), self.page_rows)
        chosen = self.chosen
        self._key = None if chosen is None else self.key(chosen)
        self.refresh()
        self.post_message(self.Moved())

    def on_click(self, event: events.Click) -> None:
        """Choose the row that was clicked."""
        offset = event.get_content_offset(self)
        if offset is not None and 1 <= offset.y <= self.page_rows:
            self.action_move(self.state.top + offset.y - 1 - self.state.cursor)


class StagesPane(Pane):
    """The stages of a pipeline as columns; hidden in a dense run, by the style sheet."""

    heading = "stages"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "scroll_to(-1)", show=False),
        Binding("right", "scroll_to(1)", show=False),
    ]
    first = 0
    """Index of the leftmost stage in view."""

    def facts(self, view: View) -> object:
        """Return the stages and their peers."""
        return view.status and (view.status.modules, view.status.peers)

    def changed(self) -> None:
        """Resize the pane to the most peers of a stage."""
        status = self.view.status
        self.screen.set_class(bool(status and status.modules), "-staged")
        self._name_range()
        self.refresh(layout=True)

    def on_resize(self) -> None:
        """Name the stages that fit now."""
        self.action_scroll_to(0)

    def action_scroll_to(self, num_stages: int) -> None:
        """Move the view by this many stages."""
        status = self.view.status
        if status is not None:
            last = len(status.modules) - stages.num_columns(status, self.size.width)
            self.first = min(max(0, self.first + num_stages), max(0, last))
            self._name_range()
            self.refresh()

    def _name_range(self) -> None:
        status = self.view.status
        total = len(status.modules) if status is not None else 0
        count = stages.num_columns(status, self.size.width) if status is not None else 0
        hidden = f"{self.first + 1} to {self.first + count} of {total} · ← → for the others"
        self.border_subtitle = hidden if count < total else ""

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return as many lines as the facts and the peers need; the style sheet limits it."""
        return stages.num_lines(self.view.status) if self.view.status is not None else 1

    def render(self) -> Content:
        """Draw the columns."""
        status = self.view.status
        if status is None:
            return Content("")
        width, height = self.size
        return stages.columns(status, width, height, first=self.first)


class PeersPane(GridPane[PeerStatus]):
    """The table of peers, with details of the chosen one."""

    heading = "peers"

    arrangement = Arrangement()

    def rearrange(self, arrangement: Arrangement) -> None:
        """Show other rows, or these in another order."""
        self.arrangement = arrangement
        self.changed()
        self.refresh()

    def choose(self, peer_id: str) -> None:
        """Put the cursor on a peer if it is shown."""
        keys = [row.peer_id for row in self.rows()]
        if peer_id in keys:
            self.action_move(keys.index(peer_id) - self.state.cursor)

    def facts(self, view: View) -> object:
        """Return what peers report and gave, whose they are, and whether they serve stages."""
        status = view.status
        given = status and (status.peers, status.contributions, bool(status.modules))
        return given, view.me

    def rows(self) -> Sequence[PeerStatus]:
        """Return the peers in the chosen order."""
        if self._rows is None:
            status = self.view.status
            found = sorted_peers(status) if status else []
            self._rows = self.arrangement.rows(found, tokens_of(status) if status else {})
        return self._rows

    _rows: Sequence[PeerStatus] | None = None
    """Sorted once for a view: a redraw asks several times, and there may be thousands."""

    def key(self, row: PeerStatus) -> object:
        """Return the peer's identity."""
        return row.peer_id

    num_detail_lines: ClassVar[int] = peers.NUM_DETAIL_LINES

    def changed(self) -> None:
        """Resize the pane to the number of peers."""
        self._rows = None
        super().changed()
        status = self.view.status
        if status is not None:
            online = f"{num_present(status)} of {len(status.peers)} online"
            chosen = str(self.arrangement)
            self.border_subtitle = escape(f"{chosen} · {online}" if chosen else online)
        self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return one line per peer, plus heading and details; the style sheet limits it."""
        return 1 + max(1, len(self.rows())) + peers.NUM_DETAIL_LINES

    def render(self) -> Content:
        """Draw the table and the details."""
        width = self.size.width
        status = self.view.status
        grid = render_grid(
            peers.columns(
                is_staged=bool(status and status.modules),
                me=self.view.me,
                tokens=tokens_of(status) if status else {},
            ),
            self.rows(),
            width,
            self.grid_height,
            self.state,
            row_style=peers.row_style,
            active=self.has_focus,
        )
        return self.with_details(grid, peers.details(self.chosen, width))


class RoundsPane(GridPane[RoundSummary]):
    """The committed rounds, newest first."""

    heading = "rounds"

    def facts(self, view: View) -> object:
        """Return rounds, names of missing peers, and gaps in the stored updates."""
        status = view.status
        return status and (status.history, names(status), status.gaps, bool(status.modules))

    def changed(self) -> None:
        """Name the stage whose rounds these are."""
        super().changed()
        status = self.view.status
        staged = status is not None and status.modules
        self.border_subtitle = escape(f"of {text.clean(staged[-1].name)}") if staged else ""

    def rows(self) -> Sequence[RoundSummary]:
        """Return the rounds, newest first."""
        return rounds.newest_first(self.view.status) if self.view.status else []

    def key(self, row: RoundSummary) -> object:
        """Return the round's position."""
        return row.position

    num_detail_lines: ClassVar[int] = rounds.NUM_DETAIL_LINES

    def render(self) -> Content:
        """Draw the list, and the peers missing from the chosen round with the reasons."""
        status = self.view.status
        if status is None or not status.history:
            return Content.assemble((" no round has been committed yet", "$dim"))
        known, width = names(status), self.size.width
        grid = render_grid(
            rounds.columns(known, status.history),
            self.rows(),
            width,
            self.grid_height,
            self.state,
            active=self.has_focus,
        )
        return self.with_details(grid, rounds.details(self.chosen, known, status.gaps, width))


class LossPane(Pane):
    """The loss over rounds, time or tokens."""

    heading = "loss"

    def facts(self, view: View) -> object:
        """Return the history and the settings of the curve."""
        status = view.status
        curve = status and (status.history, status.earlier)
        return curve, view.axis, view.log_scale, view.smooth

    def changed(self) -> None:
        """Read the curve, and name the scales in the frame."""
        view = self.view
        self._curve = loss_curve(view.status, view.axis) if view.status is not None else None
        words = ["log" if view.log_scale else "linear", "smoothed" if view.smooth else "raw"]
        if self._curve is not None:
            words.insert(0, f"by {self._curve.unit}")
            if self._curve.held_out:
                words.insert(0, "[$warn]• validation[/]")
        self.border_subtitle = " · ".join(words)

    _curve: LossCurve | None = None

    def render(self) -> Content:
        """Draw the curve, raw and smoothed."""
        curve = self._curve
        points = curve.training if curve is not None else []
        if curve is None or len(points) < 2:
            return Content.assemble((" the curve starts with the second round", "$dim"))
        curves = []
        if self.view.smooth and len(points) > MIN_SMOOTHED:
            curves.append(Series(points=points, style="$raw-curve"))
            points = smoothed(points)
        curves.append(Series(points=points, style="$primary"))
        curves.append(Series(points=curve.held_out, style="$warn", dots=True))
        width, height = self.size
        return plot(curves, width, height, log=self.view.log_scale)


class PhasesPane(Pane):
    """The phases of the chosen round, and of each peer's last one."""

    heading = "phases"
    chosen: RoundSummary | None = None

    def facts(self, view: View) -> object:
        """Return the rounds and the phases of the peers' last ones."""
        status = view.status
        return status and (status.history, [(label(p), p.phases) for p in status.peers])

    def choose(self, row: RoundSummary | None) -> None:
        """Show this round at the top."""
        self.chosen = row
        self.refresh()

    def render(self) -> Content:
        """Draw the phases."""
        status = self.view.status
        if status is None:
            return Content("")
        newest = status.history[-1] if status.history else None
        width, height = self.size
        return rounds.waterfall(status, self.chosen or newest, width, height)


class EventsPane(LinesPane):
    """The event log: follows its end until it is scrolled up."""

    heading = "events"
    top: int | None = None
    """The first line in view; None while following the end."""

    _laid_out: tuple[int, list[Content]] | None = None
    """The lines for a width; there may be many, so they are kept until a new event arrives."""

    def facts(self, view: View) -> object:
        """Return the events and the names of their sources."""
        return view.status and (view.status.events, names(view.status))

    def changed(self) -> None:
        """Discard the lines that were laid out."""
        self._laid_out = None

    def _lines(self) -> list[Content]:
        status, width = self.view.status, self.size.width
        if status is None:
            return []
        if self._laid_out is None or self._laid_out[0] != width:
            self._laid_out = width, log_lines(status, width)
        return self._laid_out[1]

    @property
    def page_rows(self) -> int:
        """One line of the previous page stays in view."""
        return max(1, self.size.height - 1)

    def action_move(self, num_rows: int) -> None:
        """Scroll; at the end, follow new events again."""
        last_top = max(0, len(self._lines()) - self.size.height)
        top = max(0, (last_top if self.top is None else self.top) + num_rows)
        self.top = None if top >= last_top else top
        self.border_subtitle = "" if self.top is None else "scrolled back · end follows new events"
        self.refresh()

    def render(self) -> Content:
        """Draw the lines in view."""
        lines = self._lines()
        if not lines:
            return Content.assemble((" no events yet", "$dim"))
        start = max(0, len(lines) - self.size.height) if self.top is None else self.top
        return Content("\n").join(lines[start : start + self.size.height])
