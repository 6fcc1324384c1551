"""A coordinator on a restored directory: same invite, exact round, nothing decided twice."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator import epochs
from atoll.coordinator.copies.beside import CopyToRestore, copying, open_target
from atoll.coordinator.copies.keeping import Copies
from atoll.coordinator.copies.owners import keep_owner, read_owner
from atoll.coordinator.copies.restoring import expect_new, find, restore
from atoll.coordinator.copies.sealing import RecoveryKey
from atoll.coordinator.copies.target import (
    CopiesError,
    NotOurs,
    Superseded,
    Target,
    TargetFailed,
)
from atoll.coordinator.copies.writing import CopyWriter
from atoll.coordinator.gossip import ModelKeeper
from atoll.coordinator.heads import PeerHead
from atoll.coordinator.kept_log import KeptLog
from atoll.coordinator.relocating import RELOCATION_FILE, RESTORE_FILE
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.service.server import MANY_EPOCHS, WrongDirectory
from atoll.coordinator.signing import EpochSigner, read_signed
from atoll.optim.log.module import log_id
from atoll.optim.state.outer_state import OuterState
from support.copies import ROUNDS, Run, opened, past, run_template, writer_of
from support.kit import LAYOUT, SPEC, Net, Swarm, genesis, net, run

__all__ = ["past", "run_template"]


def copied(past: Run) -> Path:
    """Copy the run, restore it into another directory, and return that."""
    with opened(past.state_dir) as log:
        writer_of(past.target, past.state_dir, log).write()
    place = past.state_dir.with_name("restored")
    restore(past.target, past.key, find(past.target, past.key), place)
    return place


def unbuilt(module: str) -> Any:
    raise AssertionError("the first state is not made again: its code may not be on this machine")


def test_a_restored_coordinator_goes_on_at_the_round_with_the_invite(past: Run) -> None:
    place = copied(past)

    async def main() -> None:
        async with net(past.state_dir, past.swarm) as before:
            chain, tokens = before.up.coordinator.log.head().chain, before.up.coordinator.status()
            root = before.up.coordinator.log.replica.state.root()
        async with net(place, past.swarm) as after:
            coordinator = after.up.coordinator
            assert after.up.invite.token == before.up.invite.token
            assert after.up.invite.tls_sha256 == before.up.invite.tls_sha256
            assert after.up.invite.run_key == before.up.invite.run_key
            assert coordinator.log.head().chain == chain
            assert coordinator.log.head().position == ROUNDS
            assert coordinator.log.replica.state.root() == root
            status = coordinator.status()
            assert status.tokens_total == tokens.tokens_total
            assert [row.at for row in status.history] == [row.at for row in tokens.history]
            assert [(gap.first, gap.last) for gap in status.gaps] == [(1, 4)]
            # In the epoch of before, peers decide on without a new one.
            client = after.client(0)
            await client.join()
            assert await after.publish(
                client, *past.swarm.entry(after.run_id, coordinator.log.head())
            )

    run(main())


def test_a_restore_needs_no_code_of_the_model(past: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    place = copied(past)
    monkeypatch.setattr("support.kit.genesis", unbuilt)

    async def main() -> None:
        for _ in range(2):
            async with net(place, past.swarm) as up:
                assert up.up.coordinator.log.head().position == ROUNDS

    run(main())


def rot(place: Path) -> None:
    """Spoil all states of a directory."""
    paths = [*(place / "log").glob("snapshot-*.bin")]
    assert paths
    for path in paths:
        path.write_bytes(b"rotten" + path.read_bytes()[6:])


def another(module: str = "") -> OuterState:
    return SPEC.method().genesis(LAYOUT, genesis().params_N + 1.0)


def test_with_its_only_state_rotten_a_restored_run_begins_with_the_first(past: Run) -> None:
    """A copy has one state; once it has rotted, the log is there, and peers have a later state."""
    place = copied(past)
    rot(place)

    async def main() -> None:
        async with net(place, past.swarm) as after:
            coordinator = after.up.coordinator
            texts = [event.text for event in coordinator.status().events]
            assert sum("the first state, which is made again here" in text for text in texts) == 1
            assert coordinator.log.head().position == ROUNDS
            assert not coordinator.log.replica.is_current
            assert coordinator.log.replica.state.root() == genesis().root()

    run(main())


def test_without_any_state_a_restored_run_says_what_to_do(
    past: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = copied(past)
    rot(place)
    monkeypatch.setattr("support.kit.genesis", another)

    async def main() -> None:
        with pytest.raises(WrongDirectory, match=r"spoiled all states.*restore the run from its"):
            async with net(place, past.swarm):
                pass

    run(main())


def test_two_restores_of_one_copy_sign_other_epochs(past: Run) -> None:
    with opened(past.state_dir) as log:
        writer_of(past.target, past.state_dir, log).write()
    before = read_signed(past.state_dir / "epoch.signed")
    found, numbers = find(past.target, past.key), []
    for name in ("one", "two"):
        restore(past.target, past.key, found, past.state_dir.with_name(name))
        signed, left = read_signed(past.state_dir.with_name(name) / "epoch.signed")
        assert left is None and signed is not None
        numbers.append(signed)
    assert before == (0, 0)
    assert min(numbers) >= MANY_EPOCHS and abs(numbers[0] - numbers[1]) >= MANY_EPOCHS


def test_a_restored_coordinator_says_anew_where_it_is(past: Run) -> None:
    """The one that it replaces may have moved since the copy, and its peers hold that record."""
    place = copied(past)
    assert (past.state_dir / RELOCATION_FILE).exists()
    assert not (place / RELOCATION_FILE).exists()
    restores = [int((place / RESTORE_FILE).read_bytes())]
    for name in ("again", "once more"):
        other = past.state_dir.with_name(name)
        restore(past.target, past.key, find(past.target, past.key), other)
        restores.append(int((other / RESTORE_FILE).read_bytes()))
    assert restores == [2, 3, 4]


def test_restores_are_counted_on_in_another_target(past: Run) -> None:
    place = copied(past)
    elsewhere = Target(str(past.state_dir.with_name("other target")))
    key = RecoveryKey.of(place)
    with opened(place) as log:
        names = {"run_id": log.files.run_id.hex(), "run_name": "test"}
        CopyWriter(elsewhere, key, **names, state_dir=place, logs=[log]).write()
    restore(elsewhere, key, find(elsewhere, key), past.state_dir.with_name("third"))
    assert int((past.state_dir.with_name("third") / RESTORE_FILE).read_bytes()) == 4


async def answers_with(up: Net, swarm: Swarm, head: dict[str, Any], count: int = 3) -> None:
    """Let peers report, and answer calls with what `head` says."""
    coordinator = up.up.coordinator

    async def ask(peer_id: str) -> PeerHead | None:
        if peer_id not in {identity.peer_id for identity in swarm.identities}:
            return None
        return PeerHead(peer_id=peer_id, incarnation="1", **head)

    coordinator.log.ask_head_with(ask)
    for index in range(count):
        client = up.client(index)
        client_swarm = swarm.status(index, state="training", epoch=head["epoch"])
        if swarm is up.swarm:
            await client.join()
            await client.heartbeat(client_swarm)
        else:
            coordinator.presence.report(client_swarm, coordinator._steady(), leaving=False)


async def looked(up: Net, seconds: float) -> None:
    """Let so much time pass for the decision whether an epoch opens, with peers online."""
    log, now_s = up.up.coordinator.log, up.up.coordinator._steady()
    alive = log.alive(now_s)
    assert alive
    at_s = 0.0
    while at_s <= seconds:
        log._epochs.note(alive, now_s + at_s, 1.0)
        await log._epochs.look(alive, now_s + at_s)
        at_s += 10.0


def head_of(log: KeptLog) -> dict[str, Any]:
    """The answer of a peer that stands where the copy does."""
    return {
        "epoch": 0,
        "position": ROUNDS,
        "chain": log.head().chain,
        "epoch_record": log.replica.epoch_record,
    }


def test_strangers_do_not_prove_that_nothing_was_decided_since(past: Run) -> None:
    """New peers know what the restored coordinator gave them; the old ones may go on elsewhere."""
    place, strangers = copied(past), Swarm()

    async def main() -> None:
        async with net(place, past.swarm) as up:
            log = up.up.coordinator.log
            await answers_with(up, strangers, head_of(log))
            await looked(up, 3600.0)
            assert log._epochs.lacks_epochs and log.head().epoch == 0
            assert "No epoch opens until peers" in up.up.coordinator.status().events[-1].text

    run(main())


def test_old_peers_tell_the_epoch_and_then_one_opens(past: Run) -> None:
    place = copied(past)

    async def main() -> None:
        async with net(place, past.swarm) as up:
            log = up.up.coordinator.log
            await answers_with(up, past.swarm, head_of(log))
            await looked(up, epochs.LEARN_S - 10.0)
            assert log._epochs.lacks_epochs
            await looked(up, epochs.LEARN_S + 200.0)
            assert log.head().epoch > MANY_EPOCHS
            assert log.replica.opened is not None
            assert log.replica.opened.base_position == ROUNDS

    run(main())


def test_an_epoch_since_the_copy_is_learned_and_none_opens_below_its_base(past: Run) -> None:
    """The old coordinator opened epoch 1 at round 7; peers hold rounds that the copy lacks."""
    place, records = copied(past), {}

    async def lived_on() -> None:
        async with net(past.state_dir, past.swarm) as up:
            client = up.client(0)
            await client.join()
            replica = up.up.coordinator.log.replica
            await up.publish(client, *past.swarm.entry(up.run_id, replica.head))
            signer = EpochSigner(past.state_dir / "epoch.signed", up.up.coordinator.keys.sign)
            await replica.open_epoch(past.swarm.electors(), signer.sign)
            records.update(
                epoch=1,
                position=replica.position,
                chain=replica.chain,
                epoch_record=replica.epoch_record,
            )

    async def main() -> None:
        async with net(place, past.swarm) as up:
            await answers_with(up, past.swarm, records)
            await looked(up, 3600.0)
            log = up.up.coordinator.log
            assert log.head().epoch == 1  # learned
            assert log._epochs.lacks_entries  # and none opens at the copy's end

    run(lived_on())
    run(main())


def test_after_all_peers_died_only_the_organiser_gives_up_what_they_held(past: Run) -> None:
    place, newcomers = copied(past), Swarm()

    async def main() -> None:
        async with net(place, past.swarm, accept_loss=True) as up:
            log = up.up.coordinator.log
            await answers_with(up, newcomers, head_of(log))
            await looked(up, 300.0)
            assert log.head().epoch > MANY_EPOCHS
            assert {e.peer_id for e in log.replica.electorate} == {
                identity.peer_id for identity in newcomers.identities
            }
            entry, body = newcomers.entry(up.run_id, log.head())
            up.swarm = newcomers
            client = up.client(0)
            await client.join()
            assert await up.publish(client, entry, body)
            assert log.head().position == ROUNDS + 1

    run(main())


def test_only_an_empty_directory_is_restored_into(past: Run) -> None:
    with opened(past.state_dir) as log:
        writer_of(past.target, past.state_dir, log).write()
    found = find(past.target, past.key)
    for place in (past.state_dir, past.folder):
        with pytest.raises(CopiesError, match=r"--state-dir DIR"):
            restore(past.target, past.key, found, place)
    empty = past.state_dir.with_name("empty")
    empty.mkdir()
    expect_new(empty)
    restore(past.target, past.key, found, empty)
    assert not list(empty.parent.glob(".*.restoring"))


def test_another_key_opens_nothing(past: Run, tmp_path: Path) -> None:
    with opened(past.state_dir) as log:
        writer_of(past.target, past.state_dir, log).write()
    with pytest.raises(NotOurs, match="another recovery key"):
        find(past.target, RecoveryKey.of(tmp_path))
    (tmp_path / "wrong").write_text("atoll-recovery-1 beef")
    with pytest.raises(CopiesError, match="not a recovery key"):
        RecoveryKey.read(tmp_path / "wrong")


def test_an_empty_target_has_nothing_to_restore(past: Run, tmp_path: Path) -> None:
    with pytest.raises(CopiesError, match="expected copies of a run, got none"):
        find(Target(str(tmp_path / "nothing")), past.key)


def test_the_old_coordinator_ends_once_its_run_was_restored(past: Run) -> None:
    """It may have been only out of reach. Two would open epochs under one key."""
    with opened(past.state_dir) as log:
        old = writer_of(past.target, past.state_dir, log)
        old.write()
        restore(past.target, past.key, find(past.target, past.key), past.state_dir.with_name("new"))

        async def main() -> None:
            copies = Copies(old, lambda level, text: None, every_s=0.01)
            with pytest.raises(Superseded, match="another coordinator"):
                await asyncio.wait_for(copies.run(), 10)

        asyncio.run(main())
    with pytest.raises(Superseded):
        open_target(str(past.folder), past.state_dir)
    assert find(past.target, past.key).manifest.serial == 1


def test_a_forged_owner_stops_nobody(past: Run) -> None:
    with opened(past.state_dir) as log:
        old = writer_of(past.target, past.state_dir, log)
        forged = past.folder / "999999-00000000"
        forged.mkdir()
        (forged / "owner").write_bytes(b"\0" * 64)
        assert old.write().is_new


def test_a_target_with_copies_of_others_is_left_alone(past: Run, tmp_path: Path) -> None:
    with opened(past.state_dir) as log:
        writer_of(past.target, past.state_dir, log).write()
    with pytest.raises(NotOurs, match=r"copies of run test, .*--restore"):
        open_target(str(past.folder), tmp_path / "another")
    keep_owner(tmp_path, "000009-00000000")
    with pytest.raises(NotOurs):
        open_target(str(past.folder), tmp_path)


def test_a_coordinator_starts_although_its_target_is_out_of_reach(past: Run) -> None:
    said: list[str] = []
    with opened(past.state_dir) as log:
        writer_of(past.target, past.state_dir, log).write()
        past.folder.rename(past.folder.with_name("aside"))
        past.folder.touch()  # a folder whose disk is not there
        target = open_target(str(past.folder), past.state_dir, said.append)
        assert "copies wait until their target can be reached" in said[0]
        writer = CopyWriter(
            target,
            past.key,
            run_id=log.files.run_id.hex(),
            run_name="test",
            state_dir=past.state_dir,
            logs=[log],
        )
        with pytest.raises(TargetFailed):
            writer.write()
        past.folder.unlink()
        past.folder.with_name("aside").rename(past.folder)
        assert not writer.write().is_new


def test_a_target_that_comes_back_with_copies_of_others_is_left_alone(past: Run) -> None:
    """Whoever claims it would prune the others' copies."""
    with opened(past.state_dir) as log:
        writer_of(past.target, past.state_dir, log).write()
        keep_owner(past.state_dir, "000000-00000000")  # of a target that it had before
        (past.state_dir / "recovery.key").unlink()
        writer = CopyWriter(
            past.target,
            RecoveryKey.of(past.state_dir),
            run_id=log.files.run_id.hex(),
            run_name="test",
            state_dir=past.state_dir,
            logs=[log],
        )
        before = past.target.names()
        with pytest.raises(NotOurs):
            writer.write()
        assert past.target.names() == before


