from dataclasses import replace

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.run.admission import Admission, AdmissionCheck, AdmissionRefused
from atoll.dht import Refused

KEY = Ed25519PrivateKey.generate()
PUBLIC = KEY.public_key().public_bytes_raw()
RUN = b"r" * 32
ADMISSION = Admission(peer_id="peer", role="trainer", run_id=RUN, issued_s=1000, expires_s=2000)
CREDENTIAL = ADMISSION.sign(KEY)


def check_at(now_s: float, run_id: bytes = RUN) -> AdmissionCheck:
    return AdmissionCheck(PUBLIC, run_id, clock=lambda: now_s)


def test_the_admitted_peer_passes() -> None:
    check = check_at(1500)
    assert check.check("peer", CREDENTIAL) == ADMISSION
    check("peer", CREDENTIAL)


def test_a_clock_that_is_a_little_behind_passes() -> None:
    check_at(900).check("peer", CREDENTIAL)
    check_at(2030).check("peer", CREDENTIAL)


def test_expired_is_refused_even_when_known() -> None:
    now = 1500.0
    check = AdmissionCheck(PUBLIC, RUN, clock=lambda: now)
    check("peer", CREDENTIAL)
    now = 2100.0
    with pytest.raises(AdmissionRefused, match="expired 100 s ago"):
        check("peer", CREDENTIAL)


def test_a_late_coordinator_may_say_where_it_is_and_nothing_else() -> None:
    """Its predecessor's clock was ahead, and has set those of all peers."""
    coordinator = replace(ADMISSION, role="coordinator").sign(KEY)
    check_at(9000)("peer", coordinator, use="relocation")
    for use in ("", "relocation2", "ping", "relocation@stage-1"):
        with pytest.raises(AdmissionRefused, match="expired"):
            check_at(9000)("peer", coordinator, use=use)
    with pytest.raises(AdmissionRefused, match="expired"):
        check_at(9000)("peer", CREDENTIAL, use="relocation")
    out = AdmissionCheck(PUBLIC, RUN, clock=lambda: 9000.0, is_evicted=lambda peer_id: True)
    with pytest.raises(AdmissionRefused, match="evicted"):
        out("peer", coordinator, use="relocation")


def test_the_credential_of_another_peer_is_refused() -> None:
    with pytest.raises(Refused, match="not-admitted: expected an admission of thief"):
        check_at(1500)("thief", CREDENTIAL)


def test_the_credential_of_another_run_is_refused() -> None:
    with pytest.raises(AdmissionRefused, match="run"):
        check_at(1500, b"x" * 32)("peer", CREDENTIAL)


def test_a_signature_of_another_key_is_refused() -> None:
    forged = ADMISSION.sign(Ed25519PrivateKey.generate())
    with pytest.raises(AdmissionRefused, match="signed by this run's key"):
        check_at(1500)("peer", forged)


@pytest.mark.parametrize("credential", [b"", b"x" * 64, b"x" * 65, b"x" * 512, b"x" * 10_000])
def test_hostile_bytes_are_refused(credential: bytes) -> None:
    with pytest.raises(AdmissionRefused):
        check_at(1500)("peer", credential)


@given(st.integers(0, len(CREDENTIAL) - 1), st.integers(1, 255))
def test_any_changed_byte_is_refused(at: int, flip: int) -> None:
    changed = bytearray(CREDENTIAL)
    changed[at] ^= flip
    with pytest.raises(AdmissionRefused):
        check_at(1500)("peer", bytes(changed))


@pytest.mark.parametrize(
    "fields",
    [
        [1, "peer", "trainer", RUN, 1, 2, ""],
        [2, "peer", "king", RUN, 1, 2, ""],
        [2, "peer", "trainer", b"", 1, 2, ""],
        [2, "peer", "trainer", RUN, 1.5, 2, ""],
        [2, "peer", "trainer", RUN, True, 2, ""],
        [2, "peer", "trainer", RUN, 1, 2, "x" * 17],
        [2, "peer"],
        7,
    ],
)
def test_wrong_fields_under_a_good_signature_are_refused(fields: object) -> None:
    payload: bytes = msgpack.packb(fields)
    credential = payload + KEY.sign(b"atoll admission 2" + payload)
    with pytest.raises(AdmissionRefused):
        check_at(1500)("peer", credential)
