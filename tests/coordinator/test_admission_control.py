"""Admissions that are renewed, under a clock of the test's own."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from atoll.coordinator import admission_control
from atoll.coordinator.admission_control import (
    AdmissionControl,
    JoinRequest,
    Refusal,
    RefusalStatus,
    SessionTerms,
)
from atoll.coordinator.history import EventLog, History
from atoll.coordinator.invites import USES_FILE, InviteDesk, issue, revoke
from atoll.coordinator.policies import REPORT_BURST
from atoll.coordinator.presence import MAX_PEERS
from atoll.coordinator.rpc.messages import NONCE_TTL_S, PROTOCOL, join_payload
from atoll.coordinator.run.admission import Admission
from atoll.coordinator.run.keys import RunKeys
from atoll.coordinator.run.sections import CoordinatorSection
from atoll.dht import Identity, verify

RUN_ID = b"r" * 32


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def control(
    tmp_path: Path, clock: Clock, keys: RunKeys | None = None, *, has_keepers: bool = False
) -> AdmissionControl:
    keys = keys or RunKeys.generate()
    return AdmissionControl(
        CoordinatorSection(admission_hours=1.0),
        keys,
        RUN_ID,
        desk=InviteDesk(tmp_path, keys.token),
        has_keepers=has_keepers,
        verify=verify,
        events=EventLog(History(tmp_path / "history.db"), clock),
        clock=clock,
        steady=clock,
    )


@pytest.fixture
def admission(tmp_path: Path, clock: Clock) -> AdmissionControl:
    return control(tmp_path, clock)


def join(
    admission: AdmissionControl,
    token: bytes,
    identity: Identity,
    role: str = "trainer",
    protocol: int = PROTOCOL,
) -> Admission:
    nonce = admission.challenge(identity.peer_id)
    welcome = admission.join(
        JoinRequest(
            protocol=protocol,
            version="1",
            run_id=RUN_ID,
            peer_id=identity.peer_id,
            role=role,
            nonce=nonce,
            signature=identity.sign(join_payload(RUN_ID, nonce)),
            token=token,
        )
    )
    return Admission.open(welcome.admission, admission._keys.run_public_key)


def test_a_peer_of_another_release_is_told_which_one_to_install(
    admission: AdmissionControl,
) -> None:
    with pytest.raises(Refusal, match=rf"is of Atoll {version('atoll')}; install that") as refusal:
        join(admission, admission._keys.token, Identity.ephemeral(), protocol=PROTOCOL + 1)
    assert refusal.value.status is RefusalStatus.FAILED_PRECONDITION


def test_an_admission_is_renewed_at_half_its_life(
    admission: AdmissionControl, clock: Clock
) -> None:
    admission.admit("peer", "trainer")
    clock.now_s += 1799
    assert admission.renewed("peer", "trainer") == b""
    clock.now_s += 2
    assert admission.renewed("peer", "trainer")
    assert admission.renewed("peer", "trainer") == b""


def test_any_number_of_peers_that_came_once_takes_bounded_memory(
    admission: AdmissionControl,
) -> None:
    """A peer whose admission was forgotten gets another one, once."""
    admission.admit("first", "trainer")
    for index in range(2 * MAX_PEERS + 1):
        admission.admit(f"passer-by {index}", "trainer")
    assert admission.renewed("first", "trainer")
    assert admission.renewed("first", "trainer") == b""


def test_a_session_ends_with_its_admission(admission: AdmissionControl, clock: Clock) -> None:
    identity = Identity.ephemeral()
    nonce = admission.challenge(identity.peer_id)
    welcome = admission.join(
        JoinRequest(
            protocol=PROTOCOL,
            version="1",
            run_id=RUN_ID,
            peer_id=identity.peer_id,
            role="trainer",
            nonce=nonce,
            signature=identity.sign(join_payload(RUN_ID, nonce)),
            token=admission._keys.token,
        )
    )
    clock.now_s += 3599
    admission.authenticate(identity.peer_id, welcome.session)
    clock.now_s += 2
    with pytest.raises(Refusal) as refusal:
        admission.authenticate(identity.peer_id, welcome.session)
    assert refusal.value.status is RefusalStatus.UNAUTHENTICATED


def test_a_session_of_another_protocol_is_none(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins again, and is refused with the remedy, instead of reporting what nobody can read."""
    keys, identity = RunKeys.generate(), Identity.ephemeral()
    peer = identity.peer_id
    session = control(tmp_path, clock, keys)._sessions.session(peer, 2000.0, SessionTerms())
    control(tmp_path, clock, keys).authenticate(peer, session)
    monkeypatch.setattr(admission_control, "PROTOCOL", PROTOCOL + 1)
    with pytest.raises(Refusal, match="join first"):
        control(tmp_path, clock, keys).authenticate(peer, session)


