"""A network in memory with servers of texts, and clients of theirs."""

import pytest

from atoll.dht.tasks import KeptTasks
from atoll.dht.testing.memory import MemoryNetwork
from atoll.dht.testing.virtualtime import run_virtual
from support import live_texts
from support.live_texts import Server, Stages


class Live:
    """Servers of all stages, and what the client was told."""

    def __init__(self, network, tasks, stages):
        self.network, self.tasks, self.stages = network, tasks, stages
        self.servers, self.said = [], []

    def serve(self, name, module, **options):
        self.servers.append(Server(self.network, self.tasks, self.stages, name, module, **options))
        return self.servers[-1]

    def server(self, name):
        return next(each for each in self.servers if each.name == name)

    def client(self, **options):
        return live_texts.client(self.network, self.servers, self.stages, said=self.said, **options)

    def told(self, text):
        return any(text in line for line in self.said)


@pytest.fixture(scope="session")
def stages():
    """A tiny model in three stages; its states at any position."""
    return Stages()


@pytest.fixture
def live(stages):
    """Runs a coroutine with servers of each stage, in virtual time."""

    def begin(use, *, each=2, stages=stages, network=None, **options):
        async def main():
            net = network or MemoryNetwork(latency_s=0.01)
            async with KeptTasks(lambda text: None) as tasks:
                made = Live(net, tasks, stages)
                for module in stages.spec.modules:
                    for index in range(each):
                        made.serve(f"{module}-{'abc'[index]}", module, **options)
                await use(made)
                assert net.errors == []

        run_virtual(main())

    return begin
