"""The table of peers, and the details of the one under the cursor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from textual.content import Content

from atoll.coordinator.dashboard.grid import Column
from atoll.coordinator.dashboard.marks import (
    PHASES,
    bar,
    legend,
    ordered_phases,
    phase_style,
    stacked,
)
from atoll.coordinator.report.view import (
    counted_rounds,
    is_gone,
    label,
    shown_state,
    utilisation_of,
    waited_for,
)
from atoll.coordinator.run import text
from atoll.coordinator.run.status import FlowStatus, PeerStatus
from atoll.coordinator.run.text import ABSENT

_STATE_STYLES: Final = {
    "joining": "$warn",
    "ready": "$accent",
    "training": "$good",
    "syncing": "$primary",
    "recovering": "$warn",
    "leaving": "$dim",
    "left": "$dim",
    "gone": "$bad",
}
_LINK_STYLES: Final = {"relayed": "$warn", "hole": "$accent"}
STALE_S: Final = 10.0  # several heartbeats missed; the coordinator now counts the peer as gone
NUM_DETAIL_LINES: Final = 2
_ID_FROM_CELLS: Final = 22  # a column this wide shows the identity in every row


def dot_style(peer: PeerStatus) -> str:
    """Return the colour of a peer's state."""
    return _STATE_STYLES.get(peer.state, "$text-plain")


def _name(peer: PeerStatus, width: int, *, me: str = "") -> Content:
    mark = "◆" if peer.peer_id == me else "○" if is_gone(peer) else "●"
    name, short = label(peer), text.short_id(peer.peer_id)
    styled = Content.assemble((f"{mark} ", dot_style(peer)), (name, "bold $text-plain"))
    if width >= _ID_FROM_CELLS and styled.cell_length + 1 + len(short) <= width:
        styled += Content.assemble((f" {short}", "$dim"))
    return styled


def _state(peer: PeerStatus, width: int) -> Content:
    """State and phase or, if there is no room for both, the phase."""
    state, phase = shown_state(peer), text.clean(peer.phase, num_max=24)
    if state not in ("training", "syncing") or phase in ("", "idle"):  # before its first round
        return Content.assemble((state, dot_style(peer)))
    styled = (phase, phase_style(phase) if phase in PHASES else dot_style(peer))
    if len(state) + 3 + len(phase) > width:
        return Content.assemble(styled)
    return Content.assemble((state, dot_style(peer)), (" · ", "$dim"), styled)


def _steps(peer: PeerStatus, width: int) -> Content:
    if is_gone(peer) or peer.inner_steps <= 0:
        return _plain(text.ABSENT)
    total = str(peer.inner_steps)
    numbers = f" {min(peer.step, peer.inner_steps):>{len(total)}}/{total}"
    if width < len(numbers) + 3:
        return _plain(numbers.strip())
    filled = bar(peer.step / peer.inner_steps, width - len(numbers), "$good")
    return filled + Content.assemble((numbers, "$dim"))


def _link(peer: PeerStatus, use: float, mbit_s: float, width: int) -> Content:
    """Use as a share of the measured capacity; a dash while that is unknown."""
    if is_gone(peer) or mbit_s <= 0:
        return _plain(f"{text.ABSENT:>4}" if width < 8 else text.ABSENT)
    share = f"{text.percent(use):>4}"
    if width < 8:
        return Content.assemble((share, _use_style(use)))
    speed = f" {text.count(mbit_s)} Mb/s" if width >= 20 else ""
    cells = width - len(share) - 1 - 10 * bool(speed)
    drawn = bar(use, cells, _use_style(use)) + Content.assemble((f" {share}", "$text-plain"))
    return drawn + Content.assemble((f"{speed:>10}" if speed else "", "$dim"))


def _use_style(use: float) -> str:
    """Highlight a link that a round waits for; a busy link is no fault."""
    return "$accent" if use < 0.95 else "$warn"


def _uplink(peer: PeerStatus, width: int) -> Content:
    return _link(peer, peer.uplink_use, peer.uplink_mbit_s, width)


def _downlink(peer: PeerStatus, width: int) -> Content:
    return _link(peer, peer.downlink_use, peer.downlink_mbit_s, width)


def _seen(peer: PeerStatus, width: int) -> Content:
    late = peer.last_seen_s >= STALE_S
    return Content.assemble((text.duration(peer.last_seen_s), "$warn" if late else "$dim"))


def _utilisation(peer: PeerStatus, width: int) -> Content:
    share = utilisation_of(peer)
    if share is None:
        return _plain(text.ABSENT)
    return Content.assemble((text.percent(share), utilisation_style(share)))


def utilisation_style(share: float) -> str:
    """Return the colour of a utilisation: good while communication costs at most a tenth."""
    return "$good" if share >= 0.9 else "$warn"


def _plain(value: str) -> Content:
    return Content.assemble((value, "$text-plain"))


