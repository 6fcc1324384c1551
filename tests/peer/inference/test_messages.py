import pytest

from atoll.optim.log.entry import MalformedRecord
from atoll.peer.inference.messages import (
    MAX_ROWS,
    PIECE_BYTES,
    TEXT_PROTOCOL,
    Extend,
    Extended,
    TextShape,
    expect_length,
    pack,
    refusal_of,
    unpack,
)

SHAPE = TextShape(
    is_first=False, is_last=False, width=16, vocab_size=256, num_logits=256, max_rows=32
)


def question(**changes):
    fields = {
        "protocol": TEXT_PROTOCOL,
        "session": bytes(16),
        "position": None,
        "start": 0,
        "rows": 4,
        "max_rows": 32,
    }
    return Extend(**fields | changes)


def test_a_message_is_record_and_payload():
    record, payload = unpack(Extend, pack(question(start=3), b"abc"))
    assert record == question(start=3) and bytes(payload) == b"abc"
    answer, payload = unpack(Extended, pack(Extended(verdict="busy", retry_ms=500)))
    assert (answer.verdict, answer.retry_ms, bytes(payload)) == ("busy", 500, b"")


@pytest.mark.parametrize(
    "message",
    [b"", b"\0", b"\xff\xff" + bytes(40), b"\0\4abcd", pack(Extended(verdict="gap"))[:-1]],
)
def test_what_is_no_message_is_refused(message):
    with pytest.raises(MalformedRecord):
        unpack(Extended, message)


def test_a_record_longer_than_any_is_not_parsed():
    with pytest.raises(MalformedRecord, match="at most 256 bytes"):
        unpack(Extend, b"\2\0" + bytes(512))


@pytest.mark.parametrize(
    "changes",
    [
        {"session": bytes(15)},
        {"session": bytes(17)},
        {"start": -1},
        {"rows": 0},
        {"rows": MAX_ROWS + 1},
        {"max_rows": 1 << 40},
        {"position": -1},
    ],
)
def test_numbers_out_of_range_make_no_question(changes):
    with pytest.raises(ValueError):
        question(**changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"start": 28}, None),
        ({"protocol": TEXT_PROTOCOL + 1}, "protocol"),
        ({"start": 29}, "shape"),
        ({"max_rows": 33}, "shape"),
        ({"max_rows": 3}, "shape"),
        ({"rows": PIECE_BYTES // 64 + 1, "max_rows": MAX_ROWS}, "shape"),
    ],
)
def test_a_question_is_compared_with_the_run(changes, reason):
    assert refusal_of(question(**changes), SHAPE) == reason


def test_lengths_follow_from_rows_and_stage():
    first = TextShape(**vars(SHAPE) | {"is_first": True})
    last = TextShape(**vars(SHAPE) | {"is_last": True})
    assert [each.input_bytes(3) for each in (first, SHAPE, last)] == [12, 192, 192]
    assert [each.output_bytes(3) for each in (first, SHAPE, last)] == [192, 192, 1024]
    assert SHAPE.piece_rows * SHAPE.row_bytes <= PIECE_BYTES
    assert TextShape(**vars(SHAPE) | {"width": 1 << 20}).piece_rows == 1
    expect_length(memoryview(bytes(5)), 5)
    with pytest.raises(MalformedRecord, match="expected a payload of 4 bytes, got 5"):
        expect_length(memoryview(bytes(5)), 4)
