"""Two lines at the foot of a peer's terminal, which say how it is; its messages pass above them.

They need the phase and the last round of the peer's own events, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from atoll.coordinator.run import text

if TYPE_CHECKING:
    from atoll.peer.daemon.process import PeerEvent
    from atoll.peer.daemon.tally import Account

REDRAWS_PER_S = 2  # for the seconds since the last round


@dataclass(frozen=True, kw_only=True)
class SmallPeerView:
    """What the lines say."""

    run: str
    phase: str = ""
    left: int | None = None
    """Entries or leaves still to come, in a phase that fetches them."""
    account: Account | None = None
    """The last round."""
    tokens_per_s: float | None = None
    utilisation: float | None = None
    round_at_s: float | None = None
    """When it was decided, on a steady clock."""

    def after(self, event: PeerEvent, now_s: float) -> SmallPeerView:
        """Return the view after an event."""
        if event.phase is not None:
            return replace(self, phase=event.phase.value, left=event.left)
        if event.account is not None:
            return replace(
                self,
                account=event.account,
                tokens_per_s=event.tokens_per_s,
                utilisation=event.utilisation,
                round_at_s=now_s,
            )
        return self


def lines(view: SmallPeerView, now_s: float) -> list[str]:
    """Return the two lines."""
    left = f", {view.left:,} left" if view.left else ""
    phase = f"{view.phase or text.ABSENT}{left}"
    account = view.account
    if account is None or view.round_at_s is None:
        return [f"run {view.run}  ·  {phase}", "no round has been decided yet"]
    ago = text.duration(now_s - view.round_at_s)
    facts = (
        f"run {view.run}",
        f"round {account.position}, {ago} ago",
        phase,
        f"loss {text.loss_text(account.loss)}",
        f"{text.count(view.tokens_per_s)} tok/s",
        f"util {text.percent(view.utilisation)}",
    )
    return ["  ·  ".join(facts), account.verdict]


@contextmanager
def small_view(
    run: str,
    shown: Callable[[PeerEvent], None],
    *,
    console: Console | None = None,
    steady: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[PeerEvent], None]]:
    """Yield what takes the events of a peer; from `ready` to `stopped` the lines are there.

    Args:
        run: what the lines call the run.
        shown: prints an event on stderr; while the lines are there it prints above them.
        console: the terminal; by default that of stderr.
        steady: returns monotonic seconds.
    """
    view = SmallPeerView(run=run)

    def drawn() -> Group:
        above, below = lines(view, steady())
        return Group(
            Text(above, style="bold", no_wrap=True, overflow="ellipsis"),
            Text(below, style="dim", no_wrap=True, overflow="ellipsis"),
        )

    # It stands in for stderr meanwhile, so that whatever is printed there passes above.
    live = Live(
        console=console or Console(stderr=True),
        get_renderable=drawn,
        refresh_per_second=REDRAWS_PER_S,
        redirect_stdout=False,
        transient=True,
    )

    def take(event: PeerEvent) -> None:
        nonlocal view
        view = view.after(event, steady())
        if event.kind == "stopped":
            live.stop()
        shown(event)
        if event.kind == "ready":
            live.start()
            live.console.show_cursor()  # a second Ctrl-C would leave the terminal without it

    try:
        yield take
    finally:
        live.stop()
