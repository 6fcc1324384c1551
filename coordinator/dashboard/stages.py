"""The stages of a pipeline, side by side in the order in which microbatches flow through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from textual.content import Content

from atoll.coordinator.dashboard.header import STATE_STYLES
from atoll.coordinator.dashboard.marks import bar
from atoll.coordinator.dashboard.peers import dot_style
from atoll.coordinator.report.view import is_gone, label, peers_of, utilisation_of, waited_for
from atoll.coordinator.run import text
from atoll.coordinator.run.status import ModuleStatus, PeerStatus, RunStatus

NUM_FACT_LINES: Final = 5
MIN_CELLS: Final = 23  # of a column: three stages fit side by side into 80 cells
_GAP: Final = 3
_MARK_FROM_CELLS: Final = 27  # a narrower column has the mark's sign alone
_ALL_COUNTS_FROM_CELLS: Final = 36
_UNIT_FROM_CELLS: Final = 30  # in a narrower column a unit leaves too little for a peer's name


def num_lines(status: RunStatus) -> int:
    """Return how many lines show all peers of each stage."""
    return NUM_FACT_LINES + max((len(peers_of(status, m)) for m in status.modules), default=0)


def num_columns(status: RunStatus, width: int) -> int:
    """Return how many stages fit side by side into `width` cells."""
    return max(1, min(len(status.modules), (width + _GAP) // (MIN_CELLS + _GAP)))


def columns(status: RunStatus, width: int, height: int, *, first: int = 0) -> Content:
    """Draw the stages from index `first` on in `width` x `height` cells."""
    count = num_columns(status, width)
    shown = status.modules[first : first + count]
    if not shown or height < 1:
        return Content("")
    cells = max(1, (width - _GAP * (count - 1)) // count)
    drawn = [_column(module, peers_of(status, module), cells, height) for module in shown]
    lines = []
    for index in range(max(map(len, drawn))):
        row = [_padded(each[index : index + 1], cells) for each in drawn]
        between = ("   ", "") if index else (" → ", "$dim")
        lines.append(Content.assemble(between).join(row))
    return Content("\n").join(lines)


def _padded(found: Sequence[Content], cells: int) -> Content:
    line = found[0].truncate(cells, ellipsis=True) if found else Content("")
    return line.pad_right(max(0, cells - line.cell_length))


def _column(
    module: ModuleStatus, peers: Sequence[PeerStatus], cells: int, height: int
) -> list[Content]:
    facts = [
        _title(module, cells),
        _progress(module),
        _busy(module, cells),
        Content.assemble(("waits for ", "$dim"), (waited_for(module.waits_for), "$text-plain")),
        _counts(module, cells),
    ][:height]
    room = height - len(facts)
    listed = list(peers) if len(peers) <= room else list(peers)[: max(0, room - 1)]
    lines = [*facts, *(_peer(peer, cells) for peer in listed)]
    if 0 < room < len(peers):
        lines.append(Content.assemble((f"  and {len(peers) - len(listed)} more", "$dim")))
    return lines


def _title(module: ModuleStatus, cells: int) -> Content:
    name = Content.assemble((text.clean(module.name, num_max=24), "bold $primary"))
    if module.peers:
        plural = "" if module.peers == 1 else "s"
        name += Content.assemble((f" · {module.peers} peer{plural}", "$dim"))
    elif module.state != "finished":
        name += Content.assemble((" · ", "$dim"), ("no peer", "bold $bad"))
    if not module.binds:
        return name
    mark = "▲ binds" if cells >= _MARK_FROM_CELLS else "▲"
    room = max(0, cells - text.cells(mark) - 1)
    kept = name.truncate(room, ellipsis=True)
    return kept.pad_right(room + 1 - kept.cell_length) + Content.assemble((mark, "bold $warn"))


def _progress(module: ModuleStatus) -> Content:
    line = Content.assemble(("round ", "$dim"), (f"{module.position}", "bold $text-plain"))
    if module.state != "training":
        style = STATE_STYLES[module.state].rpartition(" ")[2]
        return line + Content.assemble((" · ", "$dim"), (module.state, style))
    rate = text.count(module.tokens_per_s)
    return line + Content.assemble((" · ", "$dim"), (rate, "$text-plain"), (" tok/s", "$dim"))


def _busy(module: ModuleStatus, cells: int) -> Content:
    share = module.utilisation if module.peers else None
    number = f" {text.percent(share):>4}"
    style = "$warn" if module.binds else "$good"
    drawn = bar(share, max(1, cells - 5 - len(number)), style)
    return Content.assemble(("util ", "$dim")) + drawn + Content.assemble((number, "$text-plain"))


def _counts(module: ModuleStatus, cells: int) -> Content:
    is_wide = cells >= _ALL_COUNTS_FROM_CELLS
    pieces = [
        (module.in_flight, " in flight", "$text-plain"),
        *([(module.queued, " queued", "$text-plain")] if is_wide else []),
        (module.omitted, " omitted", "$warn" if module.omitted else "$text-plain"),
        *([(module.double_counts, " twice", "$warn")] if is_wide and module.double_counts else []),
        *([(module.moves, " moved in", "$text-plain")] if module.moves else []),
    ]
    parts = [Content.assemble((text.count(n), style), (what, "$dim")) for n, what, style in pieces]
    return Content.assemble((" · " if is_wide else " ", "$dim")).join(parts)


def _peer(peer: PeerStatus, cells: int) -> Content:
    if is_gone(peer):
        return Content.assemble(
            ("○ ", dot_style(peer)), (f"{label(peer)} ", "dim"), (peer.state, dot_style(peer))
        )
    rate, share = text.count(peer.tokens_per_s), text.percent(utilisation_of(peer))
    unit = " tok/s" if cells >= _UNIT_FROM_CELLS else ""
    numbers = Content.assemble(
        (f" {rate:>5}", "$text-plain"), (unit, "$dim"), (f" {share:>4}", "$text-plain")
    )
    name = Content.assemble(("● ", dot_style(peer)), (label(peer), "bold $text-plain"))
    room = max(0, cells - numbers.cell_length)
    kept = name.truncate(room, ellipsis=True)
    return kept.pad_right(room - kept.cell_length) + numbers
