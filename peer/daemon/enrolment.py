"""A peer's membership of its run: joining, joining again, and what outlives the process."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from atoll.coordinator.rpc.client import CoordinatorClient, Joined
from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable
from atoll.coordinator.run.invite import Invite
from atoll.peer.daemon.membership import Membership, StateDirectory, addresses_to_keep
from atoll.peer.rounds.context import OnEvent

PAUSE_S = (0.5, 15.0)  # the first and the longest, between two tries to join
OFFLINE_S = 10.0  # how long a peer that has joined before tries the coordinator at its start


class Enrolment:
    """The newest answer of the coordinator, kept on disk for a start without it."""

    def __init__(
        self,
        directory: StateDirectory,
        invite: Invite,
        membership: Membership,
        *,
        own_bootstrap: Sequence[str],
    ) -> None:
        """Use `open`."""
        self.membership = membership
        self._directory = directory
        self._invite = invite
        self._own_bootstrap = tuple(own_bootstrap)

    @classmethod
    async def open(
        cls,
        client: CoordinatorClient,
        directory: StateDirectory,
        invite: Invite,
        show: OnEvent,
    ) -> tuple[Enrolment, Joined | None]:
        """Join the run, or resume an earlier membership; retry for ever if there is neither.

        Raises:
            CoordinatorError: the coordinator refuses this peer.
        """
        began_s, pause_s = time.monotonic(), PAUSE_S[0]
        while True:
            try:
                joined = await client.join()
            except CoordinatorUnreachable as error:
                earlier = directory.recall()
                if earlier is not None and time.monotonic() - began_s > OFFLINE_S:
                    show("warning", f"starting without the coordinator: {error}")
                    # The run's own address comes first among those that were kept.
                    own = earlier.bootstrap[:1]
                    return cls(directory, invite, earlier, own_bootstrap=own), None
                text = f"{error}; retrying in {pause_s:.1f} s"
                show("warning", text, key=("cannot join", type(error)))
            else:
                membership = Membership.of(joined, invite)
                directory.remember(membership)
                own = membership.bootstrap
                return cls(directory, invite, membership, own_bootstrap=own), joined
            await asyncio.sleep(pause_s * (0.5 + random.random()))
            pause_s = min(2 * pause_s, PAUSE_S[1])

    def renew(self, joined: Joined) -> None:
        """Take a later answer of the coordinator."""
        self.membership = Membership.of(joined, self._invite)
        self._own_bootstrap = self.membership.bootstrap
        self._directory.remember(self.membership)

    def keep_addresses(self, known: Sequence[str]) -> None:
        """Keep addresses of other peers, for a start while the coordinator is away."""
        kept = self.membership.bootstrap
        keep = addresses_to_keep(self._own_bootstrap, kept, known)
        if set(keep) != set(kept):
            self.membership = replace(self.membership, bootstrap=keep)
            self._directory.remember(self.membership)
