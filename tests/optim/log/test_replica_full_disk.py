"""A disk that takes nothing more ends its peer; the others go on without it."""

import sqlite3

import pytest

from atoll.dht.testing.memory import run_virtual
from support.swarm import Swarm


@pytest.mark.parametrize("what", ["append", "write_bodies", "write_snapshot"])
def test_the_peer_is_told_and_the_round_goes_on(tmp_path, monkeypatch, what):
    def full(*_, **__):
        raise sqlite3.OperationalError("database or disk is full")

    async def main():
        swarm = Swarm(tmp_path)
        try:
            peers = await swarm.start(3)
            struck, failures = peers[2], []
            struck.replica._on_failure = failures.append
            monkeypatch.setattr(struck.replica.store, what, full)
            await swarm.until(lambda: failures)
            position = peers[0].replica.position
            await swarm.until(lambda: peers[0].replica.position >= position + 3)
            assert {str(error) for error in failures} == {"database or disk is full"}
        finally:
            await swarm.stop()

    run_virtual(main())
