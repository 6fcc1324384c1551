"""Plain-text output: one line for each round and each important event.

`lines` is pure: two states in, text out, so that a log file, a pipe and a test see the same.
`follow` polls a feed and writes new lines until the run has finished. Strings from other machines
pass through `clean`, because logs are read in terminals.

    14:24:26  round  37/120  loss 1.363  52.5k tok/s  5.30 MB sent  util 96.4%  5 peers
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from atoll.coordinator.report.feed import INTERVAL_S, Feed, FeedError, pause_s, read
from atoll.coordinator.report.figures import run_names, side_by_side
from atoll.coordinator.report.view import (
    IMPORTANT,
    apart,
    binding,
    copies_text,
    counted_rounds,
    event_text,
    gap_text,
    is_gone,
    label,
    names,
    naming,
    num_present,
    orders_text,
    reached,
    rows_text,
    shown_state,
    sorted_peers,
    utilisation,
    utilisation_of,
    waited_for,
    waits_for,
    without,
)
from atoll.coordinator.run import text
from atoll.coordinator.run.notice import CANNOT_REACH
from atoll.coordinator.run.status import (
    Event,
    ModuleStatus,
    PeerStatus,
    RoundSummary,
    RunStatus,
    seconds_between,
)

if TYPE_CHECKING:
    from atoll.coordinator.recorded import PastRun

# A round is known before its members' reports on it, which come with the next heartbeats.
TRACES_WITHIN_S = 3.0
MAX_NAMED = 8  # peers that join or leave between two looks
MAX_PAIRS = 8  # of peers that cannot reach each other, named in a status


def lines(previous: RunStatus | None, current: RunStatus) -> list[str]:
    """Return the lines for what happened between two states, ordered by the server's time."""
    return [line for _, line in dated_lines(previous, current)]


def dated_lines(previous: RunStatus | None, current: RunStatus) -> list[tuple[float, str]]:
    """Return these lines with their times.

    Position and equality decide which rounds and events are new, not time stamps. A state older
    than the previous one, as after a restart of the feed, yields no lines.
    """
    if previous is not None and is_older(current, previous):
        return []
    known = names(current)
    name = naming(known)
    events = [event for event in new_events(previous, current) if event.level in IMPORTANT]
    entries = [(event.at, _event_line(event, known, name)) for event in events]
    entries += [(row.at, line) for row, line in _round_lines(previous, current)]
    # While a run waits, its line says how many are here.
    if previous is not None and "waiting" not in (previous.state, current.state):
        entries += [(current.now, line) for line in _comings(previous, current)]
    entries.sort(key=lambda entry: entry[0])
    change = _state_change(previous, current)
    if current.state == "finished":
        return [*entries, *((current.now, line) for line in change)]
    at = min(current.now, entries[0][0] if entries else current.now)
    return [*((at, line) for line in change), *entries]


def _comings(previous: RunStatus, current: RunStatus) -> list[str]:
    """Return who joined and who left; an event reports those that fell silent."""
    before = {peer.peer_id for peer in previous.peers if not is_gone(peer)}
    came = [p for p in sorted_peers(current) if not is_gone(p) and p.peer_id not in before]
    went = [p for p in sorted_peers(current) if p.state == "left" and p.peer_id in before]
    return [
        f"{text.clock_time(current.now)}  {_named(peers)} {verb}"
        for peers, verb in ((came, "joined"), (went, "left"))
        if peers
    ]


def _named(peers: Sequence[PeerStatus]) -> str:
    return ", ".join(map(label, peers)) if len(peers) <= MAX_NAMED else f"{len(peers)} peers"


def new_events(previous: RunStatus | None, current: RunStatus) -> list[Event]:
    """Return the events that a state has and the one before it has not."""
    known = set(previous.events) if previous is not None else set()
    return [event for event in current.events if event not in known]


def _round_lines(previous: RunStatus | None, current: RunStatus) -> list[tuple[RoundSummary, str]]:
    before = dict(zip(map(id, current.history[1:]), current.history, strict=False))
    return [
        (row, round_line(row, before.get(id(row)), current))
        for row in settled_rounds(previous, current)
    ]


def settled_rounds(previous: RunStatus | None, current: RunStatus) -> list[RoundSummary]:
    """Return the rounds whose numbers no longer change, but for those that had settled before."""
    last, settled = _last_settled(previous), _last_settled(current)
    return [row for row in current.history if last < (row.epoch, row.position) <= settled]


def _last_settled(status: RunStatus | None) -> tuple[int, int]:
    """Epoch and position of the last round whose numbers no longer change."""
    if status is None:
        return (-1, -1)
    settled = [(row.epoch, row.position) for row in status.history if _is_settled(row, status)]
    return max(settled, default=(-1, -1))


def _is_settled(row: RoundSummary, status: RunStatus) -> bool:
    return status.now - row.at >= TRACES_WITHIN_S


