"""C7: keys that report ready and never answer stop every epoch, and the coordinator's tick."""

from __future__ import annotations

import asyncio
from pathlib import Path

from atoll.coordinator import heads
from atoll.coordinator.heads import AGAIN_S, CALLED_AT_ONCE, PATIENCE_S, Heads, PeerHead
from atoll.coordinator.invites import evict
from atoll.coordinator.kept_log import TICK_S
from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.run.status import PeerStatus
from atoll.dht.identity import Identity
from atoll.dht.testing.memory import run_virtual
from atoll.peer.recovery import ledger
from atoll.peer.recovery.ledger import LedgerHeads
from support import kit


def answer(peer_id: str) -> PeerHead:
    return PeerHead(
        peer_id=peer_id, incarnation="1", epoch=0, position=0, chain=b"c" * 32, epoch_record=b""
    )


class Peers:
    """Those whose name says so answer; the others are black holes."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def __call__(self, peer_id: str) -> PeerHead | None:
        self.calls.append(peer_id)
        if peer_id.startswith("fails"):
            raise KeyError(peer_id)
        if peer_id.startswith("other"):
            return answer("uninvited")
        await asyncio.sleep(0.1 if peer_id.startswith("here") else 1000.0)
        return answer(peer_id)


def test_a_black_hole_costs_the_others_their_answers_not() -> None:
    async def main() -> None:
        peers, loop = Peers(), asyncio.get_running_loop()
        asking, everybody = Heads(peers), ["fails", "here a", "here b", "hole", "other"]
        found = await asking.of(everybody, loop.time())
        assert [head.peer_id for head in found] == ["here a", "here b"]
        assert loop.time() == PATIENCE_S and sorted(peers.calls) == everybody
        for pause_s, silent in ((AGAIN_S, True), (AGAIN_S, False), (AGAIN_S, True)):
            await asyncio.sleep(pause_s + 0.1)
            calls = len(peers.calls)
            found = await asking.of(everybody, loop.time())
            assert [head.peer_id for head in found] == ["here a", "here b"]
            assert ("hole" in peers.calls[calls:]) == silent  # its pause doubles

    run_virtual(main())


def test_hundreds_of_black_holes_delay_a_peer_once() -> None:
    async def main() -> None:
        peers, loop = Peers(), asyncio.get_running_loop()
        asking = Heads(peers)
        holes = [f"hole {number:03}" for number in range(4 * CALLED_AT_ONCE)]
        everybody = [*holes, "here last"]  # in the order of PeerIDs, which an attacker can choose
        found: list[PeerHead] = []
        while not found:
            found = await asking.of(everybody, loop.time())
        assert loop.time() < 6 * PATIENCE_S
        more = [f"hole {number:03}" for number in range(4 * CALLED_AT_ONCE, 400)]
        for _ in range(5):
            calls = len(peers.calls)
            found = await asking.of([*holes, *more, "here last"], loop.time())
            assert [head.peer_id for head in found] == ["here last"]
            assert len(peers.calls) - calls <= CALLED_AT_ONCE
            await asyncio.sleep(heads.RENEW_S + 0.1)

    run_virtual(main())


def test_peers_that_answer_leave_room_for_new_ones() -> None:
    async def main() -> None:
        peers, loop = Peers(), asyncio.get_running_loop()
        asking = Heads(peers)
        crowd = [f"here {number:03}" for number in range(3 * CALLED_AT_ONCE)]
        for _ in range(4):
            await asking.of(crowd, loop.time())
        await asyncio.sleep(heads.RENEW_S + 0.1)  # all of the crowd are due again
        found = await asking.of([*crowd, "here new"], loop.time())
        assert "here new" in {head.peer_id for head in found}

    run_virtual(main())


class SlowRoster:
    """Its DHT does not answer."""

    async def peers(self) -> dict[str, object]:
        await asyncio.sleep(1000.0)
        return {}


def test_a_roster_that_does_not_answer_is_read_once_and_not_waited_for() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        asking = LedgerHeads(me="me", transport=None, roster=SlowRoster())  # type: ignore[arg-type]
        assert await asyncio.gather(asking._known(), asking._known()) == [{}, {}]
        assert loop.time() == ledger.READ_S

    run_virtual(main())


def test_evictions_do_not_wait_for_silent_peers(tmp_path: Path) -> None:
    async def main() -> None:
        folder, swarm = tmp_path / "run", kit.Swarm()
        async with kit.net(folder, swarm) as net:
            coordinator = net.up.coordinator
            never = asyncio.Event()

            async def ask(peer_id: str) -> PeerHead | None:
                await never.wait()
                return None

            coordinator.log.ask_head_with(ask)
            key = Identity.ephemeral()
            liar = CoordinatorClient(net.up.invite, key)
            net.stack.push_async_callback(liar.close)
            await liar.join()
            for index in range(3):
                client = net.client(index)
                await client.join()
                await client.heartbeat(swarm.status(index))
            status = PeerStatus(peer_id=key.peer_id, incarnation="1", state="ready")
            await liar.heartbeat(status)
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            await coordinator.tick()
            evict(folder, key.peer_id, at_s=coordinator.now_s())
            await coordinator.tick()
            assert coordinator.admission.is_evicted(key.peer_id)
            assert any("evicted" in event.text for event in coordinator.status().events)
            assert loop.time() - began_s < 2 * TICK_S + 2.0 < PATIENCE_S

    kit.run(main())
