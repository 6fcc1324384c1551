"""The dashboard app: reads the run's status once a second and draws it.

    async def feed() -> RunStatus: ...
    DashboardApp(feed, title="atoll").run()

The app does not know where the status comes from. When the feed fails, the last status stays on
the screen with its age, and the app keeps asking as long as it is open. A program can embed it:
`run_async` returns when the user quits or the finished run has lingered, and leaves the feed and
the run alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.pilot import Pilot
from textual.widgets import Footer

from atoll.coordinator.dashboard.help import Help
from atoll.coordinator.dashboard.losses import AXES
from atoll.coordinator.dashboard.panes import (
    Drawn,
    EventsPane,
    LossPane,
    Pane,
    PeersPane,
    PhasesPane,
    RoundsPane,
    RunHeader,
    StagesPane,
)
from atoll.coordinator.dashboard.prompt import Prompt
from atoll.coordinator.dashboard.themes import DARK, LIGHT
from atoll.coordinator.report.feed import INTERVAL_S, Feed, FeedError, pause_s, read
from atoll.coordinator.report.mine import find_peer
from atoll.coordinator.report.view import View
from atoll.coordinator.run.status import RunStatus

LOWER_PANES = ("loss", "phases", "rounds", "events")
UPPER_PANES = ("stages", "peers")  # shown on every screen; the stages in a pipeline alone


class DashboardApp(App[None]):
    """A run in a terminal."""

    CSS_PATH = "app.tcss"
    TITLE = "atoll dashboard"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012  (declared so by Textual)
        (0, "-narrow"),
        (100, "-roomy"),
        (150, "-wide"),
    ]
    VERTICAL_BREAKPOINTS = [  # noqa: RUF012  (declared so by Textual)
        (0, "-low"),
        (34, "-middle"),
        (54, "-high"),
    ]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave", "Quit"),
        Binding("ctrl+c,ctrl+q", "leave", show=False, priority=True),
        Binding("tab", "next_pane(1)", "Pane", priority=True),
        Binding("shift+tab", "next_pane(-1)", show=False, priority=True),
        Binding("l", "toggle_log", "Log"),
        Binding("s", "toggle_smooth", "Smooth"),
        Binding("x", "next_axis", "Axis"),
        Binding("o", "next_order", "Order"),
        Binding("O,R", "reverse_order", show=False),
        Binding("slash", "filter", "Filter"),
        Binding("m", "my_peer", show=False),
        Binding("p", "toggle_pause", "Pause"),
        Binding("z", "zoom", "Zoom"),
        Binding("t", "toggle_theme", "Theme"),
        Binding("question_mark", "help", "Help"),
        *(
            Binding(str(number), f"pane('{name}')", show=False)
            for number, name in enumerate((*UPPER_PANES, *LOWER_PANES))
        ),
    ]

    def __init__(
        self,
        feed: Feed,
        *,
        title: str = "atoll",
        on_quit: Callable[[], None] | None = None,
        linger_s: float | None = None,
        interval_s: float | None = INTERVAL_S,
        light: bool = False,
        me: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Draw the status that `feed` returns.

        Args:
            feed: reads the status of the run; it may raise or block for a while.
            title: word in the top left corner.
            on_quit: called when the user quits, not when a finished run closes by itself.
            linger_s: seconds after which a finished run closes, unless a key is pressed; None:
                never.
            interval_s: seconds between two readings; None: only when `poll` is called.
            light: start with the light theme.
            me: PeerID of the viewer's own peer, or what names it (`find_peer`).
            clock: the local monotonic clock, in seconds.
        """
        super().__init__()
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = LIGHT.name if light else DARK.name
        self.view = View(title=title)
        self._me = me
        self._feed = feed
        self._on_quit = on_quit
        self._linger_s = linger_s
        self._interval_s = interval_s
        self._clock = clock
        self._received_at = clock()
        self._closes_at: float | None = None
        self._held: RunStatus | None = None
        self._mounted = False

    def compose(self) -> ComposeResult:
        """Lay out the header, stages, peers, four panes and keys."""
        yield RunHeader(id="header")
        yield StagesPane(id="stages")
        yield PeersPane(id="peers")
        with Container(id="lower"):
            yield LossPane(id="loss", classes="-current")
            yield PhasesPane(id="phases")
            yield RoundsPane(id="rounds")
            yield EventsPane(id="events")
        yield from self.compose_foot()
        yield Prompt(id="prompt")
        yield Footer(show_command_palette=False, compact=True)

    def compose_foot(self) -> ComposeResult:
        """Add what lies above the keys; nothing here."""
        yield from ()

    def on_mount(self) -> None:
        """Start polling."""
        self._mounted = True
        self.query_one("#peers", Pane).focus()
        if self._interval_s is not None:
            self.run_worker(self._follow(self._interval_s))
            self.set_interval(self._interval_s, self.tick)

    async def _follow(self, interval_s: float) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(pause_s(self._held, self.view.num_attempts, interval_s))

    async def poll(self) -> None:
        """Read the status once and draw it, or show why it could not be read."""
        try:
            self._received(await read(self._feed))
        except FeedError as error:
            attempts = self.view.num_attempts + 1
            self._show(replace(self.view, failure=str(error), num_attempts=attempts))

    def _received(self, status: RunStatus) -> None:
        self._received_at = self._clock()
        self._held = status
        if status.state != "finished":
            self._closes_at = None
        elif self._linger_s is not None and self._closes_at is None:
            self._closes_at = self._received_at + self._linger_s
        kept = self.view.status if self.view.paused else status
        me = find_peer(status, self._me) if self._me else ""
        self._show(replace(self.view, status=kept, me=me, failure="", num_attempts=0))

    def tick(self) -> None:
        """Update the ages on the screen, and close a finished run that has lingered."""
        if self._closes_at is not None and self._clock() >= self._closes_at:
            self.exit()
        else:
            self._show(self.view)

    def _show(self, view: View) -> None:
        now = self._clock()
        closing = None if self._closes_at is None else max(0.0, self._closes_at - now)
        age_s = now - self._received_at if view.status is not None else 0.0
        self.view = replace(view, age_s=age_s, closing_in_s=closing)
        if not self._mounted:
            return
        for screen in self.screen_stack[:1]:  # below the help; none while the app is closing
            for widget in screen.query(Drawn).results(Drawn):
                widget.show(self.view)

    async def on_event(self, event: events.Event) -> None:
        """Keep a finished run on the screen after any key or click."""
        if isinstance(event, events.Key | events.MouseDown) and self._closes_at is not None:
            self._closes_at, self._linger_s = None, None
            self._show(self.view)
        await super().on_event(event)

    def on_grid_pane_moved(self) -> None:
        """Show the phases of the round chosen in the list."""
        self.query_one(PhasesPane).choose(self.query_one(RoundsPane).chosen)

    def action_leave(self) -> None:
        """Quit."""
        if self._on_quit is not None:
            self._on_quit()
        self.exit()

    def action_toggle_log(self) -> None:
        """Switch the loss axis between linear and logarithmic."""
        self._show(replace(self.view, log_scale=not self.view.log_scale))

    def action_toggle_smooth(self) -> None:
        """Switch between the raw and the smoothed curve."""
        self._show(replace(self.view, smooth=not self.view.smooth))

    def action_next_axis(self) -> None:
        """Draw the loss over rounds, time or tokens."""
        index = (AXES.index(self.view.axis) + 1) % len(AXES)
        self._show(replace(self.view, axis=AXES[index]))

    def action_next_order(self) -> None:
        """Sort the peers by the next of their numbers."""
        pane = self.query_one(PeersPane)
        pane.rearrange(pane.arrangement.next_order())

    def action_reverse_order(self) -> None:
        """Turn the order of the peers round."""
        pane = self.query_one(PeersPane)
        pane.rearrange(replace(pane.arrangement, is_reversed=not pane.arrangement.is_reversed))

    def action_filter(self) -> None:
        """Ask which peers to show."""
        wanted = self.query_one(PeersPane).arrangement.wanted
        self.query_one(Prompt).ask("filter", "show the peers with this text", wanted)

    def action_my_peer(self) -> None:
        """Choose the viewer's own peer in the table."""
        self.action_pane("peers")
        self.query_one(PeersPane).choose(self.view.me)

    def on_prompt_told(self, message: Prompt.Told) -> None:
        """Take what was typed; give the keys back when it is complete."""
        self.answered(message.question, message.text, is_complete=message.is_complete)
        if message.is_complete:
            self.query_one(PeersPane).focus()

    def answered(self, question: str, answer: str, *, is_complete: bool) -> None:
        """Take an answer."""
        if question == "filter":
            pane = self.query_one(PeersPane)
            pane.rearrange(replace(pane.arrangement, wanted=answer.strip()))

    def action_toggle_pause(self) -> None:
        """Freeze the screen, or catch up with the run."""
        status = self._held if self.view.paused else self.view.status
        self._show(replace(self.view, paused=not self.view.paused, status=status))

    def action_toggle_theme(self) -> None:
        """Switch between the dark and the light theme."""
        self.theme = LIGHT.name if self.theme == DARK.name else DARK.name

    def action_help(self) -> None:
        """Open the help screen."""
        self.push_screen(Help(is_replay=bool(self.view.replay)))

    def action_zoom(self) -> None:
        """Give the focused pane the whole screen, or undo it."""
        if self.screen.maximized is not None:
            self.screen.minimize()
        elif isinstance(self.focused, Pane):
            self.screen.maximize(self.focused)

    def action_pane(self, name: str) -> None:
        """Show a pane and focus it."""
        if name not in self._order:
            return
        if self.screen.maximized is not None:
            self.screen.minimize()
        if name in LOWER_PANES:
            for pane in self.query("#lower > Pane"):
                pane.set_class(pane.id == name, "-current")
        self.query_one(f"#{name}", Pane).focus()

    def action_next_pane(self, step: int) -> None:
        """Focus the next or previous pane, hidden ones included."""
        if isinstance(self.screen, Help) or self.query_one(Prompt).has_focus:
            return
        order = self._order
        here = self.focused.id if self.focused is not None else None
        index = order.index(here) if here in order else 0
        self.action_pane(order[(index + step) % len(order)])

    @property
    def _order(self) -> tuple[str, ...]:
        """The panes of this run, in the order in which the tab key visits them."""
        status = self.view.status
        return (*UPPER_PANES[0 if status and status.modules else 1 :], *LOWER_PANES)

    def on_pane_seen(self) -> None:
        """Update the pane titles, which name the hidden panes."""
        self._name_panes()

    def _name_panes(self) -> None:
        hides = any(not pane.display for pane in self.query("#lower > Pane").results(Pane))
        for pane in self.query(Pane):
            names = [pane.heading] if pane.id in UPPER_PANES or not hides else list(LOWER_PANES)
            pane.border_title = " ".join(
                name if name == pane.id else f"[not b $dim]{name}[/]" for name in names
            )


async def save_screenshot(
    feed: Feed, path: Path, *, width: int = 120, height: int = 40, light: bool = False
) -> None:
    """Write the dashboard as an SVG after its first status.

    Raises:
        OSError: `path` cannot be written.
        FeedError: there is no status to draw.
    """
    status = await read(feed)

    async def first() -> RunStatus:
        return status

    app = DashboardApp(first, interval_s=None, light=light)
    await save_screen(app, path, width=width, height=height)


async def save_screen(app: DashboardApp, path: Path, *, width: int = 120, height: int = 40) -> None:
    """Write the screen of an app as an SVG after its first status; it must not poll by itself.

    Raises:
        OSError: `path` cannot be written.
    """

    async def draw(pilot: Pilot[object]) -> None:
        await app.poll()
        await pilot.pause()
        await pilot.pause()  # the key hints at the foot appear one turn after the rest
        path.write_text(app.export_screenshot(), encoding="utf-8")
        app.exit()

    await app.run_async(headless=True, size=(width, height), auto_pilot=draw)
