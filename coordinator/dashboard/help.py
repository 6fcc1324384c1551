"""The help screen: the keys, and the terms on the screen."""

from __future__ import annotations

from typing import ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from atoll.coordinator.dashboard.marks import PHASES, legend

_KEYS: Final = (
    ("tab, 1-5", "pane: peers, loss, phases, rounds, events"),
    ("0, ← →", "pane: stages of a pipeline; scroll them"),
    ("↑ ↓ pgup pgdn", "choose a peer or round; scroll the events"),
    ("l, s, x", "loss: log scale; smoothed; by rounds, time or tokens"),
    ("o, O", "order of the peers; turn it round"),
    ("/, m", "show peers with a text; choose my peer"),
    ("p", "freeze the screen; the run continues"),
    ("z", "zoom the focused pane; esc returns"),
    ("t", "dark or light theme"),
    ("q", "quit"),
)
_REPLAY_KEYS: Final = (
    ("space", "play or pause"),
    (", . < >", "one round back or on; ten rounds"),
    ("- +", "slower or faster"),
    (":", "go to a round: 120, 40%, +10; or click on the bar"),
)
_WORDS: Final = (
    ("util", "share of the time spent training"),
    ("window", "inner steps done in the current window"),
    ("up, down", "share of the link's measured speed in use"),
    ("link", "how others reach it: direct, upnp, hole or relayed"),
    ("bytes", "counted on the wire, in both directions"),
    ("seen", "time since the peer's last report"),
    ("binds", "the other stages wait for this one"),
)
_WORD_CELLS: Final = 15


def help_text(*, is_replay: bool = False) -> Content:
    """Return the whole help text."""
    keys = [*_KEYS, *(_REPLAY_KEYS if is_replay else ())]
    lines = [_entry(key, meaning, "bold $primary") for key, meaning in keys]
    lines += [Content(""), *(_entry(*word, "$text-plain") for word in _WORDS)]
    first = Content.assemble((f"{'phases':<{_WORD_CELLS}}", "$text-plain"))
    lines += [
        first + legend(names=PHASES[:3]),
        Content(" " * _WORD_CELLS) + legend(names=PHASES[3:]),
    ]
    return Content("\n").join(lines)


def _entry(word: str, meaning: str, style: str) -> Content:
    return Content.assemble((f"{word:<{_WORD_CELLS}}", style), (meaning, "$dim"))


class Help(ModalScreen[None]):
    """The help, over the dashboard until a key is pressed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter,space", "dismiss", "Close")
    ]

    def __init__(self, *, is_replay: bool = False) -> None:
        """Tell the keys of a replay too if it is one."""
        super().__init__()
        self._is_replay = is_replay

    def compose(self) -> ComposeResult:
        """Lay out one box."""
        box = Static(help_text(is_replay=self._is_replay))
        box.border_title = "help"
        yield box
