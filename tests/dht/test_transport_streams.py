import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.dht.libp2p_stream import LibP2PStream
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import (
    FIRST_BYTES,
    HEADER_BYTES,
    MAX_ADMISSION_BYTES,
    MAX_CALL_BYTES,
    MAX_CODE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_METHOD_CHARS,
    MAX_OPEN_BYTES,
    SCRATCH_BYTES,
    Connection,
    FrameError,
    FrameReader,
    Mark,
    Refused,
    decode_open,
    decode_refusal,
    encode_open,
    encode_refusal,
)


class Sink:
    def __init__(self, limit=MAX_MESSAGE_BYTES):
        self.limit = limit
        self.frames = []
        self.claimed = 0

    def max_payload(self, mark):
        return self.limit

    def claim(self, num_bytes):
        self.claimed += num_bytes

    def release(self, num_bytes):
        self.claimed -= num_bytes

    def on_frame(self, mark, payload):
        self.frames.append((mark, payload))

    def on_writable(self):
        """Nobody writes."""

    def on_connection_lost(self, error):
        self.lost.set_result(error)


def frame(mark, payload=b""):
    return bytes([mark]) + len(payload).to_bytes(4) + payload


def push(reader, data):
    """Feed a reader as asyncio's buffered protocol does."""
    view = memoryview(data)
    while view:
        buffer = reader.get_buffer()
        size = min(len(buffer), len(view))
        buffer[:size] = view[:size]
        reader.updated(size)
        view = view[size:]


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 50), max_size=20))
def test_frames_come_whole_however_they_are_cut(payloads, cuts):
    sink = Sink()
    reader = FrameReader(sink)
    data = b"".join(frame(Mark.DATA, p) for p in payloads)
    for cut in cuts:
        push(reader, data[:cut])
        data = data[cut:]
    push(reader, data)
    assert sink.frames == [(Mark.DATA, p) for p in payloads]


@pytest.mark.parametrize("size", [SCRATCH_BYTES - 1, SCRATCH_BYTES, SCRATCH_BYTES + 1, 200_000])
def test_long_frames_go_straight_into_their_own_memory(size):
    sink = Sink()
    payload = bytes(i % 251 for i in range(size))
    push(FrameReader(sink), frame(Mark.DATA, payload) + frame(Mark.END) + frame(Mark.DATA, b"z"))
    assert sink.frames == [(Mark.DATA, payload), (Mark.END, b""), (Mark.DATA, b"z")]


def test_a_length_of_four_gigabytes_is_refused_before_memory_is_taken():
    with pytest.raises(FrameError, match="4294967295"):
        push(FrameReader(Sink()), bytes([Mark.DATA]) + b"\xff\xff\xff\xff")


def test_memory_follows_the_bytes_not_the_announced_length():
    sink = Sink(limit=3 << 20)
    reader = FrameReader(sink)
    push(reader, bytes([Mark.DATA]) + (3 << 20).to_bytes(4))
    assert sink.claimed == FIRST_BYTES
    payload = bytes(i % 251 for i in range(3 << 20))
    arrived = 0
    while arrived < len(payload):
        piece = payload[arrived : arrived + 10_000]
        push(reader, piece)
        arrived += len(piece)
        assert sink.claimed <= 2 * arrived + FIRST_BYTES
    assert sink.frames == [(Mark.DATA, payload)] and sink.claimed == 0


def test_half_a_frame_is_given_back_once_it_cannot_complete():
    sink = Sink()
    reader = FrameReader(sink)
    push(reader, bytes([Mark.DATA]) + (1 << 20).to_bytes(4) + b"x" * 100)
    assert sink.claimed == FIRST_BYTES
    reader.drop()
    reader.drop()
    assert sink.claimed == 0


def test_an_unknown_mark_is_refused():
    with pytest.raises(FrameError, match="mark 9"):
        push(FrameReader(Sink()), b"\x09\x00\x00\x00\x00")


@given(st.binary(max_size=200))
def test_hostile_frames_raise_nothing_else(data):
    try:
        push(FrameReader(Sink(limit=100)), data)
    except FrameError:
        pass


@given(st.binary(max_size=200))
def test_hostile_opens_raise_nothing_else(data):
    try:
        is_call, method, admission = decode_open(data)
    except FrameError:
        return
    assert encode_open(is_call=is_call, method=method, admission=admission) == data


@given(st.binary(max_size=200))
def test_hostile_refusals_become_printable(data):
    error = decode_refusal(data, "peer")
    assert isinstance(error.code, RefusalCode)
    assert error.message.isprintable()


@pytest.mark.parametrize("code", RefusalCode)
def test_refusals_round_trip(code):
    error = decode_refusal(encode_refusal(Refused(code, "round 12 closed")), "peer")
    assert (error.code, error.message, error.peer) == (code, "round 12 closed", "peer")


@pytest.mark.parametrize("word", [b"", b"late", b"internal-", b"\xff\x00", b"x" * 255])
def test_a_code_that_is_not_listed_becomes_unknown_and_stays_readable(word):
    error = decode_refusal(bytes([len(word)]) + word + b"round 12 closed", "peer")
    assert error.code is RefusalCode.UNKNOWN
    assert error.message.isprintable()
    assert error.message.endswith("round 12 closed")
    assert len(error.message) <= MAX_CODE_BYTES + len(": round 12 closed")
    again = decode_refusal(encode_refusal(error), "relay")
    assert (again.code, again.message) == (error.code, error.message)


