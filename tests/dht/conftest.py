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
