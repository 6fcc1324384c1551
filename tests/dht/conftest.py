import asyncio

import pytest


@pytest.fixture
def run():
    """Runs one coroutine in a real loop, with a deadline for the whole test."""

    def runner(main, timeout_s=30):
        async def bounded():
            async with asyncio.timeout(timeout_s):
                return await main

        return asyncio.run(bounded())

    return runner


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    """Three nodes that live as long as a module."""
    from support.nodes import Swarm  # takes hivemind along, which most tests here do without

    swarm = Swarm()
    try:
        swarm.run(swarm.grow(tmp_path_factory.mktemp("node") / "key"))
        yield swarm
    finally:
        swarm.run(swarm.close())
        swarm.runner.close()


@pytest.fixture
def a(swarm):
    return swarm.nodes[0]


@pytest.fixture
def b(swarm):
    return swarm.nodes[1]