def test_a_restored_coordinator_copies_on_and_the_old_copies_go(past: Run) -> None:
    with opened(past.state_dir) as log:
        writer_of(past.target, past.state_dir, log).write()
    url, place = str(past.folder), past.state_dir.with_name("new")
    (past.state_dir.parent / "recovery.key").write_bytes(
        (past.state_dir / "recovery.key").read_bytes()
    )
    copy = CopyToRestore.found(
        url, past.state_dir.parent / "recovery.key", None, state_dir=place, older=False
    )
    told: list[str] = []
    copy.restore(copy.spec, place, told.append)
    assert copy.spec.coordinator.copies == url
    assert RunSpec.load(place / "RUN.toml") == copy.spec
    assert "without --restore" in told[-1]
    old = read_owner(past.state_dir)

    async def main() -> None:
        async with net(place, past.swarm, spec=copy.spec) as up:
            async with copying(up.up, open_target(url, place)) as copies:
                assert copies is not None
                assert find(past.target, past.key).manifest.files.name.startswith(old)
                await copies.copy()
                assert up.up.coordinator.status().copies == copies.status
                assert copies.status.position == ROUNDS and not copies.status.failing
                client = up.client(0)
                await client.join()
                log = up.up.coordinator.log
                await up.publish(client, *past.swarm.entry(up.run_id, log.head()))
                await copies.copy()
        assert find(past.target, past.key).positions == (ROUNDS + 1,)
        assert old not in past.target.names()

    run(main())


