"""The dashboard as a replay: the run after an earlier round, and a bar to move through it.

ReplayApp(archive).run()
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import ClassVar, Final

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widget import Widget

from atoll.coordinator.dashboard.app import DashboardApp
from atoll.coordinator.dashboard.prompt import Prompt
from atoll.coordinator.dashboard.tape import SCREENS_PER_S, Tape, Thrift
from atoll.coordinator.report.archive import RunArchive
from atoll.coordinator.report.feed import FeedError, read
from atoll.coordinator.run import text
from atoll.coordinator.run.status import RunStatus

LOOK_S: Final = 5.0  # between two looks whether a running run has gone on
_MANY: Final = 10  # rounds of a long step
_BAR_FROM_CELLS: Final = 10


class ScrubBar(Widget):
    """Where the replay is; a click goes there."""

    class PlaceChosen(Message):
        """A place on the bar was clicked; `part` of the run is before it."""

        def __init__(self, part: float) -> None:
            super().__init__()
            self.part = part

    tape = Tape(total=0)
    status: RunStatus | None = None
    _bar = (0, 0)
    """First cell of the bar, and its cells."""

    def show(self, tape: Tape, status: RunStatus | None) -> None:
        """Draw this place."""
        self.tape, self.status = tape, status
        self.refresh()

    def render(self) -> Content:
        """The bar, with round and time."""
        tape = self.tape
        mark = "▶" if tape.is_playing else "‖"
        left = Content.assemble(
            (f" {mark} ", "bold $primary"),
            (f"{tape.speed:g} rounds/s  ", "$dim"),
            ("round ", "$dim"),
            (f"{tape.position}", "bold $text-plain"),
            (f"/{tape.total}  ", "$dim"),
        )
        right = Content.assemble((f"  {self._time()} ", "$text-plain"))
        cells = self.size.width - left.cell_length - right.cell_length
        if cells < _BAR_FROM_CELLS:
            self._bar = (0, 0)
            return (left + right).truncate(self.size.width, ellipsis=True)
        self._bar = (left.cell_length, cells)
        knob = round(tape.done * (cells - 1))
        line = Content.assemble(
            ("━" * knob, "$primary"), ("●", "bold $primary"), ("─" * (cells - 1 - knob), "$track")
        )
        return left + line + right

    def _time(self) -> str:
        status = self.status
        if status is None:
            return ""
        since = "" if status.started_at is None else text.duration(status.now - status.started_at)
        return f"{text.clock_time(status.now, with_date=True)}{since and f' · {since} in'}"

    def on_click(self, event: events.Click) -> None:
        """Go to the place that was clicked."""
        first, cells = self._bar
        if cells and first <= event.x < first + cells:
            self.post_message(self.PlaceChosen((event.x - first) / max(1, cells - 1)))


class ReplayApp(DashboardApp):
    """A run, from its first round to its newest one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "toggle_play", "Play"),
        Binding("full_stop,right_square_bracket", "step(1)", "Step"),
        Binding("comma,left_square_bracket", "step(-1)", show=False),
        Binding("greater_than_sign,right_curly_bracket", f"step({_MANY})", show=False),
        Binding("less_than_sign,left_curly_bracket", f"step(-{_MANY})", show=False),
        Binding("plus,equals_sign", "speed(1)", "Speed"),
        Binding("minus", "speed(-1)", show=False),
        Binding("colon", "jump", "Jump"),
    ]

    def __init__(
        self,
        archive: RunArchive,
        now: RunStatus,
        *,
        interval_s: float | None = 1 / SCREENS_PER_S,
        light: bool = False,
        me: str = "",
        first: int = 0,
    ) -> None:
        """Begin to play.

        Args:
            archive: of the run.
            now: its newest status.
            interval_s: least seconds between two screens; None: only when `advance` is called.
            light: start with the light theme.
            me: PeerID of the viewer's own peer.
            first: the round to begin after.
        """
        self.tape = Tape(total=last_round(now), is_playing=interval_s is not None)
        self.tape.go_to(first)
        self._archive = archive
        self._thrift = Thrift()
        self._screen_s = interval_s
        super().__init__(self._read, interval_s=None, light=light, me=me)

    async def _read(self) -> RunStatus:
        return await self._archive.at(self.tape.position)

    def compose_foot(self) -> ComposeResult:
        """Add the bar above the keys."""
        yield ScrubBar(id="scrub")

    def on_mount(self) -> None:
        """Begin to play; the dashboard's own `on_mount` runs as well."""
        if self._screen_s is not None:
            self.set_interval(self._screen_s, self._turn)
            self.set_interval(LOOK_S, self._look)
        self._draw()
        self._seek()

    def _turn(self) -> None:
        assert self._screen_s is not None
        was_playing = self.tape.is_playing
        self.tape.advance(self._screen_s)
        is_due = self.tape.position != self._shown
        if is_due and self._thrift.allows(time.monotonic(), time.process_time()):
            self._seek()
        if was_playing != self.tape.is_playing:
            self._draw()

    async def _look(self) -> None:
        """Take note of how far a running run has got."""
        try:
            self.tape.extend(last_round(await read(self._archive.now)))
        except FeedError:
            return  # the next one may be read
        self._draw()

    @property
    def _shown(self) -> int:
        status = self.view.status
        return -1 if status is None else last_round(status)

    def _seek(self) -> None:
        """Read the status of the tape's place, one at a time: the newest place wins."""
        if not any(w.name == "seek" and not w.is_finished for w in self.workers):
            self.run_worker(self._catch_up(), name="seek")

    async def _catch_up(self) -> None:
        while True:
            position = self.tape.position
            await self.poll()
            self._draw_bar()
            # While it plays, the next turn goes on.
            if self.view.failure or self.tape.is_playing or position == self.tape.position:
                return

    def _draw(self) -> None:
        mark = "▶ replay" if self.tape.is_playing else "‖ replay"
        self._show(replace(self.view, replay=mark))
        self._draw_bar()

    def _draw_bar(self) -> None:
        for bar in self.query(ScrubBar):
            bar.show(self.tape, self.view.status)

    def _moved(self) -> None:
        self._seek()
        self._draw()

    def on_scrub_bar_place_chosen(self, message: ScrubBar.PlaceChosen) -> None:
        """Go where the bar was clicked."""
        self.tape.go_to(round(message.part * self.tape.total))
        self._moved()

    def action_toggle_play(self) -> None:
        """Play or pause."""
        self.tape.toggle()
        self._moved()

    def action_toggle_pause(self) -> None:
        """Play or pause: what is frozen here is the replay."""
        self.action_toggle_play()

    def action_step(self, rounds: int) -> None:
        """Pause, and go some rounds on or back."""
        self.tape.step(rounds)
        self._moved()

    def action_speed(self, by: int) -> None:
        """Play faster or slower."""
        self.tape.change_speed(by)
        self._draw()

    def action_jump(self) -> None:
        """Ask for a round to go to."""
        self.query_one(Prompt).ask("jump", "round to go to: 120, 40%, +10 or -10")

    def answered(self, question: str, answer: str, *, is_complete: bool) -> None:
        """Go to the round that was typed."""
        if question != "jump":
            super().answered(question, answer, is_complete=is_complete)
        elif is_complete and answer and not self.tape.jump(answer):
            self.notify(f"expected a round such as 120, 40% or +10, got {text.clean(answer)!r}")
        self._moved()


def last_round(status: RunStatus) -> int:
    """Return the newest round of the module that a status lists."""
    return status.history[-1].position if status.history else 0
