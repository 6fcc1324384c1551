"""Committed rounds: the list, and the phases of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from textual.content import Content

from atoll.coordinator.dashboard.grid import Column
from atoll.coordinator.dashboard.marks import PHASES, legend, ordered_phases, stacked
from atoll.coordinator.report.view import is_gone, is_held, label, missing, sorted_peers, without
from atoll.coordinator.run import text
from atoll.coordinator.run.status import Gap, RoundSummary, RunStatus

NUM_DETAIL_LINES: Final = 2
_PHASES_CELLS: Final = 16  # leaves room for the reasons of peers left out
_NAME_CELLS: Final = 14
_SECONDS_CELLS: Final = 7


def total_s(seconds: dict[str, float]) -> float:
    """Return the length of a round, from its phases."""
    return sum(value for _, value in ordered_phases(seconds))


def newest_first(status: RunStatus) -> list[RoundSummary]:
    """Return the rounds in the order of the list."""
    return list(reversed(status.history))


def _plain(value: str) -> Content:
    return Content.assemble((value, "$text-plain"))


def _members(row: RoundSummary, width: int) -> Content:
    members = Content.assemble((str(row.members), "$text-plain"))
    if row.left_out:
        members += Content.assemble((f" −{len(row.left_out)}", "$warn"))  # noqa: RUF001
    return members


_COLUMNS: Final[tuple[Column[RoundSummary], ...]] = (
    Column(
        title="round", width=5, priority=0, right=True,
        draw=lambda r, w: Content.assemble((str(r.position), "bold $text-plain")),
    ),
    Column(
        title="at", width=8, priority=6, draw=lambda r, w: Content.assemble(
            (text.clock_time(None if r.late else r.at), "$dim")
        ),
    ),
    Column(
        title="loss", width=6, priority=1, right=True,
        draw=lambda r, w: _plain(text.loss_text(r.loss)),
    ),
    Column(
        title="tokens", width=6, priority=4, right=True,
        draw=lambda r, w: _plain(text.count(r.tokens)),
    ),
    Column(title="peers", width=5, priority=2, draw=_members),
    Column(
        title="bytes", width=7, priority=3, right=True,
        draw=lambda r, w: _plain(text.size(r.wire_bytes) if r.seconds else text.ABSENT),
    ),
    Column(
        title="took", width=6, priority=2, right=True,
        draw=lambda r, w: _plain(text.duration(total_s(r.seconds) if r.seconds else None)),
    ),
    Column(
        title="phases", width=10, grow_to=60, priority=4,
        draw=lambda r, w: stacked(r.seconds, w),
    ),
    Column(
        title="chain", width=8, priority=7,
        draw=lambda r, w: Content.assemble((text.short_hash(r.chain), "$accent")),
    ),
)  # fmt: skip


def columns(
    names: Mapping[str, str], history: Sequence[RoundSummary]
) -> list[Column[RoundSummary]]:
    """Return the columns of the list; `names` are by PeerID.

    Peers left out get a column once there are any.
    """

    def left_out(row: RoundSummary, width: int) -> Content:
        return Content.assemble(("; ".join(without(row, names)), "$warn"))

    if not any(map(missing, history)):
        return list(_COLUMNS)
    column = Column(title="left out", width=12, grow_to=48, priority=3, draw=left_out)
    narrowed = [replace(c, grow_to=_PHASES_CELLS) if c.title == "phases" else c for c in _COLUMNS]
    return [*narrowed, column]


def details(
    row: RoundSummary | None, names: Mapping[str, str], gaps: Sequence[Gap], width: int
) -> Content:
    """Return two lines: the peers missing from a round, wholly or in part, and why."""
    if row is None:
        return Content.assemble("\n")
    head = Content.assemble((f" round {row.position} ", "bold $primary"))
    if not is_held(row, gaps):
        head += Content.assemble(("update not stored: no peer has kept it  ", "$warn"))
    absent = without(row, names)
    if absent:
        head += Content.assemble(("without ", "$dim"), ("; ".join(absent), "$warn"))
    else:
        head += Content.assemble(("no peer was left out", "$dim"))
    lines = head.wrap(max(8, width))
    kept = [*lines[: NUM_DETAIL_LINES - 1], Content(" ").join(lines[NUM_DETAIL_LINES - 1 :])]
    return Content("\n").join(line.truncate(width, ellipsis=True) for line in kept)


Bar = tuple[str, str, dict[str, float]]  # name, style, seconds by phase


def waterfall(status: RunStatus, chosen: RoundSummary | None, width: int, height: int) -> Content:
    """Draw phases on one time scale: the chosen round, each peer's last one, earlier rounds."""
    bars = _bars(status, chosen)[: max(1, height - 2)]
    if not bars:
        return Content.assemble((" no round has finished yet", "$dim"))
    scale_s = max(total_s(seconds) for _, _, seconds in bars)
    lines = [_bar_line(name, style, seconds, width, scale_s) for name, style, seconds in bars]
    names = [phase for phase in PHASES if any(phase in seconds for _, _, seconds in bars)]
    foot = [_axis(width, scale_s), Content(" ") + legend(names=names).truncate(max(0, width - 1))]
    return Content("\n").join([*lines, *foot][: max(1, height)])


def _bars(status: RunStatus, chosen: RoundSummary | None) -> list[Bar]:
    peers: list[Bar] = [
        (label(peer), "$text-plain", peer.phases)
        for peer in sorted_peers(status)
        if peer.phases and not is_gone(peer)
    ]
    first = [] if chosen is None else [_round_bar(chosen, "bold $primary")]
    earlier = [
        _round_bar(row, "$dim")
        for row in newest_first(status)
        if chosen is None or row.position < chosen.position
    ]
    return [found for found in [*first, *peers, *earlier] if found[2]]


def _round_bar(row: RoundSummary, style: str) -> Bar:
    return f"round {row.position}", style, row.seconds


def _bar_line(
    name: str, style: str, seconds: dict[str, float], width: int, scale_s: float
) -> Content:
    room = max(1, width - _NAME_CELLS - _SECONDS_CELLS - 2)
    return Content.assemble(
        (" " + text.fit(name, _NAME_CELLS - 1) + " ", style),
        stacked(seconds, room, scale_s=scale_s),
        (f"{text.duration(total_s(seconds)):>{_SECONDS_CELLS}}", "$text-plain"),
    )


def _axis(width: int, scale_s: float) -> Content:
    room = max(1, width - _NAME_CELLS - _SECONDS_CELLS - 2)
    ends = "0s", text.duration(scale_s)
    gap = max(1, room - len(ends[0]) - len(ends[1]))
    return Content.assemble((" " * (_NAME_CELLS + 1) + ends[0] + " " * gap + ends[1], "$dim"))