def test_an_organiser_reads_that_a_peer_has_a_newer_version(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_control, "version", lambda name: "0.1.0")
    releases = "0.1.0", "0.2.0", "9" * 99
    joined = [admission_control._joined("trainer", theirs) for theirs in releases]
    told = [text.removeprefix("joined as trainer (").removesuffix(")") for text in joined]
    assert told[:2] == ["version 0.1.0", "version 0.2.0, newer than the 0.1.0 here"]
    assert len(told[2]) < 80


@pytest.mark.parametrize("seconds", [NONCE_TTL_S + 1, -NONCE_TTL_S - 1])
def test_a_nonce_admits_for_a_while_only(
    tmp_path: Path, clock: Clock, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a proof that was overheard once would admit for ever, as the peer that gave it."""
    keys, identity = RunKeys.generate(), Identity.ephemeral()
    admission = control(tmp_path, clock, keys)
    nonce = admission.challenge(identity.peer_id)
    monkeypatch.setattr(admission, "challenge", lambda peer_id: nonce)
    join(admission, keys.token, identity)
    clock.now_s += seconds
    with pytest.raises(Refusal, match="fresh nonce") as refusal:
        join(admission, keys.token, identity)
    assert refusal.value.status is RefusalStatus.UNAUTHENTICATED


def test_a_peer_that_reports_far_too_often_is_refused(admission: AdmissionControl) -> None:
    for _ in range(int(REPORT_BURST)):
        admission.limit_reports("peer")
    with pytest.raises(Refusal) as refusal:
        admission.limit_reports("peer")
    assert refusal.value.status is RefusalStatus.RESOURCE_EXHAUSTED
    admission.limit_reports("another")


def test_limits_of_invented_names_take_bounded_memory(admission: AdmissionControl) -> None:
    for index in range(2 * MAX_PEERS + 2):
        admission.limit_reports(f"passer-by {index}")
    assert len(admission._limits) <= 2 * MAX_PEERS + 1


def test_an_invite_for_keepers_makes_keepers_for_good(tmp_path: Path, clock: Clock) -> None:
    keys = RunKeys.generate()
    admission = control(tmp_path, clock, keys, has_keepers=True)
    keeper, trainer = Identity.ephemeral(), Identity.ephemeral()
    name, token = issue(tmp_path, kind="keeper", uses=1)
    assert join(admission, token, keeper).role == "keeper"
    assert join(admission, keys.token, trainer).role == "trainer"
    with pytest.raises(Refusal, match="all have joined"):
        join(admission, token, trainer)
    # Neither a restart of the coordinator nor a revoked invite makes it a trainer again.
    revoke(tmp_path, name, keys.token, at_s=0.0)
    again = control(tmp_path, clock, keys, has_keepers=True)
    assert join(again, keys.token, keeper).role == "keeper"
    assert again.role_of(keeper.peer_id, "trainer") == "keeper"


def test_a_keeper_stays_one_where_its_join_is_forgotten(tmp_path: Path, clock: Clock) -> None:
    """Restored from a copy that is older than the join; the session goes on."""
    keys, keeper = RunKeys.generate(), Identity.ephemeral()
    admission = control(tmp_path, clock, keys, has_keepers=True)
    name, token = issue(tmp_path, kind="keeper")
    assert join(admission, token, keeper).role == "keeper"
    terms = SessionTerms(invite=name)
    session = admission._sessions.session(keeper.peer_id, 2000.0, terms)
    (tmp_path / USES_FILE).unlink()
    restored = control(tmp_path, clock, keys, has_keepers=True)
    restored.authenticate(keeper.peer_id, session)
    assert restored.role_of(keeper.peer_id, "trainer") == "keeper"
    _, other = issue(tmp_path, kind="trainer")
    trainer = Identity.ephemeral()
    join(restored, other, trainer)
    assert restored.role_of(trainer.peer_id, "keeper") == "trainer"


def test_nobody_is_a_keeper_by_its_own_word(tmp_path: Path, clock: Clock) -> None:
    admission = control(tmp_path, clock, has_keepers=True)
    identity = Identity.ephemeral()
    with pytest.raises(Refusal, match="expected the role trainer or follower"):
        join(admission, admission._keys.token, identity, "keeper")
    assert admission.role_of(identity.peer_id, "keeper") == "trainer"


def test_an_invite_for_keepers_is_refused_where_members_vote(
    tmp_path: Path, admission: AdmissionControl
) -> None:
    _, token = issue(tmp_path, kind="keeper")
    with pytest.raises(Refusal, match="the invite is for keepers"):
        join(admission, token, Identity.ephemeral())