def round_line(row: RoundSummary, before: RoundSummary | None, status: RunStatus) -> str:
    """Format one round: its number, loss, tokens/s, bytes sent, utilisation and members.

    Rate and bytes are a dash if no member has reported on the round.
    """
    total = f"/{status.rounds_total}" if status.rounds_total else ""
    is_reported = bool(row.seconds)
    fields = [
        text.clock_time(row.at),
        f"round {row.position:>{max(3, len(total) - 1)}}{total}",
        f"loss {text.loss_text(row.loss)}",
        f"{text.count(_rate(row, before, status) if is_reported else None):>5} tok/s",
        f"{text.size(row.wire_bytes if is_reported else None):>7} sent",
        f"util {utilisation(status)}",
        _members(row, status),
    ]
    if row.valid_loss is not None:
        fields.append(f"valid {text.loss_text(row.valid_loss)}")
    return "  ".join(fields)


def _rate(row: RoundSummary, before: RoundSummary | None, status: RunStatus) -> float | None:
    """Tokens per second; None for a round that the coordinator missed."""
    gap_s = seconds_between(before or row, row)
    if gap_s is None:
        return None
    return row.tokens / gap_s if gap_s else status.tokens_per_s


def _members(row: RoundSummary, status: RunStatus) -> str:
    members = f"{row.members} peer{'' if row.members == 1 else 's'}"
    if status.modules:  # its rounds are those of the last stage, where the loss is known
        members += f" of {text.clean(status.modules[-1].name)}"
    absent = without(row, names(status))
    return f"{members} (without {'; '.join(absent)})" if absent else members


def _event_line(event: Event, known: Mapping[str, str], name: Callable[[str], str]) -> str:
    source = known.get(event.source) or text.short_id(event.source)
    front = f"{source}: " if source else ""
    return f"{text.clock_time(event.at)}  {event.level}  {front}{event_text(event, name)}"


def _state_change(previous: RunStatus | None, current: RunStatus) -> list[str]:
    if previous is not None and _standing(previous) == _standing(current):
        return []
    at = text.clock_time(current.now)
    match _shown_state(current):
        case "waiting":
            return [f"{at}  waiting for peers: {waits_for(current)} online"]
        case "finished":
            tokens, loss = text.count(current.tokens_total), text.loss_text(current.loss)
            return [f"{at}  finished after {current.position} rounds: {tokens} tokens, loss {loss}"]
        case "paused":
            return [f"{at}  paused by the organiser after round {current.position}"]
        case "stalled" if not num_present(current):
            return [f"{at}  stalled: no peer is online; training resumes when peers return"]
        case "stalled":
            return [f"{at}  stalled: no round committed for too long"]
        case _:
            return [] if previous is None else [f"{at}  training"]


def _standing(status: RunStatus) -> tuple[str, str]:
    """The state and, while the run waits for peers, how many are online."""
    state = _shown_state(status)
    return state, waits_for(status) if state == "waiting" else ""


def _shown_state(status: RunStatus) -> str:
    """The state; 'finished' only once the line of the last round is complete."""
    if status.state == "finished" and not is_over(status):
        return "training"
    return status.state


def is_older(status: RunStatus, than: RunStatus) -> bool:
    """Return whether a state is of before another one, as after a restart of the feed."""
    return (status.epoch, status.position) < (than.epoch, than.position)


async def follow(
    feed: Feed,
    write: Callable[[str], None],
    *,
    interval_s: float = INTERVAL_S,
    since: RunStatus | None = None,
) -> RunStatus:
    """Write the lines of a run until it has finished; report a lost connection once.

    Args:
        feed: reads the status of the run.
        write: takes one line without its line end.
        interval_s: seconds from one reading to the next.
        since: what is known of the run already; by default all that it remembers is written.

    Returns:
        The last status of the finished run.
    """
    previous = since
    num_failures = 0
    held: list[tuple[float, str]] = []
    while True:
        try:
            current = await read(feed)
        except FeedError as error:
            num_failures += 1
            if num_failures == 1:
                write(f"--:--:--  {error}; retrying")
        else:
            if num_failures:
                write(f"{text.clock_time(current.now)}  reconnected")
            held += dated_lines(previous, current)
            for line in _due(held, current):
                write(line)
            if is_over(current):
                return current
            previous = current if previous is None or not is_older(current, previous) else previous
            num_failures = 0
        await asyncio.sleep(pause_s(previous, num_failures, interval_s))


def _due(held: list[tuple[float, str]], status: RunStatus) -> list[str]:
    """Take the lines that no round before them can still follow, in order of time."""
    open_s = min((row.at for row in status.history if not _is_settled(row, status)), default=None)
    due = [entry for entry in held if open_s is None or entry[0] < open_s]
    held[:] = [entry for entry in held if entry not in due]
    return [line for _, line in sorted(due, key=lambda entry: entry[0])]


