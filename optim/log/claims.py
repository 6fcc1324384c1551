"""Entries of which everything but the body is verified, and where they stand in the log.

Trust starts at the epoch record, which the run's key signed: it names a position, the chain there,
and who votes there. From that base on each entry carries a certificate of the electorate that the
entry before it names. Entries before the base need no certificate: they are good when their chain
ends in the base's. So whoever sends entries is trusted with nothing.
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


def verify_claims(
    records: Sequence[tuple[bytes, bytes]],
    *,
    run_id: bytes,
    here: LogPlace | None,
    opened: Epoch,
    verify: Verify,
) -> list[Claim]:
    """Verify consecutive entries that somebody sent.

    Args:
        records: entries and their certificates, encoded.
        run_id: of the run.
        here: the place before the first of them. None if it is not known: then they must reach
            the epoch's base, whose chain proves them.
        opened: the current epoch.
        verify: checks a peer's signature.

    Raises:
        LogError: one of them is not the log's.
    """
    verified: list[Claim] = []
    for entry_bytes, certificate_bytes in records:
        entry, certificate = Entry.decode(entry_bytes), Certificate.decode(certificate_bytes)
        if entry.position == opened.base_position:
            _expect_base_chain(here, opened)
            here = LogPlace(chain=opened.base_chain, electorate=opened.electorate)
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
            check_certificate(entry, certificate, here.electorate, verify)
        here = LogPlace(chain=entry.chain, electorate=entry.electorate)
        verified.append(Claim(entry=entry, certificate=certificate))
    _expect_reaches_base(verified, opened)
    return verified


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


def certified_root(claims: Sequence[Claim], position: int) -> bytes | None:
    """Return the root of the state at `position` if an entry carries it."""
    for claim in claims:
        root = claim.entry.state_root
        if root is not None and root.position == position:
            return root.root
    return None


def place_before(claims: Sequence[Claim], position: int, opened: Epoch | None) -> LogPlace | None:
    """Return the place before the entry at `position`; None if the claims do not show it."""
    if opened is not None and position == opened.base_position:
        return LogPlace(chain=opened.base_chain, electorate=opened.electorate)
    for claim in claims:
        if claim.entry.position + 1 == position:
            return LogPlace(chain=claim.entry.chain, electorate=claim.entry.electorate)
        if claim.entry.position == position:
            # Before it lies an entry that nobody sent, so who votes here is not known.
            return LogPlace(chain=claim.entry.previous_chain, electorate=())
    return None
