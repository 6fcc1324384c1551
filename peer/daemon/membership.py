"""A peer's membership of a run: joining, joining again, and the directory that outlives it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from atoll.coordinator.rpc.client import CoordinatorClient, Joined
from atoll.coordinator.rpc.client_errors import Busy, CoordinatorUnreachable, WrongCertificate
from atoll.coordinator.run.admission import Role
from atoll.coordinator.run.files import replace_private
from atoll.coordinator.run.invite import MAX_BOOTSTRAP, Invite
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.peer import notices
from atoll.peer.daemon.state_directory import (
    StateDirectoryError,
    StateDirectoryInUse,
    StateDirectoryUnusable,
    expect_run,
    is_being_left,
    not_a_run,
    usable,
)
from atoll.peer.paths import PeerPaths
from atoll.peer.rounds.context import OnEvent

PAUSE_S = (0.5, 15.0)  # the first and the longest, between two tries to join; they double
# How long a peer that has joined before tries the coordinator at its start. One that restarts is
# back within seconds; the rounds of the others do not wait for it, so neither does this peer.
OFFLINE_S = 10.0


class FetchTokenizer(Protocol):
    """Fetches the tokenizer that travels with the run, checked against its digest and size."""

    async def __call__(self, *, sha256: str, size: int) -> bytes:
        """Return the file's bytes; raise CoordinatorError if there are none."""
        ...


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The coordinator's answer to joining, kept for a start without it."""

    spec: RunSpec
    module: str = ""
    """The module whose log this peer follows; empty in a dense run."""
    layout: Layout
    genesis_root: bytes
    admission: bytes
    bootstrap: tuple[str, ...]
    role: Role = "trainer"
    evictions: bytes = b""
    """The signed list of the peers that are out."""
    relocation: bytes = b""
    """The newest record of where the coordinator is."""

    @classmethod
    def of(cls, joined: Joined, invite: Invite, client: CoordinatorClient) -> Membership:
        """Take what is kept of an answer to a client."""
        return cls(
            spec=joined.spec,
            module=joined.module,
            layout=joined.layout,
            genesis_root=joined.genesis_root,
            admission=joined.admission,
            bootstrap=joined.bootstrap or invite.bootstrap,
            role=joined.role,
            evictions=client.evictions,
            relocation=client.whereabouts.record,
        )

    def to_json(self, run_id: bytes) -> bytes:
        """Return the contents of `run.json`."""
        fields = {
            "run_id": run_id.hex(),
            "spec": self.spec.canonical().decode(),
            "module": self.module,
            "layout": self.layout.to_json(),
            "genesis_root": self.genesis_root.hex(),
            "admission": self.admission.hex(),
            "bootstrap": list(self.bootstrap),
            "role": self.role,
            "evictions": self.evictions.hex(),
            "relocation": self.relocation.hex(),
        }
        return json.dumps(fields).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Membership:
        """Read what `to_json` returned."""
        fields = json.loads(raw)
        spec, module = RunSpec.from_json(fields["spec"].encode()), fields.get("module", "")
        if module not in spec.modules:  # it names files
            raise ValueError(f"expected a module of the run, got {module!r}")
        return cls(
            spec=spec,
            module=module,
            layout=Layout.from_json(fields["layout"]),
            genesis_root=bytes.fromhex(fields["genesis_root"]),
            admission=bytes.fromhex(fields["admission"]),
            bootstrap=tuple(fields["bootstrap"]),
            # Absent in what an older version wrote; the others check the admission, not this.
            role=_role(fields.get("role")),
            evictions=bytes.fromhex(fields.get("evictions", "")),
            relocation=bytes.fromhex(fields.get("relocation", "")),
        )


def _role(told: object) -> Role:
    if told == "keeper":
        return "keeper"
    return "follower" if told == "follower" else "trainer"


FindPlace = Callable[[Sequence[str]], Awaitable[bool]]
"""Asks the nodes at some multiaddrs; True if the client knows a newer address then."""


async def _nowhere(nodes: Sequence[str]) -> bool:
    return False


