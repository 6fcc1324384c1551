import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.optim.log.entry import MalformedRecord
from atoll.peer.pipeline.messages import (
    MAX_RETRY_MS,
    MAX_STAGES,
    OmitNote,
    PassAnswer,
    PassHeader,
    Payload,
    RecountNote,
    SettleNote,
    busy,
    check_header,
    decode_note,
    decode_tokens,
    encode_note,
    encode_tokens,
    payload_bytes,
    read_payload,
    refused,
)
from support.pipelines import GRADIENT, OUTPUT, ROWS, SEQUENCES, SHAPE, TOKENS, VOCAB, header

NAME = {"origin": "a0", "incarnation": "i0", "sequence": 3, "nonce": b"12345678"}
DIRECTIONS = [("forward", ()), ("evaluate", ()), ("backward", ("c0",)), ("evaluated", ("c0",))]


@pytest.mark.parametrize(("direction", "path"), DIRECTIONS)
def test_a_header_comes_back_as_it_was_sent(direction, path):
    sent = header(7, direction, path=path)
    check_header(sent, SHAPE)
    assert PassHeader.decode(sent.encode()) == sent


def test_a_pass_and_its_return_have_one_key():
    assert header(7, "forward").key == header(7, "backward", path=("c0",)).key
    assert header(7, "evaluate").key == header(7, "evaluated", path=("c0",)).key
    assert header(7, "forward").key != header(7, "evaluate").key


def test_the_longest_path_fits_into_a_header():
    path = tuple("P" * 125 + f"{i:03}" for i in range(MAX_STAGES))
    sent = header(2**62, "backward", path=path, origin="P" * 128, incarnation="i" * 32)
    assert PassHeader.decode(sent.encode()) == sent


@given(st.binary(max_size=300))
def test_random_bytes_are_no_header(data):
    with pytest.raises(MalformedRecord):
        PassHeader.decode(data)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_never_raises_another_error(at, value):
    data = bytearray(header().encode())
    data[at % len(data)] = value
    try:
        read = PassHeader.decode(bytes(data))
        check_header(read, SHAPE)
    except MalformedRecord:
        pass


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rows": ROWS + 2}, "at most 6 rows, got 8"),
        ({"rows": 5}, "got 5 in 2"),
        ({"sequences": 1}, "at most 3 tokens, got 6"),
        ({"width": 4}, "a width of 3, got 4"),
        ({"codec": "fp32"}, "the codec 'int8', got 'fp32'"),
        ({"path": ("b0",)}, "belong to returns alone"),
        ({"loss": 1.0}, "belong to returns alone"),
    ],
)
def test_a_header_of_another_shape_is_refused_and_named(wrong, said):
    with pytest.raises(MalformedRecord, match=said):
        check_header(header(**wrong), SHAPE)


def test_a_return_without_a_path_or_a_loss_is_refused():
    for wrong in ({"path": ()}, {"loss": None}):
        with pytest.raises(MalformedRecord, match="belong to returns"):
            check_header(header(0, "backward", **({"path": ("c0",)} | wrong)), SHAPE)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_refused(loss):
    sent = header(0, "backward", path=("c0",)).model_copy(update={"loss": loss})
    with pytest.raises(MalformedRecord, match="loss"):
        PassHeader.decode(sent.encode())


@pytest.mark.parametrize("field", ["rows", "sequences", "width", "remaining_ms"])
@pytest.mark.parametrize("value", [0, -1, 2**40])
def test_sizes_out_of_range_are_refused(field, value):
    sent = header().model_copy(update={field: value})
    with pytest.raises(MalformedRecord, match=field):
        PassHeader.decode(sent.encode())


def test_the_length_of_a_payload_follows_from_the_run():
    assert payload_bytes(header(), SHAPE) == OUTPUT.num_bytes
    assert payload_bytes(header(0, "backward", path=("c0",)), SHAPE) == GRADIENT.num_bytes
    assert payload_bytes(header(0, "evaluated", path=("c0",)), SHAPE) == 0


def test_a_payload_comes_back_in_its_parts():
    assert read_payload(header(), TOKENS + OUTPUT.frame, SHAPE) == OUTPUT
    back = header(0, "backward", path=("c0",))
    assert read_payload(back, bytearray(GRADIENT.frame), SHAPE) == GRADIENT


def test_a_payload_of_another_length_is_refused():
    with pytest.raises(MalformedRecord, match=f"of {OUTPUT.num_bytes} bytes"):
        read_payload(header(), TOKENS + OUTPUT.frame + b"x", SHAPE)


def test_a_flipped_bit_in_a_payload_is_refused():
    data = bytearray(TOKENS + OUTPUT.frame)
    data[-1] ^= 1
    with pytest.raises(MalformedRecord, match="SHA-256"):
        read_payload(header(), data, SHAPE)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1, -(2**31)])
def test_a_token_out_of_the_vocabulary_is_refused(token):
    tokens = np.zeros((SEQUENCES, ROWS // SEQUENCES + 1), dtype=np.int32)
    tokens[1, 2] = token
    payload = Payload.of(tokens.astype("<i4").tobytes(), OUTPUT.frame)
    with pytest.raises(MalformedRecord, match=f"from 0 to {VOCAB - 1}, got {token}"):
        read_payload(header(digest=payload.digest), payload.tokens + payload.frame, SHAPE)


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), st.integers(1, 4))
def test_tokens_are_exact(ids, sequences):
    tokens = np.array([ids] * sequences, dtype=np.int64)
    read = decode_tokens(encode_tokens(tokens), sequences, VOCAB)
    assert read.shape == tokens.shape and (read == tokens).all()


@pytest.mark.parametrize(
    "note",
    [
        OmitNote(**NAME, direction="forward", reason="late"),
        SettleNote(**NAME),
        RecountNote(**NAME, path=("c0", "b0")),
    ],
)
def test_notes_come_back_as_they_were_sent(note):
    assert decode_note(encode_note(note)) == note


@pytest.mark.parametrize("data", [b"", b"X", b"O", b"S\x80", b"R" + b"x" * 100_000])
def test_what_is_no_note_is_refused(data):
    with pytest.raises(MalformedRecord):
        decode_note(data)


def test_answers_come_back_as_they_were_sent():
    for answer in (busy(0.25), refused("stage"), PassAnswer(verdict="known")):
        assert PassAnswer.decode(answer.encode()) == answer
    assert busy(0.25).retry_ms == 250
    assert busy(1e9).retry_ms == MAX_RETRY_MS


def test_what_a_peer_keeps_of_a_pass_is_known_beforehand():
    frames = SHAPE.forward_bytes(ROWS, 3) + SHAPE.backward_bytes(ROWS, 3)
    assert SHAPE.held_bytes(ROWS, SEQUENCES) == 2 * frames + len(TOKENS)
