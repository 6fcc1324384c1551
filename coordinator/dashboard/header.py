"""The top of the screen: the run's name, state, progress and key figures."""

from __future__ import annotations

from typing import Final

from textual.content import Content

from atoll.coordinator.dashboard.events import alert
from atoll.coordinator.dashboard.marks import bar, spark
from atoll.coordinator.dashboard.peers import utilisation_style
from atoll.coordinator.report.mine import mine_facts
from atoll.coordinator.report.view import (
    View,
    binding,
    copies_text,
    elapsed_seconds,
    eta_seconds,
    names,
    num_online,
    num_present,
    orders_text,
    round_seconds,
    rows_text,
    token_rates,
    utilisation,
    waits_for,
)
from atoll.coordinator.run import text
from atoll.coordinator.run.status import RunStatus

Fact = tuple[str, Content]  # label, value

STATE_STYLES: Final = {
    "waiting": "bold $on-chip on $warn",
    "training": "bold $on-chip on $good",
    "paused": "bold $on-chip on $warn",
    "stalled": "bold $on-chip on $bad",
    "finished": "bold $on-chip on $primary",
}
MIN_AGE_SHOWN_S: Final = 3.0  # a status is read every second; a younger one counts as live


def header(view: View, width: int) -> Content:
    """Return the header's lines for `width` cells."""
    status = view.status
    lines = [_edges(_name(view.title, status), link(view), width)]
    if view.failure:
        lines.append(Content.assemble((f" {view.failure}", "$bad")).truncate(width, ellipsis=True))
    if status is not None:
        lines += [_progress(status, width), *_fact_lines(status, width)]
        if view.me:
            lines.append(_mine(status, view.me, width))
        if news := alert(status, width):
            lines.append(news)
    return Content("\n").join(lines)


def _mine(status: RunStatus, me: str, width: int) -> Content:
    """The viewer's own peer, in one line."""
    line = Content("")
    for name, value in mine_facts(status, me, names(status)):
        piece = Content.assemble((f" {name} ", "$dim"), (f"{value} ", "bold $accent"))
        if line.cell_length + piece.cell_length > width:
            break
        line += piece
    return line


def num_lines(view: View, width: int) -> int:
    """Return how many lines `header` takes."""
    return header(view, width).plain.count("\n") + 1


def link(view: View) -> Content:
    """Format the state of this screen's own connection."""
    if view.closing_in_s is not None:
        left = text.duration(view.closing_in_s)
        return Content.assemble((f"closes in {left} · any key keeps it open", "$primary"))
    if view.failure:
        return _lost(view)
    if view.replay:
        return Content.assemble((view.replay, "bold $primary"))
    if view.paused:
        return Content.assemble(("‖ paused", "bold $warn"))
    if view.status is None:
        return Content.assemble(("◌ connecting", "$warn"))
    age = f" · {text.duration(view.age_s)} old" if view.age_s >= MIN_AGE_SHOWN_S else ""
    return Content.assemble(("● ", "$good"), (f"live{age}", "$dim"))


def _lost(view: View) -> Content:
    attempt = f" · attempt {view.num_attempts + 1}"
    if view.status is None:
        return Content.assemble(("◌ no connection", "bold $bad"), (attempt, "$dim"))
    age = f"status is {text.duration(view.age_s)} old"
    return Content.assemble(("◌ connection lost", "bold $bad"), (f" · {age}{attempt}", "$dim"))


def _name(title: str, status: RunStatus | None) -> Content:
    brand = (f" {text.clean(title, num_max=24)} ", "bold $primary")
    if status is None:
        return Content.assemble(brand)
    state = text.clean(status.state, num_max=16)
    chip = (f" {state.upper()} ", STATE_STYLES.get(status.state, "bold reverse"))
    front = Content.assemble(
        brand, (text.clean(status.run_name, num_max=32), "bold $text-plain"), "  ", chip
    )
    if status.modules:  # each has a chain of its own
        return front + _stages(status)
    return front + Content.assemble(
        ("  chain ", "$dim"), (text.short_hash(status.chain), "$accent")
    )


def _stages(status: RunStatus) -> Content:
    """The number of stages, and which one binds: it may be out of view."""
    line = Content.assemble((f"  {len(status.modules)}", "$accent"), (" stages", "$dim"))
    names = binding(status)
    if not names:
        return line
    verb = "binds" if sum(module.binds for module in status.modules) == 1 else "bind"
    return line + Content.assemble((" · ", "$dim"), (f"{names} {verb}", "$warn"))


def _edges(left: Content, right: Content, width: int) -> Content:
    """Both on one line; the left is cut first: the right says whether the rest is current."""
    room = max(0, width - right.cell_length - 2)
    kept = left.truncate(room, ellipsis=True)
    return kept.pad_right(1 + room - kept.cell_length) + right


