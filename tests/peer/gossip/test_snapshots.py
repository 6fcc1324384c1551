"""Test joiners: the states that they are lent, and their mass."""

import pytest
import torch

from atoll.compression.planes import pack
from atoll.coordinator.gossip import Model
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import Refused, TransportError
from atoll.optim.log.entry import LogError
from atoll.optim.state.outer_state import StateError
from atoll.peer.gossip.snapshots import LENT, ModelFetcher, fetch_state
from atoll.peer.rounds.messages import LeafRequest, SnapshotMeta
from support.crowd import LAYOUT, TOKENS, in_crowd, kept, spread


async def fetched(crowd, peer, **changes):
    stranger = crowd.network.transport(f"stranger-{crowd.now()}")
    values = {"layout": LAYOUT, "memory_numel": LAYOUT.numel} | changes
    return await fetch_state(
        stranger, peer.peer_id, values["layout"], values["memory_numel"], patience_s=5.0
    )


def test_a_state_arrives_as_it_was_sent():
    async def use(crowd):
        (peer,) = await crowd.start(1)
        await crowd.rounds(2)
        state = await fetched(crowd, peer)
        assert state.root() == peer.gossip.state.root()
        assert state.position == peer.position > 0

    in_crowd(use)


def test_a_state_that_was_lent_stays_while_its_owner_goes_on():
    """Fetch leaves two rounds after the digests; lending a third state ends the first loan."""

    async def use(crowd):
        (peer,) = await crowd.start(1)
        stranger = crowd.network.transport("stranger")
        lent = []
        for _ in range(LENT + 1):
            reply = await stranger.call(peer.peer_id, "gossip-snapshot", b"", timeout_s=5)
            lent.append(SnapshotMeta.decode(reply).position)
            before = peer.gossip.state
            await crowd.rounds(1)
        assert before.position == lent[-1]

        async def leaf(position):
            request = LeafRequest(position=position, start=0, stop=1)
            async with await stranger.open(peer.peer_id, "gossip-leaves", timeout_s=5) as stream:
                await stream.send(request.encode(), timeout_s=5)
                return await stream.recv(timeout_s=5)

        assert await leaf(lent[-1]) == pack(before.read_leaf(0))
        with pytest.raises(Refused, match=RefusalCode.NOT_HERE):
            await leaf(lent[0])
        with pytest.raises(Refused, match=RefusalCode.NOT_HERE):
            await leaf(10**6)

    in_crowd(use)


def test_a_joiner_counts_only_once_it_has_met_somebody():
    """It joins with another peer's state and no mass, so the mean is unchanged."""

    async def use(crowd):
        peers = await crowd.start(3)
        await crowd.rounds(4)
        joiner = crowd.add(state=await fetched(crowd, peers[0]), mass=0.0)
        mass, total_N = kept(crowd.peers)
        apart = spread(crowd.peers)
        await joiner.start()
        await crowd.until(lambda: joiner.met)
        await crowd.rounds(6)
        await crowd.until(lambda: all(p.gossip._peer.round is None for p in crowd.peers))
        after, after_N = kept(crowd.peers)
        assert after == pytest.approx(mass, rel=1e-12)
        assert (after_N - total_N).abs().max() < 2e-5
        assert joiner.gossip.mass > 0.3
        assert spread(crowd.peers) < apart / 4

    in_crowd(use, work=0.0)


def test_a_peer_that_starts_again_leaves_no_mass_behind():
    async def use(crowd):
        peers = await crowd.start(3)
        await crowd.rounds(3)
        mass, _ = kept(peers)
        peers[1].kill()
        state = await fetched(crowd, peers[0])
        again = crowd.add(1, state=state, mass=0.0)
        await again.start()
        await crowd.until(lambda: again.met)
        living = [peers[0], peers[2], again]
        assert kept(living)[0] == pytest.approx(mass - 1.0)

    in_crowd(use, work=0.0)


@pytest.mark.parametrize("harm", ["leaf", "digests", "nan"])
def test_a_state_that_is_wrong_is_not_taken(harm):
    async def use(crowd):
        (peer,) = await crowd.start(1)
        state = peer.gossip.state
        digests = state.leaves()
        if harm == "digests":
            digests = digests[:-1]
        if harm == "leaf":
            state.params_N[7] += 1.0  # after its digests were taken
        if harm == "nan":
            state.params_N[7] = torch.nan
            state._digests = None
            digests = state.leaves()
        meta = SnapshotMeta(position=state.position, leaves=b"".join(digests))

        async def lie(remote, body):
            peer.gossip._lender._keep(state)
            return meta.encode()

        peer.transport.serve("gossip-snapshot", lie)
        with pytest.raises((StateError, LogError)):
            await fetched(crowd, peer)

    in_crowd(use)


def test_a_donor_that_dies_in_the_middle_is_told_from_one_that_is_done():
    async def use(crowd):
        (peer,) = await crowd.start(1)
        crowd.network.on_message = lambda src, dst, method, n: (
            peer.kill() if method == "gossip-leaves" and src == peer.peer_id else None
        )
        with pytest.raises(TransportError):
            await fetched(crowd, peer)

    in_crowd(use)


def test_the_coordinator_gets_the_model_of_the_furthest_that_answers():
    async def use(crowd):
        peers = [crowd.add(window_s=window_s) for window_s in (5.0, 5.0, 9.0)]
        for peer in peers:
            await peer.start()
        await crowd.rounds(4)
        node = crowd.network.transport("coordinator")
        fetch = ModelFetcher(
            transport=node,
            roster=crowd.board.roster("coordinator"),
            layout=LAYOUT,
            memory_numel=LAYOUT.numel,
        )
        model = await fetch(3)
        assert isinstance(model, Model)
        owner = next(p for p in peers if p.peer_id == model.peer_id)
        assert model.state.root() == owner.gossip.state.root()
        assert await fetch(1000) is None
        owner.kill()
        model = await fetch(3)
        assert model.peer_id != owner.peer_id

    in_crowd(use)


def test_tokens_are_those_of_the_windows_that_count():
    async def use(crowd):
        peers = await crowd.start(2)
        await crowd.rounds(3)
        assert all(s.tokens == TOKENS for p in peers for s in p.settled)

    in_crowd(use)
