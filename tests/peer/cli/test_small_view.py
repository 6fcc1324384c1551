"""The lines at the foot of a peer's terminal."""

import io
import sys

from rich.console import Console

from atoll.coordinator.run.outcome import Outcome
from atoll.coordinator.run.phases import RoundPhase
from atoll.peer.cli.small_view import SmallPeerView, lines, small_view
from atoll.peer.daemon.process import PeerEvent
from atoll.peer.daemon.tally import Account

ROUND = PeerEvent(
    kind="round",
    position=7,
    text="round 7",
    account=Account(position=7, outcome=Outcome.COUNTED, loss=1.5, rounds_seen=9, rounds_counted=8),
    tokens_per_s=52_500.0,
    utilisation=0.96,
)


def test_the_lines_follow_the_events():
    view = SmallPeerView(run="1c8baa26")
    phase = next(iter(RoundPhase))
    view = view.after(
        PeerEvent(kind="phase", position=3, text="", phase=phase, left=1200), now_s=1.0
    )
    assert lines(view, 1.0) == [
        f"run 1c8baa26  ·  {phase.value}, 1,200 left",
        "no round has been decided yet",
    ]
    above, below = lines(view.after(ROUND, now_s=10.0), 14.0)
    for fact in ("round 7, 4.0s ago", "loss 1.500", "52.5k tok/s", "util 96%"):
        assert fact in above
    assert below.startswith("counted in 8 of 9 rounds")


def test_messages_pass_above_the_lines_which_go_at_the_end():
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=100)
    ready = PeerEvent(kind="ready", position=0, text="ready")
    stopped = PeerEvent(kind="stopped", position=7, text="left")

    def shown(event):
        print(event.text, file=sys.stderr)

    stderr = sys.stderr
    with small_view("1c8baa26", shown, console=console) as take:
        take(ready)
        take(ROUND)
        assert sys.stderr is not stderr
        assert "round 7" in terminal.getvalue()
        take(stopped)
        assert sys.stderr is stderr
    assert "run 1c8baa26" in terminal.getvalue()
