"""A log that grows, and replicas that follow it."""

from __future__ import annotations

import sqlite3
from collections import UserDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from atoll.coordinator.run.keys import RunKeys
from atoll.dht import verify
from atoll.optim.log.claims import Claim
from atoll.optim.log.entry import Entry, SignedRoot, genesis_chain, root_payload, verify_key
from atoll.optim.log.module import Module
from atoll.optim.log.replica import Replica
from atoll.optim.log.store import LogStore
from atoll.optim.methods import Method
from atoll.optim.state import vectors
from atoll.optim.state.outer_state import OuterState
from atoll.peer.rounds.messages import PROTOCOL, Decided, Head
from support import kit

RUN = b"r" * 32
EVERY = 2


def module(run_id: bytes = RUN, method: Method | None = None) -> Module:
    method = method or kit.SPEC.method()
    return Module(run_id=run_id, method=method, layout=kit.LAYOUT, snapshot_every=EVERY)


def open_replica(
    folder: Path,
    keys: RunKeys,
    *,
    is_ledger: bool = True,
    follows: bool = False,
    run_id: bytes = RUN,
    resumes: bool = True,
    method: Method | None = None,
    allocate: vectors.Allocate = vectors.empty,
    **store: Any,
) -> Replica:
    """A replica that holds the first state, or what is stored in the folder, if it resumes."""
    genesis = kit.genesis()
    if method is not None:
        genesis = method.genesis(kit.LAYOUT, genesis.params_N)
    chain = genesis_chain(run_id, genesis.root())
    replica = Replica(
        module(run_id, method),
        LogStore(folder, run_id=run_id, genesis_chain=chain, **store),
        verify=verify,
        verify_run=partial(verify_key, keys.run_public_key),
        is_ledger=is_ledger,
        follows=follows,
        allocate=allocate,
    )
    if not replica.store.snapshot_positions():
        replica.store.save_snapshot(genesis, chain)
    assert not resumes or replica.resume()
    return replica


def take(replica: Replica, swarm: kit.Swarm, **changes: Any) -> Entry:
    """Let the swarm decide the next entry."""
    entry, body = swarm.entry(replica.run_id, replica.head, **changes)
    body = b"" if entry.kind == "null" else body
    replica.accept(replica.check(entry, swarm.certify(entry)), body)
    replica.save_due()
    return entry


class States(UserDict[int, OuterState]):
    """States by position, each a copy: a replica overwrites the one that it is given."""

    def __setitem__(self, position: int, state: OuterState) -> None:
        super().__setitem__(position, _copy(state))

    def __getitem__(self, position: int) -> OuterState:
        return _copy(super().__getitem__(position))


def _copy(state: OuterState) -> OuterState:
    return OuterState(
        layout=state.layout,
        position=state.position,
        params_N=state.params_N.clone(),
        memory_M=state.memory_M.clone(),
    )


class Log:
    """A log that grows; `whole` follows all of it."""

    def __init__(
        self, folder: Path, *, swarm: kit.Swarm, keys: RunKeys, run_id: bytes = RUN
    ) -> None:
        self.folder, self.swarm, self.keys, self.run_id = folder, swarm, keys, run_id
        self.whole = self.open("whole")
        self.whole.open_epoch(swarm.electors(), keys.sign)
        self.states = States({0: self.whole.state})
        self.entries: list[tuple[Claim, bytes]] = []

    def open(self, name: str, *, is_ledger: bool = True) -> Replica:
        return open_replica(self.folder / name, self.keys, is_ledger=is_ledger, run_id=self.run_id)

    def grow(self, count: int) -> None:
        for _ in range(count):
            head = self.whole.head
            certified = self.states.get(head.position - EVERY)
            root = None
            if head.position % EVERY == 0 and certified is not None:
                root = kit.root_at(certified.position, certified)
            entry, body = self.swarm.entry(self.run_id, head, state_root=root)
            claim = self.whole.check(entry, self.swarm.certify(entry))
            self.whole.accept(claim, body)
            self.whole.save_due()
            self.states[self.whole.position] = self.whole.state
            self.entries.append((claim, body))

    def signed_root(
        self, position: int, state: OuterState, keys: RunKeys | None = None
    ) -> SignedRoot:
        """A root as the run's key signs it, or another key."""
        chain = self.entries[position - 1][0].entry.chain
        payload = root_payload(self.run_id, position, chain, state.root())
        signature = (keys or self.keys).sign(payload)
        return SignedRoot(position=position, chain=chain, root=state.root(), signature=signature)

    def claims(self, start: int = 0) -> list[Claim]:
        return [claim for claim, _ in self.entries[start:]]

    def records(self, start: int = 0) -> list[tuple[bytes, bytes]]:
        return encoded(self.claims(start))


def encoded(claims: Sequence[Claim]) -> list[tuple[bytes, bytes]]:
    return [(claim.entry.encode(), claim.certificate.encode()) for claim in claims]


def flip(folder: Path, table: str, column: str, where: str) -> None:
    """Flip one bit in the middle of a stored value."""
    with sqlite3.connect(folder / "log.sqlite") as db:
        query = f"SELECT {column} FROM {table} WHERE {where}"
        value = db.execute(query).fetchone()[0]
        if isinstance(value, int):
            changed: Any = value ^ 1
        else:
            raw = bytearray(value.encode() if isinstance(value, str) else value)
            raw[len(raw) // 2] ^= 0x10
            changed = bytes(raw)
        db.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (changed,))
    db.close()


class LogSource:
    """A peer that has all of a log, but no bodies before `first_body`."""

    def __init__(self, log: Log, *, name: str, first_body: int, snapshots: Sequence[int]) -> None:
        self.log, self.name, self.first_body, self.snapshots = log, name, first_body, snapshots

    async def head(self) -> Head:
        whole = self.log.whole
        return Head(
            protocol=PROTOCOL,
            epoch=whole.epoch,
            position=whole.position,
            chain=whole.chain,
            incarnation="1",
            role="trainer",
            ready_in_s=0.0,
            first_body=self.first_body,
            snapshots=tuple(self.snapshots),
            epoch_record=b"",
        )

    async def headers(self, start: int, stop: int) -> list[Decided]:
        records = self.log.records(start)[: stop - start]
        return [Decided(entry=entry, certificate=certificate) for entry, certificate in records]

    async def signed_root(self, position: int) -> SignedRoot | None:
        return None

    async def body(
        self, position: int, start: int, into: memoryview, *, gives_way: bool = False
    ) -> None:
        assert position >= self.first_body
        into[:] = self.log.entries[position][1][start : start + len(into)]

    async def leaf_digests(self, position: int, count: int) -> list[bytes]:
        return list(self.log.states[position].leaves())

    async def leaves(self, position: int, indices: Sequence[int]) -> Any:
        for index in indices:
            yield index, self.log.states[position].read_leaf(index)
