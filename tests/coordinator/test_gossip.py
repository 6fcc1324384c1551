"""A coordinator of a run by gossip: it begins the run, tells of rounds, and keeps one model."""

import asyncio
import contextlib

import pytest
import torch

from atoll.coordinator.checkpoints import load_checkpoint
from atoll.coordinator.gossip import Model, ModelKeeper, ReportedRounds, due_round
from atoll.coordinator.history import History
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.status import RoundReport
from atoll.coordinator.scrubbing import PASS_S
from atoll.coordinator.service.server import running
from atoll.optim.log.mending import reads_whole
from atoll.optim.state.outer_state import OuterState
from support.kit import LAYOUT, Net, Swarm, genesis, run

SPEC = RunSpec.from_dict(
    {
        "run": {"name": "talk", "rounds": 6},
        "outer": {"method": "noloco"},
        "round": {"min_peers": 2},
        "coordinator": {
            "listen": "127.0.0.1:0",
            "dht_listen": "127.0.0.1:0",
            "checkpoint_every": 2,
        },
    }
)


class Node:
    """A first DHT node of which peers give whatever `models` holds."""

    def __init__(self):
        self.addresses, self.models, self.asked = [], [], []

    def fetch_model(self, keeper):
        assert keeper.state.layout == LAYOUT

        async def fetch(at_least):
            self.asked.append(at_least)
            return self.models.pop(0) if self.models else None

        return fetch

    async def introduce(self, question):
        return b""

    def tell_place(self, place):
        """Nobody to tell."""

    async def direct_connections(self):
        return {}

    async def close(self):
        """Nothing to leave."""


def model(position, value=1.0):
    state = OuterState.genesis(LAYOUT, torch.full((LAYOUT.numel,), value)).at(position)
    return Model(state=state, peer_id="12D3KooWpeer")


@contextlib.asynccontextmanager
async def talk(folder, node):
    async def start_node(request):
        return node

    async with contextlib.AsyncExitStack() as stack:
        up = await stack.enter_async_context(running(SPEC, genesis, folder, start_node=start_node))
        yield Net(up=up, swarm=Swarm(), stack=stack)


async def tick_until(net, condition):
    for _ in range(200):
        await net.up.coordinator.tick()
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("expected it within 200 ticks")


@pytest.mark.parametrize(
    ("position", "kept", "every", "last", "due"),
    [
        (0, 0, 2, 0, None),
        (1, 0, 2, 0, None),
        (3, 0, 2, 0, 2),
        (3, 2, 2, 0, None),
        (9, 0, 0, 0, None),
        (9, 0, 0, 10, None),
        (10, 8, 4, 10, 10),
        (10, 0, 0, 10, 10),
        (10, 10, 4, 10, None),
    ],
)
def test_when_a_model_is_due(position, kept, every, last, due):
    assert due_round(position, kept, every=every, last=last) == due


def test_a_run_by_gossip_begins_with_enough_peers_and_opens_nothing_after(tmp_path):
    async def main():
        async with talk(tmp_path / "c", Node()) as net:
            clients = [net.client(0), net.client(1)]
            joined = await clients[0].join()
            assert joined.epoch == b""
            await clients[0].heartbeat(net.swarm.status(0))
            await net.up.coordinator.tick()
            assert net.up.coordinator.status().state == "waiting"
            await clients[1].join()
            beat = await clients[1].heartbeat(net.swarm.status(1))
            await net.up.coordinator.tick()
            beat = await clients[1].heartbeat(net.swarm.status(1))
            assert beat.epoch
            assert beat.publish_from is None
            assert net.up.coordinator.status().state == "training"
            net.up.coordinator._steady = lambda: 1e9  # an hour without progress
            await net.up.coordinator.tick()
            assert len(net.up.coordinator.log.replica.store.epochs()) == 1

    run(main())


def test_a_coordinator_that_lost_its_files_learns_from_those_that_train(tmp_path):
    """They began by the epoch that is lost; a newcomer would wait for it for ever."""

    async def main():
        async with talk(tmp_path / "c", Node()) as net:
            clients = [net.client(index) for index in range(3)]
            for index, state in enumerate(["training", "training", "ready"]):
                await clients[index].join()
                beat = await clients[index].heartbeat(net.swarm.status(index, state=state))
                assert not beat.epoch
            await net.up.coordinator.tick()
            beat = await clients[2].heartbeat(net.swarm.status(2))
            assert beat.epoch

    run(main())


