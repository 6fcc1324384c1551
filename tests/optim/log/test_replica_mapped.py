"""Replicas whose state lies on a disk: the bits of those in memory, and nothing left by a crash."""

import os
import signal
from pathlib import Path

import pytest

from atoll.coordinator.run.keys import RunKeys
from atoll.optim.log.entry import StateRoot
from atoll.optim.log.replica import Replica
from atoll.optim.methods import parse
from atoll.optim.state import mapped
from atoll.optim.state.mapped import MappedVectors
from support import kit
from support.killed import killed_within
from support.logs import open_replica, take

KEYS = RunKeys.generate()
SPECS = ("diloco", "diloco(state=bf16)", "co2(state=bf16)")


@pytest.fixture(autouse=True)
def _disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "IN_MEMORY", ())  # the tests' folder may lie there


def on_disk(folder: Path, spec: str, *, is_ledger: bool = False, keys: RunKeys = KEYS) -> Replica:
    allocate = MappedVectors(folder).empty
    return open_replica(folder, keys, is_ledger=is_ledger, method=parse(spec), allocate=allocate)


@pytest.mark.parametrize("spec", SPECS)
def test_peers_and_ledgers_in_memory_and_on_a_disk_agree(tmp_path: Path, spec: str) -> None:
    swarm, method = kit.Swarm(), parse(spec)
    replicas = [
        open_replica(tmp_path / "a", KEYS, is_ledger=False, method=method),
        open_replica(tmp_path / "b", KEYS, is_ledger=True, method=method),
        on_disk(tmp_path / "c", spec),
        on_disk(tmp_path / "d", spec, is_ledger=True),
    ]
    replicas[0].open_epoch(swarm.electors(), KEYS.sign)
    for replica in replicas[1:]:
        replica.adopt(replicas[0].epoch_record)
    for _ in range(5):
        for replica in replicas:
            take(replica, swarm)
        assert len({replica.state.root() for replica in replicas}) == 1
    assert replicas[0].state.memory_M.dtype == method.memory_dtype
    for replica, folder in zip(replicas, "abcd", strict=True):
        replica.store.close()
        again = on_disk(tmp_path / folder, spec, is_ledger=replica.is_ledger)
        assert (again.position, again.state.root()) == (5, replicas[0].state.root())
        assert again.state.allocate == again.allocate
        again.store.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
def test_state_and_update_of_a_replica_lie_in_files(tmp_path: Path) -> None:
    replica, swarm = on_disk(tmp_path / "log", "diloco"), kit.Swarm()
    replica.open_epoch(swarm.electors(), KEYS.sign)
    for _ in range(3):
        take(replica, swarm)
        maps = Path("/proc/self/maps").read_text().splitlines()
        own = [line.split()[0] for line in maps if str(tmp_path / "log" / "#") in line]
        spans = [tuple(int(end, 16) for end in span.split("-")) for span in own]
        for vector in (replica.state.params_N, replica.state.memory_M):
            assert any(start <= vector.data_ptr() < stop for start, stop in spans)
    assert not list((tmp_path / "log").glob("state-*"))


def test_a_state_that_was_built_or_fetched_is_moved_to_the_disk(tmp_path: Path) -> None:
    allocate = MappedVectors(tmp_path / "log").empty
    replica = open_replica(
        tmp_path / "log", KEYS, is_ledger=False, resumes=False, allocate=allocate
    )
    given = kit.genesis()
    replica.install(given)
    assert replica.state.allocate == replica.allocate == allocate
    assert replica.state.params_N.data_ptr() != given.params_N.data_ptr()
    assert replica.state.root() == given.at(0).root()
    replica.store.close()


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS[:2])
def test_a_peer_killed_while_it_writes_its_state_resumes_in_the_same_bits(
    tmp_path: Path, spec: str
) -> None:
    keys, swarm = RunKeys.load_or_create(tmp_path / "keys"), kit.Swarm()
    whole = open_replica(tmp_path / "whole", keys, method=parse(spec))
    whole.open_epoch(swarm.electors(), keys.sign)
    entries, roots = [], [whole.state.root()]
    for _ in range(4):
        entry, body = swarm.entry(whole.run_id, whole.head)
        claim = whole.check(entry, swarm.certify(entry))
        whole.accept(claim, body)
        whole.save_due()
        entries.append((claim, body))
        roots.append(whole.state.root())
    folder = tmp_path / "killed"
    code = killed_within(3, folder, spec, tmp_path / "keys", whole.epoch_record, entries)
    assert code == -signal.SIGKILL
    assert not list(folder.glob("state-*"))  # nothing that could be read by mistake
    again = on_disk(folder, spec, keys=keys)
    # The entry was stored before it was applied, and its body was not yet: it is fetched again.
    assert (again.position, again.state.root()) == (3, roots[3])
    again.accept(*entries[3])
    assert again.state.root() == roots[4]
    for replica in (whole, again):
        replica.store.close()


def test_a_damaged_page_shows_in_the_next_certified_root(tmp_path: Path) -> None:
    swarm = kit.Swarm()
    sound = open_replica(tmp_path / "sound", KEYS)
    torn = on_disk(tmp_path / "torn", "diloco", is_ledger=True)
    sound.open_epoch(swarm.electors(), KEYS.sign)
    torn.adopt(sound.epoch_record)
    for replica in (sound, torn):
        take(replica, swarm)
    torn.state.momentum_N[70_000:71_024].zero_()  # a page that was never written to the disk
    for replica in (sound, torn):
        take(replica, swarm)
    root = StateRoot(position=2, root=sound.state.root())
    for _ in range(2):
        for replica in (sound, torn):
            changes = {"state_root": root} if replica.position == 4 else {}
            take(replica, swarm, **changes)
    for replica in (sound, torn):
        take(replica, swarm, state_root=root)
    assert sound.diverged == ""
    assert "this machine computes wrongly" in torn.diverged
