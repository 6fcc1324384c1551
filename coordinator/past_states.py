"""The state after any round that a log still has: a snapshot, and the updates from there on.

Only reads, so the coordinator of the directory may run. A log has the states after its first
snapshot and those that follow it without a missing update, and so on for each snapshot; the
coordinator keeps all updates, so usually every round.

Exceptions:

    ValueError
      NoPastState     the directory is no coordinator's, the log lacks the round, or is damaged
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from atoll.coordinator.checkpoints import Checkpoint
from atoll.coordinator.recorded import keeps_log
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.spec_problems import SpecError
from atoll.optim.log.entry import Entry, LogError, extend_chain, sha256
from atoll.optim.log.module import WHOLE, log_folder
from atoll.optim.log.replay import Replay
from atoll.optim.log.store import LOG_FILE, LogStore
from atoll.optim.log.store_errors import StoreError
from atoll.optim.reduction.cells import UpdateError
from atoll.optim.state.outer_state import OuterState

MAX_SPANS = 8  # that a message names


class NoPastState(ValueError):
    """The state after a round cannot be had from a log."""


def run_folder(path: Path) -> Path:
    """Return the coordinator's directory that is meant by it, its checkpoints, or one of them.

    Raises:
        NoPastState: none is.
    """
    for folder in (path, *path.absolute().parents[:3]):
        if keeps_log(folder):
            return folder
    raise NoPastState(
        f"{path}: expected the state directory of a coordinator or a follower, or a checkpoint "
        "in it, as --round reads its log; pass the directory that it printed at its start"
    )


def state_after(state_dir: Path, round_number: int) -> Checkpoint:
    """Return the state after a round, computed from the log.

    Args:
        state_dir: of a coordinator.
        round_number: 0 is the first state.

    Raises:
        NoPastState: the log does not have it, or is damaged.
    """
    try:
        spec = RunSpec.from_json((state_dir / "spec.json").read_bytes())
    except (OSError, SpecError) as error:
        raise NoPastState(f"{state_dir}: its spec cannot be read: {error}") from None
    if spec.modules != (WHOLE,):
        raise NoPastState(
            f"{state_dir}: the stages of a pipeline take rounds at their own pace, so no round is "
            "of the whole model; export one of its checkpoints, without --round"
        )
    folder = state_dir / log_folder(WHOLE)
    if not (folder / LOG_FILE).is_file():
        raise NoPastState(f"{folder}: there is no log; pass the directory of a run that has begun")
    try:
        with closing(LogStore.reading(folder)) as store:
            return _computed(store, spec, round_number)
    except (StoreError, LogError, UpdateError) as error:
        raise NoPastState(f"{folder}: {error}; export another round, or a checkpoint") from None


def spans(store: LogStore) -> list[tuple[int, int]]:
    """Return the rounds whose states the log has, as (first, last), in order, merged."""
    found: list[tuple[int, int]] = []
    for begin in store.snapshot_positions():
        if found and begin <= found[-1][1]:
            continue
        end = begin
        for record in store.records(begin, store.head.position):
            if not record.has_body:
                break
            end = record.position + 1
        if found and begin == found[-1][1] + 1:
            begin = found.pop()[0]
        found.append((begin, end))
    return found


def _computed(store: LogStore, spec: RunSpec, target: int) -> Checkpoint:
    known = spans(store)
    if not any(first <= target <= last for first, last in known):
        told = ", ".join(f"{a} to {b}" if a < b else f"{a}" for a, b in known[-MAX_SPANS:])
        raise NoPastState(
            f"expected a round that the log has, got {target}; it has the states after rounds "
            f"{told or 'none'}"
        )
    begin = max(position for position in store.snapshot_positions() if position <= target)
    method, info = spec.method(), store.snapshot(begin)
    state = store.load_snapshot(begin, method.memory_dtype)
    _expect_root(store, spec, state)
    chain = info.chain
    if begin < target:  # a run by gossip has no entries, nor a replay
        replay = Replay(method, info.layout)
        for record in store.records(begin, target):
            entry = Entry.decode(record.entry)
            chain = extend_chain(chain, sha256(record.entry))
            if entry.position != state.position or chain != record.chain:
                raise NoPastState(f"the entry of round {state.position + 1} is damaged")
            state = replay.next_state(state, entry, store.body(entry.position))
            _expect_root(store, spec, state)
    before = store.get(target - 1)
    return Checkpoint(
        spec=spec,
        run_id=store.run_id,
        epoch=before.epoch if before is not None else 0,
        position=target,
        chain=chain,
        state=state,
    )


def _expect_root(store: LogStore, spec: RunSpec, state: OuterState) -> None:
    """Compare a state with its root in the log, if a later entry carries it."""
    every = spec.round.snapshot_every
    later = store.get(state.position + every) if state.position % every == 0 else None
    certified = Entry.decode(later.entry).state_root if later is not None else None
    if certified is None or certified.position != state.position:
        return
    if certified.root != state.root():
        raise NoPastState(
            f"round {state.position}: expected the state root {certified.root.hex()[:12]}, as "
            f"certified in the log, got {state.root().hex()[:12]}; this machine computes wrongly, "
            "or its disk is damaged"
        )