def test_run_toml_of_another_run_restores_nothing(past: Run, tmp_path: Path) -> None:
    with opened(past.state_dir) as log:
        writer_of(past.target, past.state_dir, log).write()
    (tmp_path / "RUN.toml").write_text("[run]\nname = 'other'\n")
    with pytest.raises(CopiesError, match=r"run.name: 'test' != 'other'.*change only"):
        CopyToRestore.found(
            str(past.folder),
            past.state_dir / "recovery.key",
            tmp_path / "RUN.toml",
            state_dir=None,
            older=False,
        )
    assert SPEC.coordinator.copies is None


def test_peers_do_not_learn_where_copies_go() -> None:
    spec = RunSpec.from_dict(
        SPEC.model_dump(mode="json") | {"coordinator": {"copies": "s3://bucket/path"}}
    )
    assert b"bucket" not in spec.canonical()
    assert spec.digest() == SPEC.digest()


GOSSIP = RunSpec.from_dict(
    SPEC.model_dump(mode="json") | {"outer": {"method": "noloco"}, "round": {"min_peers": 2}}
)
STAGED = RunSpec.from_dict(
    SPEC.model_dump(mode="json") | {"topology": {"stages": 2}, "round": {"min_peers": 2}}
)


@pytest.mark.parametrize("spec", [GOSSIP, STAGED], ids=["gossip", "stages"])
def test_runs_without_a_log_and_with_several_are_restored(tmp_path: Path, spec: RunSpec) -> None:
    url, place = str(tmp_path / "copies"), tmp_path / "new"

    async def main() -> None:
        async with net(tmp_path / "old", spec=spec) as up:
            for number, log in enumerate(up.up.coordinator.logs.values()):
                keeper = log.replica.core
                if isinstance(keeper, ModelKeeper):
                    await log.replica.change(partial(keeper.keep, kept_model(7)))
                else:
                    signer = EpochSigner(tmp_path / f"{number}.signed", up.up.coordinator.keys.sign)
                    await log.replica.open_epoch(up.swarm.electors(), signer.sign)
                    identifier = log_id(up.run_id, log.name)
                    for _ in range(number + 1):
                        entry, body = up.swarm.entry(identifier, log.head())
                        await log.replica.accept(entry, up.swarm.certify(entry), body)
            async with copying(up.up, open_target(url, tmp_path / "old")) as copies:
                assert copies is not None
                await copies.copy()
                assert not copies.status.failing
            before = [log.head() for log in up.up.coordinator.logs.values()]
            roots = [log.replica.state.root() for log in up.up.coordinator.logs.values()]
        key = RecoveryKey.of(tmp_path / "old")
        found = find(Target(url), key)
        restore(Target(url), key, found, place)
        async with net(place, up.swarm, spec=spec) as again:
            logs = again.up.coordinator.logs.values()
            assert [log.head() for log in logs] == before
            assert [log.replica.state.root() for log in logs] == roots
            assert found.positions == tuple(head.position for head in before) != (0, 0)

    run(main())


def kept_model(position: int) -> OuterState:
    state = genesis()
    return OuterState(
        layout=state.layout,
        position=position,
        params_N=state.params_N * 2,
        memory_M=state.memory_M.clone(),
    )
