"""Invites: roles, uses and expiry, counted on the disk, and requests of the organiser's key."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.admission_control import Refusal, RefusalStatus
from atoll.coordinator.invites import (
    USES_FILE,
    VIEWER_BYTES,
    InviteDesk,
    InviteRefused,
    InviteRevoked,
    InvitesError,
    issue,
    keep,
    listed,
    revoke,
)
from atoll.coordinator.rpc.channel import StatusClient
from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.rpc.client_errors import Evicted, Invalid, NotWelcome
from atoll.coordinator.rpc.invites import InvitesClient
from atoll.coordinator.run import files
from atoll.coordinator.run.admission import (
    FOLLOWER_USES,
    Admission,
    AdmissionCheck,
    AdmissionRefused,
)
from atoll.coordinator.run.invite_request import InviteRequest, InviteRequestInvalid
from atoll.coordinator.run.issued_invite import MAX_INVITES, new_invite
from atoll.coordinator.run.keys import RunKeys
from atoll.dht import Identity
from atoll.optim.log.entry import verify_key
from support import kit

FIRST = b"f" * 16
PEERS = ("ann", "bob", "cid", "dan")


@settings(max_examples=30, deadline=None)
@given(
    uses=st.integers(0, 3),
    expires_s=st.sampled_from([0.0, 10.0]),
    joins=st.lists(
        st.tuples(st.sampled_from(PEERS), st.integers(0, 20), st.booleans()), max_size=8
    ),
)
def test_uses_and_expiry_hold_whoever_joins_and_restarts(
    uses: int, expires_s: float, joins: list[tuple[str, int, bool]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, now_s = Path(name), 0
        _, token = issue(folder, kind="follower", uses=uses, expires_s=expires_s)
        desk, joined = InviteDesk(folder, FIRST), set()
        for peer, later_s, is_restarted in joins:
            now_s += later_s
            if is_restarted:  # the coordinator's process ends, and another one begins
                desk = InviteDesk(folder, FIRST)
            is_late = bool(expires_s) and now_s > expires_s
            is_full = bool(uses) and len(joined) >= uses
            may = (peer in joined and bool(uses or expires_s)) or not (is_late or is_full)
            try:
                assert desk.join(token, peer, float(now_s)).kind == "follower"
                joined.add(peer)
                assert may
            except InviteRefused:
                assert not may
        if uses or expires_s:
            assert listed(folder)[-1][1] == len(joined)


def test_a_use_is_on_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, token = issue(tmp_path, kind="trainer", uses=1)
    desk, synced = InviteDesk(tmp_path, FIRST), []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        desk.join(token, "ann", 1.0)
    assert synced == [str(tmp_path / f".{USES_FILE}.new"), str(tmp_path)]  # the name too

    _, other = issue(tmp_path, kind="trainer", uses=1)

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("atoll.coordinator.invites.replace_private", full)
        for _ in range(2):  # neither refused for good nor let in
            with pytest.raises(OSError, match="No space"):
                desk.join(other, "bob", 1.0)
    assert desk.join(other, "bob", 1.0).uses == 1
    assert files.replace_private is not full


def test_observers_are_counted_by_a_secret_of_their_own(tmp_path: Path) -> None:
    _, token = issue(tmp_path, kind="observer", uses=2, expires_s=100.0)
    one, two, three = (bytes([each]) * VIEWER_BYTES for each in (1, 2, 3))
    InviteDesk(tmp_path, FIRST).watch(token, 1.0, one)
    desk = InviteDesk(tmp_path, FIRST)
    for viewer in (one, two, one):
        desk.watch(token, 1.0, viewer)
    with pytest.raises(InviteRefused, match="for 2 observers, and all have looked"):
        desk.watch(token, 1.0, three)
    with pytest.raises(InviteRefused, match="names them"):
        desk.watch(token, 1.0)
    with pytest.raises(InviteRefused, match="expired"):
        desk.watch(token, 101.0, one)
    assert one.hex() not in (tmp_path / USES_FILE).read_text()
    with pytest.raises(InviteRefused, match="watching only"):
        desk.join(token, "ann", 1.0)


def test_invites_have_a_bound_and_ids_are_not_taken_twice(tmp_path: Path) -> None:
    invite, _ = new_invite(kind="trainer", uses=1)
    for _ in range(2):  # sent again, as the answer was lost
        keep(tmp_path, invite)
    assert [each.id for each, _ in listed(tmp_path)] == ["first", invite.id]
    with pytest.raises(InvitesError, match="another invite has the id"):
        keep(tmp_path, replace(invite, uses=9))
    revoke(tmp_path, invite.id, FIRST, at_s=5.0)
    keep(tmp_path, invite)  # an old request revives nothing
    desk = InviteDesk(tmp_path, FIRST)
    assert desk.is_revoked(invite.id) and desk.revoked(5.0) == [invite.id] and not desk.revoked(6.0)
    assert MAX_INVITES * 300 < 2 << 20


# At other peers


def test_a_follower_reads_the_log_and_nothing_else() -> None:
    keys, run = RunKeys.generate(), b"r" * 32
    made = Admission(peer_id="p", role="follower", run_id=run, issued_s=0, expires_s=100)
    check = AdmissionCheck(keys.run_public_key, run, clock=lambda: 1.0)
    credential = made.sign(keys.signer)
    for use in ("", "headers", "body@stage-1", "record:follower", *FOLLOWER_USES):
        check("p", credential, use)
    for use in (
        *("round", "reduce", "prepare", "propose", "lock", "voted", "commit", "group", "seals"),
        *("order", "evidence", "gossip", "gossip-outcome", "pass", "note", "round@stage-1"),
        *("record:trainer", "record:keeper", "something-new"),
    ):
        with pytest.raises(AdmissionRefused, match="is a follower's"):
            check("p", credential, use)
        check("p", replace(made, role="trainer").sign(keys.signer), use)
    raised = replace(made, role="trainer").sign(RunKeys.generate().signer)
    with pytest.raises(AdmissionRefused, match="signed by this run's key"):
        check("p", raised, "round")


def test_peers_refuse_the_admissions_of_a_revoked_invite() -> None:
    keys, run, revoked = RunKeys.generate(), b"r" * 32, set()
    check = AdmissionCheck(
        keys.run_public_key, run, clock=lambda: 1.0, is_revoked=revoked.__contains__
    )

    def admission(issued_s: int, invite: str) -> bytes:
        fields = {"peer_id": "p", "role": "trainer", "run_id": run, "expires_s": 100}
        return Admission(issued_s=issued_s, invite=invite, **fields).sign(keys.signer)

    old, new = admission(5, "abc"), admission(6, "def")
    check("p", old)
    assert not check.is_out("p")
    revoked.add("abc")
    with pytest.raises(AdmissionRefused, match="revoked the invite abc"):
        check("p", old)
    assert check.is_out("p")  # it is asked nothing either
    check("p", new)  # it has joined with another one
    assert not check.is_out("p")
    with pytest.raises(AdmissionRefused):
        check("p", old)
    assert not check.is_out("p")  # an older admission says nothing of the invite it has now


# At the coordinator


async def joins(net: kit.Net, token: bytes, identity: Identity, role: str = "trainer") -> object:
    client = CoordinatorClient(replace(net.up.invite, token=token), identity, role=role)  # type: ignore[arg-type]
    net.stack.push_async_callback(client.close)
    await client.join()
    return client


def test_a_revoked_invite_puts_out_its_peers_until_they_have_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            clients = await net.started()
            coordinator, swarm = net.up.coordinator, net.swarm
            name, token = issue(net.up.state_dir, kind="trainer")
            swarm.identities.append(Identity.ephemeral())
            guest = await joins(net, token, swarm.identities[3])
            assert isinstance(guest, CoordinatorClient)
            await guest.heartbeat(swarm.status(3))
            admission = coordinator.admission.admit(swarm.identities[3].peer_id, "trainer")
            clients[0].admissions(swarm.identities[3].peer_id, admission)

            revoke(net.up.state_dir, name, FIRST, at_s=coordinator.now_s())
            await coordinator.tick()
            assert coordinator.admission.is_evicted(swarm.identities[3].peer_id)
            with pytest.raises(Evicted, match="revoked this invite"):
                await guest.heartbeat(swarm.status(3))
            with pytest.raises(Evicted, match="revoked this invite"):
                await guest.join()
            await clients[0].heartbeat(swarm.status(0))
            with pytest.raises(AdmissionRefused, match=f"revoked the invite {name}"):
                clients[0].admissions(swarm.identities[3].peer_id, admission)
            texts = [event.text for event in coordinator.status().events]
            assert f"invite {name} is revoked, and with it 1 peers that joined by it" in texts

            again = await joins(net, net.up.invite.token, swarm.identities[3])
            assert isinstance(again, CoordinatorClient)
            await again.heartbeat(swarm.status(3))
            assert not coordinator.admission.is_evicted(swarm.identities[3].peer_id)
        async with kit.net(tmp_path / "run", swarm) as net:  # a restart does not forget
            with pytest.raises(Evicted, match="revoked this invite"):
                await joins(net, token, Identity.ephemeral())

    kit.run(main())


def test_roles_are_those_of_invites_whatever_a_peer_asks_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            follower, observer = Identity.ephemeral(), Identity.ephemeral()
            _, reads = issue(net.up.state_dir, kind="follower", uses=1)
            _, looks = issue(net.up.state_dir, kind="observer")
            with pytest.raises(NotWelcome, match="for followers, which do not train"):
                await joins(net, reads, follower)
            client = await joins(net, reads, follower, "follower")  # the refusal took no use
            assert isinstance(client, CoordinatorClient)
            status = replace(net.swarm.status(0), peer_id=follower.peer_id, role="trainer")
            beat = await client.heartbeat(status)
            known = net.up.coordinator.presence.peers.get(follower.peer_id)
            assert known is not None and known.status.role == "follower"
            assert not beat.epoch
            admission = net.up.coordinator.admission.admit(
                follower.peer_id,
                net.up.coordinator.admission.role_of(follower.peer_id, "trainer"),
            )
            assert Admission.open(admission, net.up.invite.run_key).role == "follower"
            async for _ in client.fetch_entries(0, 1):
                raise AssertionError("there are no entries yet")
            for role in ("trainer", "follower"):
                with pytest.raises(NotWelcome, match="watching only"):
                    await joins(net, looks, observer, role)
            watcher = StatusClient(replace(net.up.invite, token=looks))
            net.stack.push_async_callback(watcher.close)
            assert (await watcher.status()).state == "waiting"

    kit.run(main())


def test_an_open_run_takes_an_invite_that_says_less_at_its_word(tmp_path: Path) -> None:
    fields = json.loads(kit.SPEC.canonical())
    fields["coordinator"] = {**fields.get("coordinator", {}), "invite_only": False}
    fields["coordinator"] |= {"listen": "127.0.0.1:0", "dht_listen": "127.0.0.1:0"}
    spec = type(kit.SPEC).from_dict(fields)

    async def main() -> None:
        async with kit.net(tmp_path / "run", spec=spec) as net:
            _, looks = issue(net.up.state_dir, kind="observer")
            with pytest.raises(NotWelcome, match="watching only"):
                await joins(net, looks, Identity.ephemeral())
            await joins(net, b"", Identity.ephemeral())

    kit.run(main())


# From elsewhere, with the organiser's key


def test_the_organisers_key_manages_invites_through_the_coordinator(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            client = InvitesClient(net.up.invite)
            net.stack.push_async_callback(client.close)
            sign = net.up.coordinator.keys.sign
            invite, token = new_invite(kind="trainer", uses=1)
            await client.manage(sign, issue=invite)
            shown = await client.manage(sign, issue=invite)  # once more, as the answer was lost
            assert [each.id for each in shown] == ["first", invite.id]
            await joins(net, token, Identity.ephemeral())
            shown = await client.manage(sign, revoke=invite.id)
            assert (shown[1].joined, shown[1].revoked) == (1, True)
            with pytest.raises(Evicted, match="revoked"):
                await joins(net, token, Identity.ephemeral())
            with pytest.raises(Invalid, match="expected the id of an invite"):
                await client.manage(sign, revoke="nothing")
            with pytest.raises(NotWelcome, match="signed with the organiser's key"):
                await client.manage(RunKeys.generate().sign, issue=new_invite(kind="trainer")[0])
            assert len(await client.manage(sign)) == 2

    kit.run(main())


def test_a_copied_request_serves_nobody_later(tmp_path: Path) -> None:
    async def main() -> None:
        async with kit.net(tmp_path / "run") as net:
            admission, keys = net.up.coordinator.admission, net.up.coordinator.keys
            run = net.up.coordinator.run_id.hex()
            nonce = admission.challenge("organiser").hex()
            good = InviteRequest(run_id=run, nonce=nonce)
            for bad, status in (
                (replace(good, nonce="00" * 32), RefusalStatus.UNAUTHENTICATED),
                (replace(good, nonce=admission.challenge("peer").hex()), "unauthenticated"),
                (replace(good, run_id="00" * 32), RefusalStatus.FAILED_PRECONDITION),
            ):
                with pytest.raises(Refusal) as refused:
                    await net.up.coordinator.manage_invites(*bad.sign(keys.sign))
                assert refused.value.status == status
            await net.up.coordinator.manage_invites(*good.sign(keys.sign))
            admission._clock = lambda: 1e10
            with pytest.raises(Refusal, match="fresh nonce"):
                await net.up.coordinator.manage_invites(*good.sign(keys.sign))

    kit.run(main())


@given(st.binary(max_size=64))
def test_hostile_requests_are_refused(data: bytes) -> None:
    keys = RunKeys.generate() if not data else None

    def verify(signed: bytes, signature: bytes) -> bool:
        return keys is None or verify_key(keys.run_public_key, signed, signature)

    for given_ in (data, b'{"issue": ' + data, b"x" * 5000):
        with pytest.raises(InviteRequestInvalid):
            InviteRequest.open(given_, bytes(64), verify)


def test_events_tell_of_evictions_that_a_join_has_read_first(tmp_path: Path) -> None:
    desk = InviteDesk(tmp_path, FIRST)
    name, token = issue(tmp_path, kind="trainer")
    revoke(tmp_path, name, FIRST, at_s=1.0)
    with pytest.raises(InviteRevoked):
        desk.join(token, "ann", 1.0)  # reads the file
    desk.refresh()
    assert desk.news() == ([], [name])
    assert desk.news() == ([], [])