class StateDirectory:
    """One peer's folder for one run, locked while this process uses it."""

    def __init__(self, paths: PeerPaths, run_id: bytes) -> None:
        """Lock the folder, and make it if it is missing.

        Raises:
            StateDirectoryError: it is in use, or of another run; nothing in it was changed.
        """
        self.paths = paths
        self._run_id = run_id
        expect_run(paths, run_id)  # before the first write: the folder may be another run's
        with usable(paths):
            paths.root.mkdir(parents=True, exist_ok=True)
            self._lock = paths.lock.open("ab")
        try:
            self._take_lock()
            expect_run(paths, run_id)  # now that nobody else can put another there
        except BaseException:
            self._lock.close()
            raise

    def remember(self, membership: Membership) -> None:
        """Keep a membership, and the identity beside it: both names are on the disk after that."""
        replace_private(self.paths.run, membership.to_json(self._run_id))

    def recall(self) -> Membership | None:
        """Return the membership that was kept; None if there is none."""
        if not self.paths.run.exists():
            return None
        try:
            return Membership.from_json(self.paths.run.read_bytes())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise not_a_run(self.paths) from error

    def module(self) -> str:
        """Return the module that this peer followed when it last ran; empty if it did not."""
        earlier = self._undamaged()
        return earlier.module if earlier is not None else ""

    def spec(self) -> RunSpec | None:
        """Return the run's spec as an earlier start has kept it; None if none has."""
        earlier = self._undamaged()
        return earlier.spec if earlier is not None else None

    def is_keepers(self) -> bool:
        """Return whether this peer was a keeper when it last ran."""
        earlier = self._undamaged()
        return earlier is not None and earlier.role == "keeper"

    def relocation(self) -> bytes:
        """Return the newest record of where the coordinator is; empty if none was kept."""
        earlier = self._undamaged()
        return earlier.relocation if earlier is not None else b""

    def _undamaged(self) -> Membership | None:
        try:
            return self.recall()
        except StateDirectoryError:
            return None  # joining replaces a damaged record

    def expect_role(self, *, follows: bool) -> None:
        """Check that a follower has a folder of its own: it keeps the whole log, a peer prunes it.

        Raises:
            StateDirectoryUnusable: the folder is a follower's, or is none.
        """
        earlier = self._undamaged()
        if earlier is None or (earlier.role == "follower") == follows:
            return
        expected, got = ("a follower", "a peer") if follows else ("a peer", "a follower")
        option = "--dir" if follows else "--state-dir"
        raise StateDirectoryUnusable(
            f"{self.paths.root}: expected the folder of {expected}, got that of {got}; name "
            f"another with {option}"
        )

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.close()

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_being_left(self.paths):  # by who had it before
                self._lock.truncate(0)
        except BlockingIOError:
            raise StateDirectoryInUse(
                f"{self.paths.root}: another peer is running on this state directory; "
                "stop it, or give this one its own with --state-dir"
            ) from None


def addresses_to_keep(
    own: Sequence[str], kept: Sequence[str], known: Sequence[str]
) -> tuple[str, ...]:
    """Choose the addresses to keep for a start while the coordinator is away.

    Args:
        own: the run's own; they come first.
        kept: those kept so far.
        known: those of the peers that are here now.

    Returns:
        At most `MAX_BOOTSTRAP`. An address that is kept and still known stays, so that in a steady
        swarm, however large, nothing is written.
    """
    here = set(known)
    still = [address for address in kept if address in here]
    gone = [address for address in kept if address not in here]
    return tuple(dict.fromkeys([*own, *still, *known, *gone]))[:MAX_BOOTSTRAP]


