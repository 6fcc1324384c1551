"""C4: nobody can be put out, and one token admits everybody for ever."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.coordinator.invites import (
    INVITES_FILE,
    MAX_EVICTED,
    USES_FILE,
    InviteDesk,
    InviteRefused,
    InvitesError,
    evict,
    issue,
    read_book,
    revoke,
)
from atoll.coordinator.kept_log import TICK_S
from atoll.coordinator.rpc.channel import StatusClient
from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.rpc.client_errors import NotWelcome
from atoll.coordinator.rpc.messages import HEARTBEAT_S
from atoll.coordinator.run.admission import AdmissionCheck, AdmissionRefused
from atoll.coordinator.run.eviction import Evictions, EvictionsInvalid, sign_evictions
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.keys import RunKeys
from atoll.dht.identity import Identity
from atoll.peer.cli import main as cli
from support import kit

FIRST = b"f" * 16


def command(*arguments: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    return code, out.getvalue(), err.getvalue()


async def joins(net: kit.Net, invite: Invite, identity: Identity | None = None) -> str:
    """Join with an invite; return why that is refused, or nothing."""
    client = CoordinatorClient(invite, identity or Identity.ephemeral())
    net.stack.push_async_callback(client.close)
    try:
        await client.join()
    except NotWelcome as error:
        return str(error)
    return ""


def test_an_invite_for_two_peers_admits_two_and_their_restarts(tmp_path: Path) -> None:
    async def main() -> None:
        folder = tmp_path / "run"
        one, two, three = (Identity.ephemeral() for _ in range(3))
        async with kit.net(folder) as net:
            code, out, err = await asyncio.to_thread(command, "invite", folder, "--uses", "2")
            assert code == 0 and "for 2 peers, without expiry" in err
            invite = Invite.decode(out)
            assert replace(invite, token=b"") == replace(net.up.invite, token=b"")
            for identity in (one, two, one):
                assert await joins(net, invite, identity) == ""
            assert "for 2 peers, and all have joined" in await joins(net, invite, three)
            assert await joins(net, net.up.invite, three) == ""  # the old token goes on
        async with kit.net(folder) as net:  # kept over a restart
            assert await joins(net, invite, two) == ""
            assert "all have joined" in await joins(net, invite)
            for name in (INVITES_FILE, USES_FILE, "invite"):
                assert (folder / name).stat().st_mode & 0o777 == 0o600
            assert invite.token.hex() not in (folder / INVITES_FILE).read_text()

    kit.run(main())


def test_an_observer_sees_the_status_and_cannot_join(tmp_path: Path) -> None:
    async def main() -> None:
        folder = tmp_path / "run"
        async with kit.net(folder) as net:
            code, out, _ = await asyncio.to_thread(
                command, "invite", folder, "--role", "observer", "--expires", "12h", "--json"
            )
            told = json.loads(out)
            assert code == 0 and told["kind"] == "observer"
            assert 12 * 3600 - 60 < told["expires_s"] - time.time() < 12 * 3600 + 60
            invite = Invite.decode(told["invite"])
            watcher = StatusClient(invite)
            net.stack.push_async_callback(watcher.close)
            assert (await watcher.status()).state == "waiting"
            assert "for watching only" in await joins(net, invite)
            clock = net.up.coordinator._clock
            net.up.coordinator._clock = lambda: clock() + 13 * 3600
            with pytest.raises(NotWelcome, match="expired"):
                await watcher.status()

    kit.run(main())


def test_an_evicted_peer_is_out_within_a_heartbeat_and_stays_out(tmp_path: Path) -> None:
    assert 2 * TICK_S <= HEARTBEAT_S

    async def main() -> None:
        folder, swarm = tmp_path / "run", kit.Swarm()
        async with kit.net(folder, swarm) as net:
            clients = await net.started()
            coordinator = net.up.coordinator
            bad, other = swarm.identities[0], clients[1]
            admission = coordinator.admission.admit(bad.peer_id, "trainer")
            check = AdmissionCheck(net.up.invite.run_key, net.run_id, is_evicted=other.is_evicted)
            check(bad.peer_id, admission)
            code, _, err = await asyncio.to_thread(
                command, "evict", bad.peer_id, "--state-dir", folder, "--reason", "noise"
            )
            assert code == 0 and "was removed from the run" in err
            await coordinator.tick()
            with pytest.raises(NotWelcome, match="evicted this peer: noise"):
                await clients[0].heartbeat(swarm.status(0))
            assert "evicted this peer: noise" in await joins(net, net.up.invite, bad)
            await other.heartbeat(swarm.status(1))
            with pytest.raises(AdmissionRefused, match="has evicted this peer"):
                check(bad.peer_id, admission)
            with pytest.raises(AdmissionRefused, match="has evicted this peer"):
                AdmissionCheck(
                    net.up.invite.run_key,
                    net.run_id,
                    is_evicted=coordinator.admission.is_evicted,
                )(bad.peer_id, admission)
            alive = {m.status.peer_id for m in coordinator.presence.alive(coordinator._steady())}
            assert bad.peer_id not in alive and len(alive) == 2
            texts = [event.text for event in coordinator.status().events]
            assert any(text.startswith("evicted ") and "noise" in text for text in texts)
        async with kit.net(folder, swarm) as net:  # kept over a restart
            assert "evicted this peer" in await joins(net, net.up.invite, bad)
            fresh = net.client(1)
            await fresh.join()
            assert fresh.is_evicted(bad.peer_id)  # learned when it joined
        # A peer that starts without the coordinator has what its last process heard.
        again = net.client(1)
        again.recall_evictions(fresh.evictions[:-1] + b"x")
        assert not again.is_evicted(bad.peer_id)
        again.recall_evictions(fresh.evictions)
        assert again.is_evicted(bad.peer_id)

    kit.run(main())


def test_a_revoked_first_invite_admits_nobody_else(tmp_path: Path) -> None:
    async def main() -> None:
        folder = tmp_path / "run"
        async with kit.net(folder) as net:
            code, out, _ = await asyncio.to_thread(command, "invite", folder)
            invite = Invite.decode(out)
            assert (await asyncio.to_thread(command, "invite", folder, "--revoke", "first"))[0] == 0
            assert "revoked this invite" in await joins(net, net.up.invite)
            assert await joins(net, invite) == ""
            watcher = StatusClient(net.up.invite)
            net.stack.push_async_callback(watcher.close)
            with pytest.raises(NotWelcome, match="revoked"):
                await watcher.status()
            code, out, _ = command("invite", folder, "--list")
            assert code == 0 and "first     for any number of peers, without expiry REVOKED" in out
            code, _, err = command("invite", folder, "--revoke", "nothing")
            assert code == 2 and "expected the id of an invite (first, " in err

    kit.run(main())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--uses", "0"), "expected 1 to"),
        (("--expires", "7"), "expected a time such as 30m, 12h, 7d or 2w, got 7"),
        (("--role", "watcher"), "invalid choice"),
    ],
)
def test_bad_limits_are_refused(tmp_path: Path, arguments: tuple[str, ...], why: str) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run"):
            code, _, err = await asyncio.to_thread(command, "invite", tmp_path / "run", *arguments)
            assert code == 2 and why in err

    kit.run(main())


def test_a_name_that_no_peer_has_evicts_nobody(tmp_path: Path) -> None:
    RunKeys.load_or_create(tmp_path / "keys.json")
    code, _, err = command("evict", "nobody", "--state-dir", tmp_path)
    assert code == 2 and "no peer of this run is named 'nobody'" in err
    code, _, err = command("evict", "nobody", "--state-dir", tmp_path / "elsewhere")
    assert code == 2 and "expected the state directory of a coordinator" in err
    whole = Identity.ephemeral().peer_id
    assert command("evict", whole, "--state-dir", tmp_path)[0] == 0
    assert [eviction.peer_id for eviction in read_book(tmp_path).evicted] == [whole]


def test_expired_invites_let_their_peers_return(tmp_path: Path) -> None:
    _, token = issue(tmp_path, kind="trainer", expires_s=100.0)
    desk = InviteDesk(tmp_path, FIRST)
    desk.join(token, "early", 99.0)
    desk = InviteDesk(tmp_path, FIRST)
    desk.join(token, "early", 101.0)
    with pytest.raises(InviteRefused, match="expired"):
        desk.join(token, "late", 101.0)
    name, _ = issue(tmp_path, kind="trainer")
    assert name != "first"
    revoke(tmp_path, read_book(tmp_path).invites[0].id, FIRST, at_s=101.0)
    with pytest.raises(InviteRefused, match="revoked"):
        desk.join(token, "early", 101.0)


def test_a_damaged_book_is_no_empty_one(tmp_path: Path) -> None:
    evict(tmp_path, "peer", at_s=1.0)
    (tmp_path / INVITES_FILE).write_text("{")
    with pytest.raises(InvitesError, match="damaged"):
        InviteDesk(tmp_path, FIRST)


def test_only_the_runs_key_evicts() -> None:
    keys, run_id = RunKeys.generate(), b"r" * 32
    record = sign_evictions(["a", "b"], run_id=run_id, issued_s=7, key=keys.signer)
    opened = Evictions.open(record, keys.run_public_key, run_id)
    assert opened == Evictions(issued_s=7, peer_ids=frozenset("ab"))
    for bad, key, run in (
        (record[:-1] + b"x", keys.run_public_key, run_id),
        (record, RunKeys.generate().run_public_key, run_id),
        (record, keys.run_public_key, b"s" * 32),
        (b"", keys.run_public_key, run_id),
    ):
        with pytest.raises(EvictionsInvalid):
            Evictions.open(bad, key, run)


def test_the_list_of_evictions_is_bounded(tmp_path: Path) -> None:
    for index in range(3):
        evict(tmp_path, f"peer {index}", at_s=float(index))
    desk = InviteDesk(tmp_path, FIRST)
    assert desk.evicted(1.0) == ["peer 1", "peer 2"]
    assert MAX_EVICTED * 70 < 128 << 10