_COLUMNS: Final[tuple[Column[PeerStatus], ...]] = (
    Column(title="  peer", width=12, grow_to=26, priority=0, draw=_name),
    Column(title="state", width=10, grow_to=21, priority=1, draw=_state),
    Column(
        title="round", width=5, priority=4, right=True, draw=lambda p, w: _plain(str(p.position))
    ),
    Column(title="window", width=11, grow_to=24, priority=2, draw=_steps),
    Column(
        title="tok/s",
        width=5,
        priority=1,
        right=True,
        draw=lambda p, w: _plain(text.ABSENT if is_gone(p) else text.count(p.tokens_per_s)),
    ),
    Column(
        title="loss", width=6, priority=2, right=True,
        draw=lambda p, w: _plain(text.loss_text(p.loss)),
    ),
    Column(
        title="sent", width=5, grow_to=7, priority=6, right=True,
        draw=lambda p, w: _plain(text.compact_size(p.wire_bytes_sent)),
    ),
    Column(
        title="recv", width=5, grow_to=7, priority=7, right=True,
        draw=lambda p, w: _plain(text.compact_size(p.wire_bytes_received or None)),
    ),
    Column(
        title="link", width=7, priority=9,
        draw=lambda p, w: Content.assemble((p.reach or ABSENT, _LINK_STYLES.get(p.reach, "$dim"))),
    ),
    Column(title="up", width=4, grow_to=26, priority=3, draw=_uplink),
    Column(title="down", width=4, grow_to=26, priority=5, draw=_downlink),
    Column(title="util", width=4, priority=3, right=True, draw=_utilisation),
    Column(title="seen", width=7, priority=8, right=True, draw=_seen),
)  # fmt: skip


_STAGE: Final = Column[PeerStatus](
    title="stage", width=8, priority=1, draw=lambda p, w: _plain(text.clean(p.module) or ABSENT)
)


def columns(
    *, is_staged: bool = False, me: str = "", tokens: Mapping[str, int] | None = None
) -> Sequence[Column[PeerStatus]]:
    """Return the columns of the table.

    Args:
        is_staged: for a pipeline.
        me: PeerID of the peer to mark.
        tokens: that rounds took, by PeerID.
    """
    counted = tokens or {}
    name, *others = _COLUMNS
    taken = Column[PeerStatus](
        title="tokens", width=6, priority=5, right=True,
        draw=lambda p, w: _plain(text.count(counted.get(p.peer_id))),
    )  # fmt: skip
    index = next(i for i, column in enumerate(others) if column.title == "tok/s") + 1
    others.insert(index, taken)
    stage = [_STAGE] if is_staged else []
    return [replace(name, draw=partial(_name, me=me)), *stage, *others]


def row_style(peer: PeerStatus) -> str:
    """Dim the whole row of a peer that is gone."""
    return "dim" if is_gone(peer) else ""


def details(peer: PeerStatus | None, width: int) -> Content:
    """Return two lines: facts about the peer, and the phases of its last round."""
    if peer is None:
        return Content.assemble((" no peer has joined yet", "$dim"), "\n")
    facts = [
        ("id", text.short_id(peer.peer_id)),
        *(_flow(peer.flow) if peer.flow is not None else ()),
        ("on", text.clean(peer.device, num_max=32)),
        *((("valid", text.loss_text(peer.valid_loss)),) if _is_measured(peer) else ()),
        ("counted", counted_rounds(peer)),
        ("sent", text.size(peer.wire_bytes_sent)),
        ("received", text.size(peer.wire_bytes_received or None)),
        ("reached", reach_text(peer)),
        ("up", _rate(peer.uplink_mbit_s)),
        ("down", _rate(peer.downlink_mbit_s)),
        ("meets", text.short_id(peer.partner))
        if peer.partner
        else ("chain", text.short_hash(peer.chain)),
        ("version", text.clean(peer.version, num_max=24)),
    ]
    line = Content.assemble((f" {label(peer)} ", "bold $primary"))
    for name, value in facts:
        piece = Content.assemble((f" {name} ", "$dim"), (value or text.ABSENT, "$text-plain"))
        if line.cell_length + piece.cell_length > width:
            break
        line += piece
    return line + Content("\n") + _last_round(peer, width)


def _is_measured(peer: PeerStatus) -> bool:
    """Return whether a validation loss is to be expected: a stage alone has none."""
    return not peer.module or peer.valid_loss is not None


def _flow(flow: FlowStatus) -> list[tuple[str, str]]:
    return [
        ("waits for", waited_for(flow.waits_for)),
        ("in flight", str(flow.in_flight)),
        ("queued", str(flow.queued)),
        ("omitted", str(flow.num_omitted)),
        ("sent again", str(flow.resends)),
        ("counted twice", str(flow.double_counts)),
    ]


def reach_text(peer: PeerStatus) -> str:
    """Return how others reach a peer; empty if an older version does not report it."""
    if peer.reach == "relayed":
        by = f" {text.short_id(peer.relays[0])}" if peer.relays else ""
        return f"by relay{by}, {text.size(peer.relayed_bytes)}"
    told = {"direct": "directly", "upnp": "by UPnP", "hole": "by holes in routers"}
    return told.get(peer.reach, "")


def _rate(mbit_s: float) -> str:
    """A link's speed; in a status, 0 means unknown."""
    return f"{text.count(mbit_s)} Mbit/s" if mbit_s else text.ABSENT


def _last_round(peer: PeerStatus, width: int) -> Content:
    if not peer.phases:
        known = "its phases were not recorded" if peer.rounds_counted else "no round finished yet"
        return Content.assemble((f" {known}", "$dim"))
    names = legend(peer.phases)
    room = width - names.cell_length - 3
    if room >= 8:
        return Content(" ") + stacked(peer.phases, room) + Content("  ") + names
    longest = dict(ordered_phases(peer.phases))
    while len(longest) > 1 and legend(longest).cell_length + 1 > width:
        longest.pop(min(longest, key=longest.__getitem__))
    return Content(" ") + legend(longest).truncate(max(0, width - 1), ellipsis=True)
