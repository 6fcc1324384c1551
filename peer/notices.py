"""A peer's events: of each its code, its fields, and the sentence made of them.

docs/events.md says what each one means and what to do. Codes and fields are read by programs, so
they stay; sentences may change. A `round` is the one that an entry commits: its position and one.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.coordinator.run.notice import CANNOT_REACH, event
from atoll.coordinator.run.text import percent, size
from atoll.dht.identity import short

# the process


@event("peer.starting")
def starting(*, what: str) -> str:
    return f"starting a peer for {what}; loading takes some seconds"


@event("peer.ready")
def ready(name: str, /, *, device: str, round: int, min_peers: int) -> str:
    if round:
        return f"{name} trains on {device} after round {round}"
    start = f"{min_peers} peer{'' if min_peers == 1 else 's'}"
    return f"{name} trains on {device}; the run starts with {start}"


@event("keeper.ready")
def keeper_ready(name: str, /) -> str:
    return f"{name} is a keeper: it leads and votes, and does not train"


@event("peer.phase")
def phase_changed(phase: str, /) -> str:
    return phase


@event("round.decided")
def round_decided(text: str, /) -> str:
    return text


@event("peer.stopping")
def stopping() -> str:
    return "stopping: this peer leaves the run and saves its state; Ctrl-C again ends it at once"


@event("peer.stopped")
def stopped(*, reason: str | None = None) -> str:
    return "left the run" if reason is None else f"left the run: {reason}"


@event("peer.option_unused")
def option_unused(*, option: str, reason: str) -> str:
    return f"{option} has no effect: {reason}"


@event("peer.tracker_failed")
def tracker_failed(*, tracker: str, reason: str) -> str:
    return f"--track {tracker} failed and is left; the run goes on: {reason}"


@event("peer.resting")
def resting(*, reason: str) -> str:
    return f"not training: {reason}"


@event("peer.pausing")
def pausing(*, reason: str) -> str:
    return f"leaving the run for now: {reason}"


@event("gpu.blind")
def gpu_blind() -> str:
    return (
        "--yield-gpu: this peer does not see its own use of the GPU, as in a container, so "
        "it looks for other programs only before it joins"
    )


@event("gpu.not_shared")
def cpu_encodes(*, reason: str) -> str:
    return f"the CPU encodes, as the GPU takes no second process: {reason}"


@event("rank.failed")
def rank_failed(*, rank: str, reason: str) -> str:
    return f"rank {rank}: {reason}"


@event("rank.lost")
def rank_lost(*, ranks: int) -> str:
    return f"a rank was lost; starting all {ranks} again from the saved state"


@event("rank.given_up")
def ranks_given_up(*, times: int) -> str:
    return f"a rank was lost {times} times in a row soon after the start; giving up"


@event("peer.killed_before")
def killed_before() -> str:
    return "this peer was killed, and its network process still leaves the run"


@event("task.restarted")
def task_restarted(*, reason: str) -> str:
    return reason


@event("disk.damaged")
def disk_damaged(*, reason: str) -> str:
    return f"{reason}; check the disk of this machine"


# the run and its text


@event("run.joined")
def run_joined(
    text: str,
    /,
    *,
    run: str,
    params: int,
    method: str,
    rounds_left: int | None,
    memory_bytes: int,
    disk_bytes: int,
) -> str:
    return text


@event("run.asks")
def run_asks(line: str, /) -> str:
    return line


@event("run.tokenizer")
def tokenizer_received(*, bytes: int) -> str:
    return f"tokenizer received, {size(bytes)}"


@event("data.streamed")
def data_streamed(*, source: str, split: str, revision: str | None) -> str:
    at = f", revision {revision}" if revision else ""
    return f"data: {source}, split {split}{at}, streamed from the Hugging Face hub"


@event("data.found")
def data_found(amount: str, /, *, bytes: int, tokens: int, sha256: str, not_read: str) -> str:
    left_out = f"; {not_read}" if not_read else ""
    return f"data: {amount}, SHA-256 {sha256}{left_out}"


@event("data.other")
def data_other(whose: str, /, *, sha256: str) -> str:
    return (
        f"{whose} is not the organiser's text (SHA-256 {sha256[:12]}); this peer's "
        "validation loss is that of another text, and the run's is a mean over both"
    )


@event("data.too_short")
def data_too_short(amount: str, rounds: str, most: int, /, *, tokens: int, passes: int) -> str:
    return (
        f"the text is too short for this run: this peer alone reads each of its "
        f"{amount} training tokens about {passes} times in {rounds}, "
        f"and more than {most} times teach little; add text with --data"
    )


@event("data.tokenizer_unproved")
def tokenizer_unproved(*, tokenizer: str) -> str:
    return (
        "the run states no SHA-256 of its tokenizer, so nothing shows whether "
        f"{tokenizer!r} is the organiser's; compare the files yourself"
    )


@event("model.unproved")
def model_unproved(*, model: str) -> str:
    return (
        f"the run states no SHA-256 of the source of {model}, so nothing shows "
        "whether this machine has the organiser's; compare the files yourself"
    )


# the coordinator


@event("coordinator.lost")
def coordinator_lost(*, reason: str) -> str:
    return f"out of touch with the coordinator, training continues: {reason}"


@event("coordinator.back")
def coordinator_back() -> str:
    return "in touch with the coordinator again"


@event("coordinator.newer_release")
def newer_release(*, theirs: str, ours: str) -> str:
    return (
        f"there is a newer version: the coordinator runs Atoll {theirs}, this peer {ours}. They "
        "work together; install that version when it suits you"
    )


@event("coordinator.absent")
def coordinator_absent(*, reason: str) -> str:
    return f"starting without the coordinator: {reason}"


@event("coordinator.retrying")
def coordinator_retrying(*, reason: str, retry_s: float) -> str:
    return f"{reason}; retrying in {retry_s:.1f} s"


@event("coordinator.moved")
def coordinator_moved(*, addresses: Sequence[str]) -> str:
    return f"the coordinator is at {' and '.join(addresses)} now"


@event("coordinator.found")
def coordinator_found(*, addresses: Sequence[str], reason: str) -> str:
    return f"{reason}; nodes of the run say that it is at {' and '.join(addresses)}"


@event("coordinator.lacks_entry")
def coordinator_lacks(*, entry: int) -> str:
    return (
        f"the coordinator lacks entry {entry}, whose body is not here any more (pruned to stay "
        "within round.log_mb, or damaged on the disk); if no peer has it, the coordinator resumes "
        "from a snapshot"
    )


@event("coordinator.storing")
def coordinator_storing(*, timeout_s: float) -> str:
    return (
        "waiting for the coordinator to store all rounds, and no longer than "
        f"{timeout_s:g} s while it takes none"
    )


@event("coordinator.not_stored")
def coordinator_not_stored() -> str:
    return "the coordinator has not stored the last rounds; they are kept here"


@event("disk.unwritten")
def membership_unwritten(*, reason: str) -> str:
    return f"{reason}: the membership could not be stored; make room on the disk"


# reaching others


@event("reach.found")
def reach_found(text: str, /, *, reach: str) -> str:
    return text


@event("reach.changed")
def reach_changed(text: str, /, *, reach: str) -> str:
    return f"this machine is reachable again: {text}"


@event("reach.relays")
def relays_chosen(names: str, /, *, relays: Sequence[str]) -> str:
    return f"relays of this peer: {names}"


@event("reach.private")
def private_announced() -> str:
    return (
        "--announce names private addresses alone, and the run is public: peers elsewhere cannot "
        "dial this one; announce a public address, or leave --announce out to be reached through "
        "relays"
    )


@event("reach.hole")
def hole_punched(*, peer: str) -> str:
    return f"{short(peer)} and this peer reach each other through a hole in their routers"


@event("reach.apart")
def apart(*, peer: str) -> str:
    return f"this peer and {short(peer)} {CANNOT_REACH}"


@event("reach.alone")
def alone(*, trainers: int) -> str:
    whom = "reaches no other trainer" if trainers else "is the only trainer here"
    return f"waiting for peers: this peer {whom}; training resumes with another"


@event("reach.company")
def company() -> str:
    return "another trainer is online; training resumes"


@event("roster.unread")
def roster_unread(*, reason: str) -> str:
    return f"cannot read the roster: {reason}; using the last one"


# this peer's state


@event("state.resumed")
def state_resumed(*, position: int) -> str:
    return f"resumed at position {position} from this machine"


@event("state.recovered")
def state_recovered(
    *,
    from_position: int,
    to_position: int,
    snapshot: int | None,
    entries: int,
    donors: Sequence[str],
    seconds: float,
) -> str:
    how = f"{entries} entries"
    if snapshot is not None:
        how = f"the snapshot at {snapshot} and {how}"
    names = ", ".join(d if d == "coordinator" else short(d) for d in donors) or "no peer"
    return (
        f"recovered from position {from_position} to {to_position}: "
        f"{how} from {names} in {seconds:.1f} s"
    )


@event("state.from_neighbour")
def state_from_neighbour(*, round: int, peer: str, seconds: float) -> str:
    return f"recovered the state of round {round} from {short(peer)} in {seconds:.1f} s"


@event("state.from_coordinator")
def state_from_coordinator(*, round: int) -> str:
    return f"recovered the state of round {round} from the coordinator"


@event("state.none_yet")
def no_state_yet(*, reason: str) -> str:
    return f"no state from the coordinator yet: {reason}"


@event("state.no_first")
def no_first_state(*, reason: str) -> str:
    return f"no first state from the coordinator yet: {reason}"


@event("state.behind")
def cannot_catch_up(*, reason: str) -> str:
    return f"cannot catch up yet: {reason}"


@event("state.older_saved")
def older_state_saved(*, round: int, saved_round: int) -> str:
    return (
        f"resuming from round {round} of a neighbour; the state saved here is of "
        f"round {saved_round}"
    )


@event("state.rewound")
def rewound(*, epoch: int, position: int, entries: int) -> str:
    return f"epoch {epoch} begins at position {position}: {entries} entries beyond it are void"


@event("state.disproved")
def state_disproved(*, reason: str) -> str:
    return f"{reason}; this peer drops its state and recovers another"


@event("state.donor_failed")
def donor_failed(*, donor: str, reason: str) -> str:
    return f"recovery from {donor}: {reason}"


@event("state.entry_failed")
def entry_failed(*, entry: int, donor: str, reason: str) -> str:
    return f"entry {entry} of {donor}: {reason}"


@event("state.snapshot_failed")
def snapshot_failed(*, snapshot: int, donor: str, reason: str) -> str:
    return f"snapshot {snapshot} of {donor}: {reason}"


@event("trainer.resumed")
def trainer_resumed() -> str:
    return "inner optimizer and data position resumed"


@event("trainer.fresh")
def trainer_fresh(*, reason: str) -> str:
    return f"starting with a fresh inner optimizer: {reason}"


@event("window.uncounted")
def first_window() -> str:
    return "joined: the first window counts with weight 0"


@event("window.no_rows")
def no_rows_free() -> str:
    return "no unit of the run's rows is free: waiting for the others"


@event("work.dropped")
def work_dropped(*, reason: str) -> str:
    return f"dropped this peer's open work: {reason}"


# stages and texts


@event("fault.unusable")
def unusable(*, peer: str, reason: str, origin: str | None) -> str:
    of = f" (a microbatch of {short(origin)})" if origin else ""
    return f"{short(peer)} {reason}{of}"


@event("stage.serves")
def stage_serves(*, module: str, stages: int, first: int, last: int) -> str:
    which = f"slice {first}" if first == last else f"slices {first} to {last}"
    return f"serves {module} of {stages}: {which}"


@event("stage.moves")
def stage_moves(*, from_module: str, to_module: str) -> str:
    return f"moves from {from_module} to {to_module}, which needs it more"


@event("stage.returns")
def stage_returns(*, from_module: str, to_module: str, reason: str) -> str:
    return f"cannot serve {from_module}, so this peer returns to {to_module}: {reason}"


@event("stage.files_stay")
def files_stay(*, reason: str) -> str:
    return f"files of a former stage stay until the next start, as {reason}"


@event("texts.served")
def texts_served(*, share: float) -> str:
    return (
        "serves texts: whoever holds the invite may have this machine continue theirs, for up to "
        f"{percent(share)} of the time"
    )


@event("texts.not_served")
def texts_not_served(*, reason: str) -> str:
    return f"serves no texts: {reason}"


# a text that somebody asks for


@event("text.joining")
def text_joining(*, run: str, address: str) -> str:
    return f"joining run {run} of {address}"


@event("text.waiting")
def text_waits(account: str, /, *, module: str, timeout_s: float) -> str:
    return f"{account}; waiting up to {timeout_s:g} s for a server"


@event("text.moved_on")
def text_moved_on() -> str:
    return "the run went on to its next round; so does the text"


@event("text.refused")
def text_refused(*, peer: str, module: str, reason: str | None) -> str:
    return f"{short(peer)} of {module} refuses this text" + (f": {reason}" if reason else "")


@event("text.unusable")
def text_unusable(*, peer: str, module: str, reason: str) -> str:
    return f"{short(peer)} of {module} gave an answer {reason}; it is asked no more"


# a follower's exports


@event("export.written")
def export_written(*, file: str) -> str:
    return f"export {file} written"


@event("export.failed")
def export_failed(*, file: str, reason: str) -> str:
    return f"no export {file}: {reason}"