def _progress(status: RunStatus, width: int) -> Content:
    pace = round_seconds(status.history)
    tail = f"{text.duration(pace)} per round" if pace else ""
    if status.state == "waiting":
        return _waiting(status)
    if status.rounds_total <= 0:
        front = Content.assemble((" round ", "$dim"), (f"{status.position}", "bold $text-plain"))
        return front + Content.assemble((f"  until stopped  {tail}", "$dim"))
    done = status.position / status.rounds_total
    eta = eta_seconds(status)
    if eta:
        tail = f"{text.duration(eta)} left · {tail}"
    front = Content.assemble(
        (" round ", "$dim"),
        (f"{status.position}", "bold $text-plain"),
        (f"/{status.rounds_total}  ", "$dim"),
    )
    back = Content.assemble((f"  {text.percent(min(1.0, done))}", "bold $text-plain"))
    if tail:
        back += Content.assemble((f"  {tail}", "$dim"))
    room = max(4, width - front.cell_length - back.cell_length - 1)
    return front + bar(done, room, "$primary") + back


def _waiting(status: RunStatus) -> Content:
    missing = max(0, status.min_peers - num_online(status, "trainer"))
    keepers = max(0, status.min_keepers - num_online(status, "keeper"))
    more = [f"{missing}"] * bool(missing)
    more += [f"{keepers} keeper{'' if keepers == 1 else 's'}"] * bool(keepers)
    need = f"{waits_for(status)}{'' if status.min_keepers else ' peers'} online; "
    rest = f"the run starts with {' and '.join(more)} more" if more else "the run is about to start"
    return Content.assemble((f" {need}{rest}", "$warn"))


def _fact_lines(status: RunStatus, width: int) -> list[Content]:
    """The facts, with a sparkline of past rates if it takes no additional line."""
    bare = _wrapped(_facts(status, _bold(text.count(status.tokens_per_s))), width)
    drawn = _wrapped(_facts(status, _rate(status)), width)
    return drawn if len(drawn) == len(bare) else bare


def _facts(status: RunStatus, rate: Content) -> list[Fact]:
    """The facts to show, the most important first."""
    here = _bold(str(num_present(status))) + Content.assemble((f"/{len(status.peers)}", "$dim"))
    facts = [
        ("loss", _bold(text.loss_text(status.loss))),
        *([("valid", _bold(text.loss_text(status.valid_loss)))] if _is_measured(status) else []),
        ("tokens/s", rate),
        ("tokens", _bold(text.count(status.tokens_total))),
        ("util", _utilisation(status)),
        ("peers", here),
        ("sent", _bold(text.size(sum(peer.wire_bytes_sent for peer in status.peers)))),
        ("method", _bold(f"{text.clean(status.method, num_max=24)} H={status.inner_steps}")),
        ("codec", _bold(text.clean(status.codec, num_max=32))),
        ("params", _bold(text.count(status.params))),
    ]
    if passed := rows_text(status):
        facts.append(("rows", _bold(passed)))
    if changed := orders_text(status):
        facts.append(("orders", _bold(changed)))
    if copied := copies_text(status):
        is_failing = status.copies is not None and status.copies.failing
        style = "bold $warn" if is_failing else "bold $text-plain"
        facts.append(("copies", Content.assemble((copied, style))))
    elapsed = elapsed_seconds(status)
    if elapsed is not None:
        facts.append(("elapsed", _bold(text.duration(elapsed))))
    if status.epoch:
        facts.append(("epoch", _bold(str(status.epoch))))
    return facts


def _is_measured(status: RunStatus) -> bool:
    """Return whether a validation loss is to be expected."""
    return not status.modules or status.valid_loss is not None


def _bold(value: str) -> Content:
    return Content.assemble((value, "bold $text-plain"))


def _utilisation(status: RunStatus) -> Content:
    return Content.assemble((utilisation(status), f"bold {utilisation_style(status.utilisation)}"))


def _rate(status: RunStatus) -> Content:
    value = _bold(text.count(status.tokens_per_s))
    rates = token_rates(status.history)
    if len(rates) < 3:
        return value
    return value + Content.assemble(" ") + spark(rates, 16, "$accent")


def _wrapped(facts: list[Fact], width: int) -> list[Content]:
    """Wrap the facts into lines of `width` cells."""
    lines: list[Content] = []
    line = Content("")
    for label, value in facts:
        piece = Content.assemble((f" {label} ", "$dim")) + value + Content(" ")
        if line and line.cell_length + piece.cell_length > width:
            lines.append(line)
            line = Content("")
        line += piece
    return [*lines, line] if line else lines
