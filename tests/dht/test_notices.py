"""Notices between real p2pd processes, and what a stranger may cost."""

import asyncio
import socket
import struct

import pytest

from atoll.dht import notices
from atoll.dht.identity import Identity
from atoll.dht.notices import MAX_NOTICE_BYTES, NoticeBoard, read_notice
from atoll.dht.p2pd import P2pd, P2pdOptions
from atoll.dht.transport import PeerUnreachable

RUN = "ab" * 32
S = 5.0


def hold(use):
    """Run `use(board, node, reader)` with two daemons, of which one shows the board."""

    async def main():
        node, reader = [await P2pd.start(Identity.ephemeral(), P2pdOptions()) for _ in range(2)]
        board = NoticeBoard(RUN)
        try:
            await node.listen({board.protocol: board.accept})
            await reader.dial(node.peer_id, node.addresses, timeout_s=S)
            await use(board, node, reader)
        finally:
            await board.close()
            await reader.close()
            await node.close()

    asyncio.run(main())


def test_whoever_knows_the_run_reads_and_nobody_else():
    async def use(board, node, reader):
        with pytest.raises(PeerUnreachable, match="shows nothing"):
            await read_notice(reader, node.peer_id, RUN, timeout_s=S)
        for notice in (b"here", b"there" * 2000):
            board.show = lambda notice=notice: notice
            assert await read_notice(reader, node.peer_id, RUN, timeout_s=S) == notice
        with pytest.raises(PeerUnreachable):
            await read_notice(reader, node.peer_id, "cd" * 32, timeout_s=S)
        board.show = lambda: bytes(MAX_NOTICE_BYTES + 1)
        with pytest.raises(PeerUnreachable, match=f"at most {MAX_NOTICE_BYTES}"):
            await read_notice(reader, node.peer_id, RUN, timeout_s=S)

    hold(use)


def test_strangers_who_ask_on_and_on_get_a_budget(monkeypatch):
    monkeypatch.setattr(notices, "BURST", 3.0)
    monkeypatch.setattr(notices, "PER_S", 0.0)

    async def main():
        board, got = NoticeBoard(RUN), []
        board.show = lambda: b"here"
        board._left = 3.0
        for _ in range(5):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            board.accept("stranger", ours)
            await asyncio.sleep(0)
            theirs.settimeout(S)
            await asyncio.sleep(0.01)
            got.append(theirs.recv(64))
            theirs.close()
        await board.close()
        assert got == [struct.pack(">I", 4) + b"here"] * 3 + [b""] * 2
        assert board.denied == 2

    asyncio.run(main())


def test_strangers_who_do_not_read_occupy_few_streams(monkeypatch):
    monkeypatch.setattr(notices, "SEND_S", 0.2)

    async def main():
        board = NoticeBoard(RUN)
        board.show = lambda: bytes(4 << 20)  # more than a socket takes
        pairs = [socket.socketpair() for _ in range(notices.AT_ONCE + 4)]
        for ours, _ in pairs:
            ours.setblocking(False)
            board.accept("stranger", ours)
        assert (board.denied, board._num_sending) == (4, notices.AT_ONCE)
        async with asyncio.timeout(10):
            while board._num_sending:
                await asyncio.sleep(0.05)
        assert all(ours.fileno() == -1 for ours, _ in pairs)
        for _, theirs in pairs:
            theirs.close()
        await board.close()

    asyncio.run(main())
