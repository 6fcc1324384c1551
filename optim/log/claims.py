"""Entries that somebody sent, verified without trust in who did.

From the base of an epoch on, each entry carries a certificate of the electorate that the entry
before it names. Those before the base are good when their chain ends in the base's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.optim.log.entry import (
    Certificate,
    ChainMismatch,
    Elector,
    Entry,
    Epoch,
    Newcomer,
    Trust,
    Verify,
    check_certificate,
    check_follows,
)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An entry that is the log's; only its body is still to come."""

    entry: Entry
    certificate: Certificate


@dataclass(frozen=True, kw_only=True)
class LogPlace:
    """The log before an entry: its chain and the electorate."""

    chain: bytes
    electorate: tuple[Elector, ...]
    newcomers: tuple[Newcomer, ...] = ()
    norms: tuple[float, ...] = ()
    settings: bytes | None = b""
    """what orders have changed before the entry; None if that is not known"""
    units: bytes | None = b""
    """who holds which units before the entry; None if that is not known"""


def verify_claims(
    records: Sequence[tuple[bytes, bytes]],
    *,
    run_id: bytes,
    here: LogPlace | None,
    opened: Epoch,
    verify: Verify,
    trust: Trust = "crash",
) -> list[Claim]:
    """Verify consecutive entries that somebody sent.

    Args:
        records: entries and their certificates, encoded.
        run_id: of the run.
        here: the place before the first of them. None if it is not known: then they must reach
            the epoch's base, whose chain proves them.
        opened: the current epoch.
        verify: checks a peer's signature.
        trust: the run's.

    Raises:
        LogError: one of them is not the log's.
    """
    verified: list[Claim] = []
    for entry_bytes, certificate_bytes in records:
        entry, certificate = Entry.decode(entry_bytes), Certificate.decode(certificate_bytes)
        if entry.position == opened.base_position:
            _expect_base_chain(here, opened)
            here = place_at_base(opened)
        if here is None:
            here = LogPlace(chain=entry.previous_chain, electorate=())
        is_certified = entry.position >= opened.base_position
        check_follows(
            entry,
            run_id=run_id,
            epoch=opened.epoch if is_certified else entry.epoch,
            position=verified[-1].entry.position + 1 if verified else entry.position,
            chain=here.chain,
        )
        if is_certified:
            check_certificate(entry, certificate, here.electorate, verify, trust)
        here = place_after(entry)
        verified.append(Claim(entry=entry, certificate=certificate))
    _expect_reaches_base(verified, opened)
    return verified


def verify_linked(
    records: Sequence[tuple[bytes, bytes]], *, run_id: bytes, start: int, chain: bytes
) -> list[Claim]:
    """Verify entries before an epoch's base by the chain at their end, which is known already.

    Args:
        records: consecutive entries from `start` on, and their certificates, encoded.
        run_id: of the run.
        start: position of the first.
        chain: after the last.

    Raises:
        LogError: they do not end in that chain.
    """
    claims: list[Claim] = []
    for position, (entry_bytes, certificate_bytes) in enumerate(records, start):
        entry = Entry.decode(entry_bytes)
        before = claims[-1].entry.chain if claims else entry.previous_chain
        check_follows(entry, run_id=run_id, epoch=entry.epoch, position=position, chain=before)
        claims.append(Claim(entry=entry, certificate=Certificate.decode(certificate_bytes)))
    if not claims or claims[-1].entry.chain != chain:
        raise ChainMismatch(f"entries from {start} on: expected the chain {chain.hex()[:12]} after")
    return claims


def place_at_base(opened: Epoch) -> LogPlace:
    """Return the place at the base of an epoch."""
    return LogPlace(
        chain=opened.base_chain,
        electorate=opened.electorate,
        newcomers=opened.newcomers,
        norms=opened.norms,
        settings=opened.settings,
        units=opened.units,
    )


def place_after(entry: Entry) -> LogPlace:
    """Return the place after an entry of the same epoch."""
    return LogPlace(
        chain=entry.chain,
        electorate=entry.electorate,
        newcomers=entry.newcomers,
        norms=entry.norms,
        settings=entry.settings,
        units=entry.units,
    )


def _expect_base_chain(here: LogPlace | None, opened: Epoch) -> None:
    if here is not None and here.chain != opened.base_chain:
        raise ChainMismatch(
            f"expected the chain {opened.base_chain.hex()[:12]} at the base "
            f"{opened.base_position} of epoch {opened.epoch}, got {here.chain.hex()[:12]}"
        )


def _expect_reaches_base(verified: Sequence[Claim], opened: Epoch) -> None:
    """Refuse entries that all lie before the base, unless they end exactly there."""
    if not verified or verified[-1].entry.position + 1 > opened.base_position:
        return
    last = verified[-1].entry
    if last.position + 1 < opened.base_position or last.chain != opened.base_chain:
        raise ChainMismatch(
            f"expected entries up to the base {opened.base_position} of epoch {opened.epoch}, "
            f"got them up to {last.position} with another chain"
        )


def certified_roots(claims: Sequence[Claim]) -> dict[int, bytes]:
    """Return the roots of states that entries carry, by position."""
    roots = (claim.entry.state_root for claim in reversed(claims))
    return {root.position: root.root for root in roots if root is not None}


def place_before(claims: Sequence[Claim], position: int, opened: Epoch | None) -> LogPlace | None:
    """Return the place before the entry at `position`; None if the claims do not show it."""
    if opened is not None and position == opened.base_position:
        return place_at_base(opened)
    for claim in claims:
        if claim.entry.position + 1 == position:
            return place_after(claim.entry)
        if claim.entry.position == position:
            # Before it lies an entry that nobody sent, so who votes here is not known.
            return LogPlace(
                chain=claim.entry.previous_chain, electorate=(), settings=None, units=None
            )
    return None
