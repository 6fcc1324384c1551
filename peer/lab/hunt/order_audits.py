"""Check what orders changed at each place of a log, by another formula than the log's.

Everybody has the settings of its chain, so all switch at the same position; nothing but orders
follows a pause, and nothing the last round; updates have the rates that were ordered; an evicted
peer is in no round, and votes in none.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from atoll.optim.log.entry import Entry, verify_key
from atoll.optim.log.orders import (
    EvictPeer,
    Order,
    PauseRun,
    ReadmitPeer,
    ResumeRun,
    RunSettings,
    SignedOrder,
    StopRun,
)

Fail = Callable[[str, str], None]


class OrderAudit:
    """The settings that a log's orders give, as plain values by chain."""

    def __init__(self, run_key: bytes, planned: tuple[float, float], fail: Fail) -> None:
        """Begin a run with learning rate and momentum of its outer step."""
        self._run_key = run_key
        self._planned = planned
        self._fail = fail
        self._after: dict[bytes, dict[str, Any]] = {}

    def decided(self, name: str, entry: Entry) -> None:
        """Take an entry that a machine holds for decided."""
        if entry.chain in self._after:
            return
        known = {} if entry.position == 0 else self._after.get(entry.previous_chain)
        if known is None:  # nobody who lives has decided the entry before
            self._after[entry.chain] = _plain(entry.settings)
            return
        at = f"{name}, entry {entry.epoch, entry.position}"
        self._expect_may_follow(at, known, entry)
        after = dict(known)
        if entry.kind == "control":
            self._take(at, after, entry)
        elif entry.kind == "update":
            self._expect_rates(at, known, entry)
        self._expect_no_evicted(at, known, after, entry)
        carried = _plain(entry.settings)
        if carried != after:
            self._fail("settings follow from orders", f"{at}: {carried}, not {after}")
        self._after[entry.chain] = after

    def _expect_may_follow(self, at: str, before: Mapping[str, Any], entry: Entry) -> None:
        last = before.get("last_round")
        if last is not None and entry.position >= last:
            self._fail("nothing follows the last round", f"{at}: the run ended after {last}")
        if before.get("is_paused") and entry.kind != "control":
            self._fail("a paused run decides orders alone", f"{at}: {entry.kind}")

    def _expect_no_evicted(
        self, at: str, before: Mapping[str, Any], after: Mapping[str, Any], entry: Entry
    ) -> None:
        out = {*before.get("evicted", ())} & {member.peer_id for member in entry.members}
        if out:
            self._fail("no evicted peer is in a round", f"{at}: {out}")
        electors = {elector.peer_id for elector in entry.electorate}
        out = electors & {*after.get("evicted", ())}
        if out and out != electors:  # if all are out, they stay until an epoch names others
            self._fail("no evicted peer votes", f"{at}: {out}")

    def held(self, name: str, settings: RunSettings, chain: bytes) -> None:
        """Take the settings that a machine has at the end of its log."""
        expected = self._after.get(chain)
        if expected is not None and _plain(settings.stored) != expected:
            self._fail("equal settings", f"{name}: {_plain(settings.stored)}, not {expected}")

    def _take(self, at: str, after: dict[str, Any], entry: Entry) -> None:
        signed = SignedOrder.decode(entry.order)
        payload = b"atoll order 1" + signed.order
        if not verify_key(after.get("key", self._run_key), payload, signed.signature):
            self._fail("orders are the organiser's", f"{at}: under another key")
        order = Order.decode(signed.order)
        if order.number != after.get("number", 0) + 1:
            self._fail("orders come once, in a row", f"{at}: {order.number} after {after}")
        after["number"] = order.number
        match order.change:
            case PauseRun():
                after["is_paused"] = True
            case ResumeRun():
                after.pop("is_paused", None)
                after.pop("last_round", None)
            case StopRun(after_round=wanted):
                after["last_round"] = max(wanted or 0, entry.position + 1)
                if after["last_round"] == entry.position + 1:
                    after.pop("is_paused", None)
            case EvictPeer(peer_id=peer):
                after["evicted"] = tuple(sorted({*after.get("evicted", ()), peer}))
            case ReadmitPeer(peer_id=peer):
                after["evicted"] = tuple(p for p in after.get("evicted", ()) if p != peer)
                if not after["evicted"]:
                    del after["evicted"]
            case change:
                after[change.kind] = change.value

    def _expect_rates(self, at: str, before: Mapping[str, Any], entry: Entry) -> None:
        lr, momentum = self._planned
        wanted = before.get("outer_lr", lr), before.get("outer_momentum", momentum)
        if (entry.lr, entry.momentum) != (_fp32(wanted[0]), _fp32(wanted[1])):
            self._fail("rates as ordered", f"{at}: {entry.lr, entry.momentum}, not {wanted}")


def _plain(stored: bytes) -> dict[str, Any]:
    """Return the fields that are not as planned."""
    if not stored:
        return {}
    fields = RunSettings.decode(stored).model_dump()
    return {name: value for name, value in fields.items() if value not in (None, False, ())}


def _fp32(value: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)
