"""A run on one page, for people who were not there: figures, plots, stages, peers and events.

Another page shows the figures and losses of several runs side by side.

The page is one HTML file that loads nothing. Names and events come from other machines: they are
escaped, and the plots are images, so that nothing in them runs.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape

from atoll.coordinator.recorded import PastRun
from atoll.coordinator.report.curves import Curve, compared, curves
from atoll.coordinator.report.figures import figures, run_names, side_by_side
from atoll.coordinator.report.pictures import drawn
from atoll.coordinator.report.view import (
    IMPORTANT,
    event_text,
    label,
    names,
    naming,
)
from atoll.coordinator.run.status import Event, ModuleStatus, PeerStatus, RoundSummary, RunStatus
from atoll.coordinator.run.text import (
    ABSENT,
    clean,
    clock_time,
    count,
    percent,
    size,
)

MAX_EVENTS = 100
MAX_PEERS = 500

STYLE = """
body { margin: 2.5rem auto; max-width: 62rem; padding: 0 1rem; color: #1b2a33;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; } h2 { margin: 2rem 0 .5rem; font-size: 1.1rem; } p { color: #5c6b74; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: 1rem; }
dt { color: #5c6b74; font-size: .8rem; } dd { margin: 0; font-size: 1.2rem; }
img { width: 100%; } table { border-collapse: collapse; width: 100%; font-size: .85rem; }
th { text-align: left; color: #5c6b74; font-weight: normal; border-bottom: 1px solid #c6cfd4; }
td, th { padding: .25rem .6rem .25rem 0; } td.n, th.n { text-align: right; }
tr.warning td { color: #a05a00; } tr.error td { color: #b3261e; }
.scroll { overflow-x: auto; }
"""


def page(status: RunStatus, rounds: Sequence[RoundSummary]) -> str:
    """Return the page of a run.

    Args:
        status: the newest one.
        rounds: those to plot, oldest first.
    """
    known = names(status)
    body = [
        f"<h1>{_text(status.run_name)}</h1>",
        f"<p>{_text(_subtitle(status))}</p>",
        _facts(status, rounds),
        "<h2>Course</h2>",
        *(map(_picture, curves(rounds)) if len(rounds) > 1 else ["<p>Too few rounds to plot.</p>"]),
    ]
    if status.modules:
        body += ["<h2>Stages</h2>", _stages(status.modules)]
    body += ["<h2>Peers</h2>", _peers(status)]
    body += ["<h2>Events</h2>", _events(status.events, known)]
    return _html(status.run_name, body)


def comparison(runs: Sequence[PastRun]) -> str:
    """Return the page of several runs side by side."""
    called = run_names([run.status for run in runs])
    title = " and ".join(called)
    plots = compared({name: run.rounds for name, run in zip(called, runs, strict=True)})
    body = [
        f"<h1>{_text(title)}</h1>",
        _table(("", *called), side_by_side(runs)),
        "<h2>Course</h2>",
        *(map(_picture, plots) if plots else ["<p>Too few rounds to plot.</p>"]),
    ]
    return _html(title, body)


def _html(title: str, body: Iterable[str]) -> str:
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width">',
            f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>",
            *body,
            "</body></html>",
            "",
        ]
    )


def _text(text: object) -> str:
    return escape(clean(text))


def _subtitle(status: RunStatus) -> str:
    when = clock_time(status.now, with_date=True)
    return f"run {status.run_id[:12]}, {status.state} at {when} by the coordinator's clock"


def _facts(status: RunStatus, rounds: Sequence[RoundSummary]) -> str:
    told = figures(status, rounds)
    rows = (f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in told)
    return f"<dl>{''.join(rows)}</dl>"


def _picture(curve: Curve) -> str:
    data = b64encode(drawn(curve)).decode()
    return f'<img alt="{_text(curve.title)}" src="data:image/svg+xml;base64,{data}">'


def _stages(modules: Iterable[ModuleStatus]) -> str:
    rows = [
        (
            module.name,
            f"{module.position:,}",
            count(module.params),
            f"{module.peers}",
            percent(module.utilisation),
            f"{module.omitted:,}",
            f"{module.double_counts:,}",
            f"{module.moves:,}",
        )
        for module in modules
    ]
    heads = ("stage", "round", "parameters", "peers", "busy", "omitted", "twice", "moves")
    return _table(heads, rows)


def _peers(status: RunStatus) -> str:
    peers = sorted(status.peers, key=lambda peer: -peer.tokens_counted)
    total = sum(peer.tokens_counted for peer in peers) or 1
    shown = [_peer_row(peer, total) for peer in peers[:MAX_PEERS]]
    heads = ("peer", "device", "rounds", "tokens", "share", "sent", "received", "version")
    left = f"<p>{len(peers) - MAX_PEERS:,} more.</p>" if len(peers) > MAX_PEERS else ""
    note = "<p>Counted since the last start of each peer.</p>"
    return note + _table(heads, shown) + left


def _peer_row(peer: PeerStatus, total: int) -> tuple[str, ...]:
    return (
        label(peer),
        peer.device,
        f"{peer.rounds_counted:,} of {peer.rounds_seen:,}",
        count(peer.tokens_counted),
        percent(peer.tokens_counted / total),
        size(peer.wire_bytes_sent),
        size(peer.wire_bytes_received),
        peer.version,
    )


def _events(events: Sequence[Event], known: dict[str, str]) -> str:
    """Return warnings and errors, then others, the newest of each; newest first."""
    first = sorted(events, key=lambda event: (event.level not in IMPORTANT, -event.at))
    shown = sorted(first[:MAX_EVENTS], key=lambda event: -event.at)
    name = naming(known)
    rows = [
        (clock_time(event.at, with_date=True), event.level, event_text(event, name))
        for event in shown
    ]
    return _table(("time", "level", "event"), rows, classes=[event.level for event in shown])


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str] = ()) -> str:
    """Return a table; a column whose cells all begin with a digit or are empty is of numbers."""
    if not rows:
        return "<p>None.</p>"
    of_numbers = [all(map(_is_number, column)) for column in zip(*rows, strict=True)]

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if right else ''}>{_text(cell)}</{tag}>"
            for cell, right in zip(row, of_numbers, strict=True)
        )

    marks = [f' class="{mark}"' for mark in classes] or [""] * len(rows)
    lines = [f"<tr{mark}>{cells('td', row)}</tr>" for mark, row in zip(marks, rows, strict=True)]
    return (
        f'<div class="scroll"><table><tr>{cells("th", heads)}</tr>\n'
        + "\n".join(lines)
        + "\n</table></div>"
    )


def _is_number(cell: str) -> bool:
    return not cell or cell == ABSENT or (cell[0].isdigit() and ":" not in cell)
