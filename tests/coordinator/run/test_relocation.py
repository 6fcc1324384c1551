"""Records of where a coordinator is: signed, bounded, and followed in one direction only."""

from __future__ import annotations

import itertools
from typing import Any

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.relocation import (
    MAX_RECORD_BYTES,
    MAX_SERIAL,
    Relocation,
    RelocationInvalid,
    Whereabouts,
)

KEY, RUN = Ed25519PrivateKey.from_private_bytes(bytes(range(32))), b"\x07" * 32
PUBLIC = KEY.public_key().public_bytes_raw()
NODE = "/ip4/192.0.2.2/tcp/7701/p2p/12D3KooW"
INVITE = Invite(addresses=("old:7700",), run_id=RUN, run_key=PUBLIC, tls_sha256=bytes(32))


def record(
    serial: int = 5, *addresses: str, key: Ed25519PrivateKey = KEY, run: bytes = RUN
) -> bytes:
    there = Relocation(serial=serial, addresses=addresses or ("new:7700",), bootstrap=(NODE,))
    return there.sign(run, key.sign)


def signed(*fields: Any) -> bytes:
    payload = bytes(msgpack.packb(list(fields)))  # type: ignore[arg-type]
    return payload + KEY.sign(b"atoll relocation 1" + payload)


def test_what_was_signed_is_read_again() -> None:
    found = Relocation.open(record(5, "a:1", "[::1]:2"), PUBLIC, RUN)
    assert found == Relocation(serial=5, addresses=("a:1", "[::1]:2"), bootstrap=(NODE,))


def test_the_longest_record_fits() -> None:
    node = f"/dns/{'n' * 285}/p2p/12D3"
    full = Relocation(
        serial=MAX_SERIAL,
        addresses=tuple(f"{'h' * 250}{i:02}:7700" for i in range(16)),
        bootstrap=(node,) * 16,
    ).sign(RUN, KEY.sign)
    assert len(full) <= MAX_RECORD_BYTES
    assert len(Relocation.open(full, PUBLIC, RUN).addresses) == 16


def test_a_forged_relocation_is_refused() -> None:
    whereabouts, other = Whereabouts(INVITE), Ed25519PrivateKey.generate()
    changed = bytearray(record())
    changed[50] ^= 1
    for forged in (record(key=other), bytes(changed), record()[:-1], bytes(65)):
        with pytest.raises(RelocationInvalid):
            whereabouts.take(forged)
    assert not whereabouts.take(b"")  # of a peer that has none
    assert whereabouts.addresses == ("old:7700",) and not whereabouts.record


def test_a_relocation_of_another_run_with_the_same_key_is_refused() -> None:
    with pytest.raises(RelocationInvalid, match="of this run"):
        Relocation.open(record(run=b"\x08" * 32), PUBLIC, RUN)


def test_a_replayed_relocation_leads_nowhere() -> None:
    whereabouts = Whereabouts(INVITE)
    assert whereabouts.take(record(6, "newer:7700"))
    for old in (record(5, "older:7700"), record(6, "twin:7700"), record(6, "newer:7700")):
        assert not whereabouts.take(old)
    assert whereabouts.addresses == ("newer:7700", "old:7700")
    assert whereabouts.record == record(6, "newer:7700")


def test_redirects_in_a_circle_end() -> None:
    """Two coordinators point at each other, and both records are shown again and again."""
    whereabouts, there, back = Whereabouts(INVITE), record(1, "b:1"), record(2, "a:1")
    shown = itertools.islice(itertools.cycle([there, back]), 100)
    assert sum(map(whereabouts.take, shown)) == 2
    assert whereabouts.addresses == ("a:1", "old:7700")


def test_addresses_without_end_are_not_kept() -> None:
    whereabouts = Whereabouts(INVITE)
    for serial in range(1, 100):
        whereabouts.take(record(serial, *(f"host-{serial}-{i}:7700" for i in range(16))))
    assert len(whereabouts.addresses) == 17


@pytest.mark.parametrize(
    "fields",
    [
        (2, RUN, 5, ["a:1"], []),
        (1, RUN, 5, [], []),
        (1, RUN, 5, ["a:1"] * 17, []),
        (1, RUN, 5, ["a" * 300 + ":1"], []),
        (1, RUN, 5, ["a"], []),
        (1, RUN, 5, ["a:70000"], []),
        (1, RUN, 5, ["a b:1"], []),
        (1, RUN, 5, [7], []),
        (1, RUN, 5, "a:1", []),
        (1, RUN, 5, ["a:1"], [NODE] * 17),
        (1, RUN, 5, ["a:1"], ["/ip4/192.0.2.2/tcp/7701"]),
        (1, RUN, 5, ["a:1"], ["/" + "n" * 301 + "/p2p/x"]),
        (1, RUN, 0, ["a:1"], []),
        (1, RUN, -1, ["a:1"], []),
        (1, RUN, MAX_SERIAL + 1, ["a:1"], []),
        (1, RUN, True, ["a:1"], []),
        (1, RUN, 5.0, ["a:1"], []),
        (1, RUN, 5, ["a:1"]),
        (1, RUN, 5, ["a:1"], [], 0),
        (),
    ],
    ids=str,
)
def test_fields_out_of_bounds_are_refused_although_they_are_signed(fields: tuple[Any, ...]) -> None:
    with pytest.raises(RelocationInvalid):
        Relocation.open(signed(*fields), PUBLIC, RUN)


def test_a_record_of_absurd_size_is_not_even_verified() -> None:
    with pytest.raises(RelocationInvalid, match="at most"):
        Relocation.open(bytes(MAX_RECORD_BYTES + 1), PUBLIC, RUN)


def test_a_newer_invite_is_tried_after_an_older_record() -> None:
    whereabouts = Whereabouts(INVITE)
    whereabouts.take(record(5, "between:7700", "old:7700"))
    assert whereabouts.addresses == ("between:7700", "old:7700")
