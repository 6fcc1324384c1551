"""The order of the peers' table, and which of its rows are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from atoll.coordinator.report.view import label
from atoll.coordinator.run.status import PeerStatus

Key = Callable[[PeerStatus, Mapping[str, int]], float | None]

_KEYS: Final[Mapping[str, Key]] = {
    "tokens": lambda peer, tokens: tokens.get(peer.peer_id, 0),
    "loss": lambda peer, tokens: None if peer.loss is None else -peer.loss,  # the lowest first
    "utilisation": lambda peer, tokens: peer.utilisation if peer.tokens_total else None,
    "bytes": lambda peer, tokens: peer.wire_bytes_sent + peer.wire_bytes_received,
    "last seen": lambda peer, tokens: -peer.last_seen_s,
}
"""By order: a number that is larger further up; None comes last, whichever way the rows go."""
ORDERS: Final = ("name", *_KEYS)
MAX_WANTED: Final = 64  # characters


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """What the user has chosen."""

    order: str = "name"
    is_reversed: bool = False
    wanted: str = ""
    """A text that rows contain, in any case; empty for all of them."""

    def next_order(self) -> Self:
        """Return the arrangement by the next order."""
        index = (ORDERS.index(self.order) + 1) % len(ORDERS)
        return replace(self, order=ORDERS[index], is_reversed=False)

    def rows(self, peers: Sequence[PeerStatus], tokens: Mapping[str, int]) -> Sequence[PeerStatus]:
        """Return the rows to show.

        Args:
            peers: sorted by name, which is also the order among equals.
            tokens: that rounds took, by PeerID.
        """
        found = [peer for peer in peers if self._is_wanted(peer)]
        if self.order == "name":
            return found[::-1] if self.is_reversed else found
        values = [(peer, _KEYS[self.order](peer, tokens)) for peer in found]
        sign = 1 if self.is_reversed else -1
        known = sorted(
            ((peer, value) for peer, value in values if value is not None),
            key=lambda pair: sign * pair[1],
        )
        return [peer for peer, _ in known] + [peer for peer, value in values if value is None]

    def _is_wanted(self, peer: PeerStatus) -> bool:
        wanted = self.wanted.casefold()
        shown = (label(peer), peer.peer_id, peer.state, peer.module, peer.device, peer.reach)
        return any(wanted in text.casefold() for text in shown)

    def __str__(self) -> str:
        """For the frame of the table; empty for that of the start."""
        words = []
        if self.order != "name" or self.is_reversed:
            words.append(f"by {self.order}{', reversed' if self.is_reversed else ''}")
        if self.wanted:
            words.append(f'with "{self.wanted}"')
        return " · ".join(words)