class Enrolment:
    """The newest answer of the coordinator, kept on disk for a start without it."""

    def __init__(
        self,
        directory: StateDirectory,
        invite: Invite,
        membership: Membership,
        *,
        own_bootstrap: Sequence[str],
        show: OnEvent,
    ) -> None:
        """Use `open`."""
        self.membership = membership
        self._show = show
        self._is_unwritten = False
        """True if the disk did not take the newest one."""
        self._directory = directory
        self._invite = invite
        self._own_bootstrap = tuple(own_bootstrap)

    @property
    def own_bootstrap(self) -> tuple[str, ...]:
        """Addresses of the run's first nodes; the coordinator's come first."""
        return self._own_bootstrap

    @classmethod
    async def open(
        cls,
        client: CoordinatorClient,
        directory: StateDirectory,
        invite: Invite,
        show: OnEvent,
        find_place: FindPlace = _nowhere,
    ) -> tuple[Enrolment, Joined | None]:
        """Join the run, or resume an earlier membership; retry without end if there is neither.

        Args:
            client: joins.
            directory: keeps the answer.
            invite: of the run.
            show: takes what the owner should know.
            find_place: asks nodes of the run where a coordinator is that does not answer.

        Raises:
            CoordinatorError: the coordinator refuses this peer.
        """
        began_s, pause_s = time.monotonic(), PAUSE_S[0]
        client.recall_relocation(directory.relocation())
        while True:
            try:
                joined = await client.join()
            except (CoordinatorUnreachable, WrongCertificate, Busy) as error:
                earlier = directory.recall()
                nodes = (*invite.bootstrap, *(earlier.bootstrap if earlier else ()))
                if not isinstance(error, Busy) and await find_place(nodes):
                    found = notices.coordinator_found(addresses=client.addresses, reason=str(error))
                    show("info", found)
                    await client.follow()
                    continue
                if isinstance(error, WrongCertificate):
                    raise
                is_usable = earlier is not None and earlier.module == client.module
                if earlier and is_usable and time.monotonic() - began_s > OFFLINE_S:
                    show("warning", notices.coordinator_absent(reason=str(error)))
                    client.recall_evictions(earlier.evictions)
                    # The run's own address comes first among those that were kept.
                    own = earlier.bootstrap[:1]
                    return cls(directory, invite, earlier, own_bootstrap=own, show=show), None
                retrying = notices.coordinator_retrying(reason=str(error), retry_s=pause_s)
                show("warning", retrying, key=("cannot join", type(error)))
            else:
                membership = Membership.of(joined, invite, client)
                directory.remember(membership)
                own = membership.bootstrap
                return cls(directory, invite, membership, own_bootstrap=own, show=show), joined
            # At random, so that peers that a restart cut off do not return in one moment.
            await asyncio.sleep(pause_s * (0.5 + random.random()))
            pause_s = min(2 * pause_s, PAUSE_S[1])

    def renew(self, joined: Joined, client: CoordinatorClient) -> None:
        """Take a later answer of the coordinator to a client."""
        membership = Membership.of(joined, self._invite, client)
        self._own_bootstrap = membership.bootstrap
        self._keep(membership)

    def keep_evictions(self, record: bytes) -> None:
        """Keep a newer list of evictions."""
        if record != self.membership.evictions or self._is_unwritten:
            self._keep(replace(self.membership, evictions=record))

    def keep_relocation(self, record: bytes, bootstrap: Sequence[str]) -> None:
        """Keep where the coordinator is, and the addresses of its node, which come first."""
        kept = self.membership.bootstrap
        if bootstrap:
            gone = set(self._own_bootstrap) - set(bootstrap)
            self._own_bootstrap = tuple(bootstrap)
            kept = addresses_to_keep(bootstrap, [a for a in kept if a not in gone], ())
        if record != self.membership.relocation or self._is_unwritten:
            self._keep(replace(self.membership, bootstrap=kept, relocation=record))

    def keep_addresses(self, known: Sequence[str]) -> None:
        """Keep addresses of other peers, for a start while the coordinator is away."""
        kept = self.membership.bootstrap
        keep = addresses_to_keep(self._own_bootstrap, kept, known)
        if set(keep) != set(kept):  # another order is not worth a write to disk
            self._keep(replace(self.membership, bootstrap=keep))

    def _keep(self, membership: Membership) -> None:
        """Keep it, with a full disk only in memory: the peer still hears of evictions."""
        self.membership = membership
        try:
            self._directory.remember(membership)
            self._is_unwritten = False
        except OSError as error:
            self._is_unwritten = True
            unwritten = notices.membership_unwritten(reason=str(error))
            self._show("warning", unwritten, key="the membership could not be stored")
