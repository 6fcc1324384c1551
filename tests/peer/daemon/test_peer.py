"""What a peer asks of its coordinator before it takes part in anything."""

import asyncio
import types

import grpc
import pytest

from atoll.coordinator.rpc.client import FetchedSnapshot
from atoll.coordinator.rpc.client_errors import Evicted, NotWelcome
from atoll.optim.log.entry import Elector
from support.environment import GENESIS, LAYOUT, environment

NO_SESSION = NotWelcome(grpc.StatusCode.UNAUTHENTICATED, "no current session; join first")
OUT = Evicted(grpc.StatusCode.ABORTED, "evicted")


class Coordinator:
    """The client of a coordinator that refuses calls until this peer has joined."""

    evictions = None

    def __init__(self, refusal):
        self.refusal, self.joins = refusal, 0

    async def join(self):
        self.joins += 1
        return types.SimpleNamespace(admission=b"new")

    async def fetch_snapshot(self, position):
        if not self.joins:
            raise self.refusal
        return FetchedSnapshot(
            position=0,
            chain=bytes(32),
            root=GENESIS.root(),
            leaf_digests=tuple(GENESIS.leaves()),
            layout=LAYOUT,
            first_body=0,
        )

    async def fetch_leaves(self, position):
        for index in range(len(GENESIS.leaves())):
            yield index, bytes(GENESIS.leaf(index))


def fetch_from(client):
    env = environment(
        Elector(peer_id="ann", incarnation="1"),
        client=client,
        enrolment=types.SimpleNamespace(renew=lambda joined, client: None),
    )
    return asyncio.run(env.fetch_state(LAYOUT.numel, 0)), env


def test_whoever_waited_longer_than_a_session_joins_again():
    client = Coordinator(NO_SESSION)
    state, env = fetch_from(client)
    assert state.root() == GENESIS.root()
    assert client.joins == 1
    assert env.node.transport.admission == b"new"


def test_an_evicted_peer_is_told_and_joins_no_more():
    client = Coordinator(OUT)
    with pytest.raises(Evicted):
        fetch_from(client)
    assert client.joins == 0
