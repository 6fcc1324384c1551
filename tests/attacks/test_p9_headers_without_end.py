"""P9: a donor that claims to be far ahead, and sends entries for as long as anybody takes them."""

import asyncio

import pytest

from atoll.peer.rounds.fetching import MAX_SPAN, MAX_SPAN_BYTES
from atoll.peer.rounds.messages import MAX_SNAPSHOTS, Head
from support.greedy import forge_headers
from support.swarm import claim, reached, run_swarm


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_joiner_takes_one_page_of_what_it_cannot_verify(tmp_path, monkeypatch, large):
    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 3))
        liar = peers[3]
        claim(monkeypatch, liar, position=1 << 60)
        sent = forge_headers(monkeypatch, liar, large=large)
        joiner = swarm.add()
        await joiner.start()
        await swarm.until(lambda: joiner.replica.ready and reached([joiner], 4))
        assert sent[0] > 0
        assert sent[0] <= 2 * MAX_SPAN + 2
        assert sent[1] <= 2 * MAX_SPAN_BYTES + (4 << 20)  # what is under way counts too
        await swarm.until(lambda: reached([joiner], 6))

    run_swarm(tmp_path, scenario, codec="int8")


def test_a_peer_names_few_snapshots():
    head = {
        "protocol": 7,
        "epoch": 0,
        "position": 0,
        "chain": bytes(32),
        "incarnation": "1",
        "role": "trainer",
        "ready_in_s": 0.0,
        "first_body": 0,
        "epoch_record": b"",
    }
    Head(**head, snapshots=tuple(range(MAX_SNAPSHOTS)))
    with pytest.raises(ValueError, match="at most"):
        Head(**head, snapshots=tuple(range(MAX_SNAPSHOTS + 1)))


def test_donors_without_what_they_claim_do_not_hold_a_joiner(tmp_path, monkeypatch):
    """They answer at once, with nothing, each time."""

    async def scenario(swarm):
        peers = await swarm.start(4)
        await swarm.until(lambda: reached(peers, 3))
        asked = [0]

        async def headers(remote, stream):
            asked[0] += 1
            await stream.recv(timeout_s=5)

        for liar in peers[2:]:  # they confirm each other
            claim(monkeypatch, liar, position=1 << 60)
            liar.transport.serve_stream("headers", headers)
        joiner = swarm.add()
        await joiner.start()
        await swarm.until(lambda: joiner.replica.ready and reached([joiner], 4), timeout_s=30)
        leaps = joiner.replica.leaps
        await asyncio.sleep(60)
        assert joiner.replica.leaps == leaps  # no older snapshot was taken for it
        assert asked[0] <= 4  # each is left alone for twice as long each time

    run_swarm(tmp_path, scenario, codec="int8")