@pytest.mark.parametrize("position", [0, 3])
def test_a_model_that_rots_is_stored_again_while_joiners_wait(tmp_path, position):
    async def main():
        async with talk(tmp_path / "c", Node()) as net:
            replica = net.up.coordinator.log.replica
            if position:
                await replica.change(lambda: replica.core.keep(model(position).state))
            state, client = replica.state, net.client(0)
            path = replica.store.snapshot(position).path
            path.write_bytes(b"rotten" + path.read_bytes()[6:])
            await client.join()
            assert not reads_whole(replica.store, position)
            for now_s in (1e9, 1e9 + PASS_S):
                net.up.coordinator._steady = lambda now_s=now_s: now_s
                await net.up.coordinator.tick()
                await net.up.coordinator.log._scrubbing.close()
            assert reads_whole(replica.store, position)
            snapshot = await client.fetch_snapshot()
            assert (snapshot.position, snapshot.root) == (position, state.root())
            status = net.up.coordinator.status()
            assert sum(event.code == "log.damaged" for event in status.events) == 1

    run(main())


def test_models_are_kept_as_checkpoints_and_given_to_joiners(tmp_path):
    node = Node()

    async def main():
        async with talk(tmp_path / "c", node) as net:
            clients = [net.client(0), net.client(1)]
            for index, client in enumerate(clients):
                await client.join()
                await client.heartbeat(net.swarm.status(index))
            await net.up.coordinator.tick()
            for index, client in enumerate(clients):
                status = net.swarm.status(index, position=3, partner="12D3KooWother")
                assert (await client.heartbeat(status)).publish_from is None
            node.models = [model(3)]
            coordinator = net.up.coordinator
            await tick_until(net, lambda: coordinator.log.replica.head.position == 3)
            assert node.asked[0] == 2
            status = coordinator.status()
            assert (status.position, status.peers[0].partner) == (3, "12D3KooWother")
            assert any("stored the model of" in event.text for event in status.events)
            snapshot = await clients[0].fetch_snapshot()
            assert (snapshot.position, snapshot.root) == (3, model(3).state.root())
            for index, client in enumerate(clients):
                await client.heartbeat(net.swarm.status(index, position=6))
            node.models = [model(6, 2.0)]
            coordinator.log._models._not_before_s = 0.0
            await tick_until(net, coordinator.finished.is_set)
            assert coordinator.status().state == "finished"
        kept = load_checkpoint(tmp_path / "c" / "checkpoints" / "talk-00000006.safetensors")
        assert kept.state.root() == model(6, 2.0).state.root()

    run(main())


def test_started_again_it_holds_the_same_model_and_the_run_has_begun(tmp_path):
    node = Node()

    async def first():
        async with talk(tmp_path / "c", node) as net:
            clients = [net.client(0), net.client(1)]
            for index, client in enumerate(clients):
                await client.join()
                await client.heartbeat(net.swarm.status(index))
            await net.up.coordinator.tick()
            replica = net.up.coordinator.log.replica
            assert isinstance(replica.core, ModelKeeper)
            await replica.change(lambda: replica.core.keep(model(4).state))

    async def second():
        async with talk(tmp_path / "c", node) as net:
            assert net.up.coordinator.log.replica.head.position == 4
            joined = await net.client(0).join()
            assert joined.epoch
            assert joined.head.position == 4

    run(first())
    run(second())


def test_rounds_are_summed_up_from_reports(tmp_path):
    history = History(tmp_path / "history.db")
    rounds = ReportedRounds(history, lambda: 3.5)

    def tell(peer, position, at_s, **changes):
        values = {"included": True, "loss": 2.0, "tokens": 100, "wire_bytes_sent": 7}
        rounds.trace(peer, RoundReport(position=position, **(values | changes)), at_s)

    tell("ann", 0, 10.0)
    tell("bob", 0, 11.0, loss=4.0, tokens=300)
    tell("ann", 2, 12.0)
    tell("bob", 1, 13.0, included=False, tokens=0, reasons={"ann": "is ahead"})
    newest = rounds.newest()
    assert [row.position for row in newest] == [1, 2, 3]
    assert (newest[0].loss, newest[0].members, newest[0].tokens) == (3.5, 2, 400)
    assert (newest[0].at, newest[0].wire_bytes, newest[0].valid_loss) == (10.0, 14, 3.5)
    assert (newest[1].members, newest[1].reasons) == (0, {"ann": "is ahead"})
    assert rounds.tokens_total == 500
    tell("eve", 10**6, 14.0)
    assert len(rounds.newest()) == 3
    again = ReportedRounds(history, lambda: None)
    assert again.tokens_total == 500
    assert [row.position for row in again.newest()] == [1, 2, 3]
    again.trace("late", RoundReport(position=0, included=True, tokens=100), 15.0)
    assert again.newest() == rounds.newest()
    history.close()