def is_over(status: RunStatus) -> bool:
    """Return whether nothing more will come."""
    return status.state == "finished" and all(_is_settled(row, status) for row in status.history)


def render_status(status: RunStatus) -> str:
    """Format the status for `atoll status`: a list of facts and a table of peers."""
    goal = f" of {status.rounds_total}" if status.rounds_total else ""
    facts = [
        ("state", status.state),
        ("round", f"{status.position}{goal}, epoch {status.epoch}"),
        *([] if status.modules else [("chain", text.clean(status.chain) or text.ABSENT)]),
        ("loss", _losses(status)),
        (
            "tokens",
            f"{text.count(status.tokens_total)}, {text.count(status.tokens_per_s)} per second",
        ),
        ("utilisation", utilisation(status)),
        ("method", f"{text.clean(status.method)}, H={status.inner_steps}"),
        ("codec", text.clean(status.codec)),
        ("parameters", text.count(status.params)),
        ("peers", f"{num_present(status)} of {len(status.peers)} online"),
    ]
    if passed := rows_text(status):
        facts.append(("rows", passed))
    if changed := orders_text(status):
        facts.append(("orders", changed))
    if status.modules:
        binds = binding(status)
        most = f"; the others wait for {binds}" if binds else ""
        facts.append(("stages", f"{len(status.modules)}{most}"))
    pairs = apart(status)
    for one, other in pairs[:MAX_PAIRS]:
        facts.append(("unreachable", f"{label(one)} and {label(other)} {CANNOT_REACH}"))
    if len(pairs) > MAX_PAIRS:
        facts.append(("unreachable", f"{len(pairs) - MAX_PAIRS} more pairs"))
    if status.gaps:
        rounds = ", ".join(map(gap_text, status.gaps))
        facts.append(("missing", f"updates of rounds {rounds}: no peer has kept them"))
    if copied := copies_text(status):
        facts.append(("copies", copied))
    head = [f"{text.clean(status.run_name)} ({text.short_hash(status.run_id)})"]
    body = [f"  {name:<12} {value}" for name, value in facts]
    return "\n".join([*head, *body, *_stage_table(status), *_peer_table(status)])


def render_comparison(runs: Sequence[PastRun]) -> str:
    """Format several runs side by side, with the figures of the report that compares them."""
    rows = [("", *run_names([run.status for run in runs])), *side_by_side(runs)]
    return "\n".join(_aligned([tuple(map(text.clean, row)) for row in rows]))


def _losses(status: RunStatus) -> str:
    """The losses; a pipeline that does not measure it has no validation loss."""
    loss = text.loss_text(status.loss)
    if status.modules and status.valid_loss is None:
        return loss
    return f"{loss}, validation {text.loss_text(status.valid_loss)}"


def _stage_table(status: RunStatus) -> list[str]:
    if not status.modules:
        return []
    rows: list[tuple[str, ...]] = [
        (
            "stage",
            "state",
            "round",
            "chain",
            "params",
            "peers",
            "tok/s",
            "util",
            "in flight",
            "queued",
            "omitted",
            "twice",
            "moved in",
            "waits for",
        )
    ]
    rows += [_stage_row(module) for module in status.modules]
    return ["", *_aligned(rows)]


def _stage_row(module: ModuleStatus) -> tuple[str, ...]:
    return (
        f"{text.clean(module.name)}{', binds' if module.binds else ''}",
        module.state,
        str(module.position),
        text.short_hash(module.chain),
        text.count(module.params),
        str(module.peers),
        text.count(module.tokens_per_s),
        text.percent(module.utilisation if module.peers else None),
        str(module.in_flight),
        str(module.queued),
        str(module.omitted),
        str(module.double_counts),
        str(module.moves),
        waited_for(module.waits_for),
    )


def _peer_table(status: RunStatus) -> list[str]:
    if not status.peers:
        return []
    rows = [
        (
            "peer",
            *(("stage",) if status.modules else ()),
            "state",
            "round",
            "counted",
            "tok/s",
            "loss",
            "sent",
            "received",
            "util",
            "reach",
            "seen",
        )
    ]
    known = names(status)
    for peer in sorted_peers(status):
        rows.append(
            (
                label(peer),
                *((text.clean(peer.module) or text.ABSENT,) if status.modules else ()),
                shown_state(peer),
                str(peer.position),
                counted_rounds(peer),
                text.count(peer.tokens_per_s),
                text.loss_text(peer.loss),
                text.size(peer.wire_bytes_sent),
                text.size(peer.wire_bytes_received),
                text.percent(utilisation_of(peer)),
                reached(peer, known),
                f"{text.duration(peer.last_seen_s)} ago",
            )
        )
    return ["", *_aligned(rows)]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Pad columns to their widest cell: the first two aligned left, the others right."""
    widths = [max(text.cells(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            text.fit(cell, width, right=i > 1)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