def test_the_underscores_of_earlier_versions_are_read():
    payload = bytes([14]) + b"unknown_method" + b"nobody serves it"
    assert decode_refusal(payload, "peer").code is RefusalCode.UNKNOWN_METHOD


def test_a_refusal_of_no_bytes_is_unknown():
    assert decode_refusal(b"", "peer").code is RefusalCode.UNKNOWN


def test_refusals_are_cut():
    assert len(encode_refusal(Refused(RefusalCode.CLOSED, "x" * 9999))) <= 1024


def stream(admit=None, is_call=False):
    return LibP2PStream("peer", "m", is_call=is_call, admit=admit)


def in_loop(check):
    async def main():
        check()

    asyncio.run(main())


def test_only_open_may_come_first_and_only_once():
    def check():
        fresh = stream(admit=lambda s, a: True)
        for mark in (Mark.DATA, Mark.END, Mark.CLOSE, Mark.REFUSED):
            with pytest.raises(FrameError, match="out of turn"):
                fresh.max_payload(mark)
        assert fresh.max_payload(Mark.OPEN) == MAX_OPEN_BYTES
        fresh.on_frame(Mark.OPEN, encode_open(is_call=True, method="m", admission=b""))
        with pytest.raises(FrameError, match="out of turn"):
            fresh.max_payload(Mark.OPEN)
        assert fresh.max_payload(Mark.DATA) == MAX_CALL_BYTES

    in_loop(check)


def test_nothing_but_close_may_come_after_the_end():
    def check():
        s = stream()
        assert s.max_payload(Mark.DATA) == MAX_MESSAGE_BYTES
        s.on_frame(Mark.END, b"")
        with pytest.raises(FrameError, match="out of turn"):
            s.max_payload(Mark.DATA)
        assert s.max_payload(Mark.CLOSE) == 0
        s.on_frame(Mark.CLOSE, b"")
        with pytest.raises(FrameError, match="out of turn"):
            s.max_payload(Mark.CLOSE)

    in_loop(check)


def test_a_stranger_gets_no_memory_before_admission():
    def check():
        def refuse(stream, admission):
            stream.refuse(Refused(RefusalCode.NOT_ADMITTED, "no"))
            return False

        s = stream(admit=refuse)
        reader = s.connection._reader
        opening = frame(Mark.OPEN, encode_open(is_call=True, method="m", admission=b"forged"))
        push(reader, opening + bytes([Mark.DATA]) + (3 << 20).to_bytes(4) + bytes(100))
        assert not reader._pieces
        assert not s.opened.done()

    in_loop(check)


def test_endless_empty_messages_stop_the_reading():
    class Held:
        paused = False

        def is_closing(self):
            return False

        def pause_reading(self):
            self.paused = True

    def check():
        s = stream()
        s.connection._transport = Held()
        for _ in range(40_000):
            s.on_frame(Mark.DATA, b"")
        assert s.connection._transport.paused
        assert HEADER_BYTES * 40_000 == s.bytes_received

    in_loop(check)


def test_abort_after_a_close_that_still_had_bytes_to_send():
    async def scenario():
        near, far = socket.socketpair()
        near.setblocking(False)
        sink = Sink()
        sink.lost = asyncio.get_running_loop().create_future()
        _, connection = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Connection(sink), near
        )
        connection.write(Mark.DATA, bytes(MAX_MESSAGE_BYTES))
        connection.close()
        while await asyncio.to_thread(far.recv, 1 << 20):
            pass
        assert await sink.lost is None
        connection.abort()
        far.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("limit", [0, 1, 1000, MAX_MESSAGE_BYTES])
def test_a_frame_one_byte_longer_than_allowed_is_refused(limit):
    sink = Sink(limit)
    reader = FrameReader(sink)
    push(reader, bytes([Mark.DATA]) + limit.to_bytes(4))
    with pytest.raises(FrameError, match="at most"):
        push(FrameReader(sink), bytes([Mark.DATA]) + (limit + 1).to_bytes(4))


@pytest.mark.parametrize(
    "method", ["m" * (MAX_METHOD_CHARS + 1), "\x1b[2J", "a\nb"], ids=["long", "escape", "newline"]
)
def test_a_method_name_that_is_long_or_not_printable_is_refused(method):
    longest = encode_open(is_call=True, method="m" * MAX_METHOD_CHARS, admission=b"")
    assert decode_open(longest) == (True, "m" * MAX_METHOD_CHARS, b"")
    with pytest.raises(FrameError, match="method name"):
        decode_open(encode_open(is_call=True, method=method, admission=b""))


def test_an_admission_longer_than_allowed_is_refused():
    longest = encode_open(is_call=True, method="m", admission=b"x" * MAX_ADMISSION_BYTES)
    assert decode_open(longest) == (True, "m", b"x" * MAX_ADMISSION_BYTES)
    with pytest.raises(FrameError, match="admission of more than"):
        decode_open(longest + b"x")
