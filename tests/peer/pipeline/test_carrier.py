"""Hops of two stages over a network in memory, with a trainer that computes nothing."""

import asyncio
from dataclasses import replace
from itertools import groupby

import pytest

from atoll.dht.refusals import RefusalCode
from atoll.dht.roster import StagePlace
from atoll.dht.transport import Refused, StreamEnd
from atoll.peer.pipeline.carrier import NOTE, PASS, PIECE_BYTES, Carrier
from atoll.peer.pipeline.messages import (
    ACCEPTED,
    PIPELINE_PROTOCOL,
    PassHeader,
    Payload,
    refused,
)
from support.carried import INCARNATION, LENGTH, LIFETIME_S, WIDTH, record, until, with_members


def test_microbatches_go_there_and_back():
    async def use(network, first, last):
        first.carrier.look([record(last)])
        await until(lambda: len(first.ends) == 4)
        assert [end.loss for end in first.ends] == [0.0, 1.0, 2.0, 3.0]
        assert first.steps == last.steps == [2, 2]
        assert first.jobs == {"begin": 4, "backward": 4} and last.jobs == {"loss": 4}

    with_members(use, "last")


def test_a_frame_of_several_messages_arrives_whole():
    async def use(network, first, last):
        first.most = last.most = 2
        first.carrier.look([record(last)])
        await until(lambda: len(first.ends) == 2)
        assert [end.omission for end in first.ends] == [None, None]

    with_members(use, "last", width=300_000)  # 2.4 MB


def test_a_peer_that_dies_is_replaced():
    async def use(network, first, one, other):
        first.most = one.most = other.most = 8
        first.carrier.look([record(one), record(other)])
        await until(lambda: len(first.ends) >= 2)
        network.kill("one")
        await until(lambda: len(first.ends) == 8)
        assert all(end.omission is None for end in first.ends)
        assert other.jobs["loss"] >= 3

    with_members(use, "one", "other")


def test_without_a_next_stage_nothing_is_lost_before_its_time():
    async def use(network, first, last):
        await until(lambda: first.began == 2)
        assert first.ends == []
        first.carrier.look([record(last)])
        await until(lambda: len(first.ends) == 4)
        assert all(end.omission is None for end in first.ends)

    with_members(use, "last")


def header(**changes):
    payload = Payload.of(bytes(4 * (LENGTH + 1)), bytes(LENGTH * WIDTH))
    values = {
        "protocol": PIPELINE_PROTOCOL,
        "direction": "forward",
        "stage": 1,
        "origin": "stranger",
        "incarnation": INCARNATION,
        "sequence": 0,
        "nonce": b"n" * 8,
        "remaining_ms": 5000,
        "sequences": 1,
        "rows": LENGTH,
        "width": WIDTH,
        "codec": "int8",
        "digest": payload.digest,
        "path": (),
        "loss": None,
    }
    return PassHeader(**{**values, **changes}), payload


@pytest.mark.parametrize("message", [b"", b"rubbish", b"\xff" * 2000])
def test_bytes_that_are_no_header_are_refused(message):
    async def use(network, first, last):
        stranger = network.transport("stranger")
        async with await stranger.open("last", PASS, timeout_s=1) as stream:
            await stream.send(message, timeout_s=1)
            with pytest.raises(Refused) as refused:
                await stream.recv(timeout_s=5)
        assert refused.value.code == RefusalCode.BAD_MESSAGE
        with pytest.raises(Refused):
            await stranger.call("last", NOTE, message, timeout_s=1)
        assert last.hop.statistics().remembered == 0

    with_members(use, "last")


@pytest.mark.parametrize(
    ("damage", "told"),
    [("longer", "expected a payload of"), ("shorter", "expected a payload of"), ("other", None)],
)
def test_a_payload_that_does_not_fit_its_header_is_refused(damage, told):
    async def use(network, first, last):
        stranger = network.transport("stranger")
        announced, payload = header()
        data = payload.tokens + payload.frame
        sent = {"longer": data + b"x", "shorter": data[:-1], "other": data[:-1] + b"x"}[damage]
        async with await stranger.open("last", PASS, timeout_s=1) as stream:
            await stream.send(announced.encode(), timeout_s=1)
            assert b"accepted" in await stream.recv(timeout_s=5)
            with pytest.raises(Refused, match=told):
                await stream.send(sent, timeout_s=1)
                await stream.end(timeout_s=1)
                await stream.recv(timeout_s=30)
        assert last.jobs == {}
        assert last.hop.statistics().in_flight == 0

    with_members(use, "last")


def test_a_length_beyond_the_runs_is_refused_unread():
    async def use(network, first, last):
        stranger = network.transport("stranger")
        announced, _ = header(rows=2**30, sequences=2**27)
        async with await stranger.open("last", PASS, timeout_s=1) as stream:
            await stream.send(announced.encode(), timeout_s=1)
            answer = await stream.recv(timeout_s=5)
        assert b"refused" in answer and b"shape" in answer
        assert last.hop.statistics().held_bytes == 0

    with_members(use, "last")


def test_another_shape_is_told_once_with_both_sides(monkeypatch):
    async def use(network, first, last):
        stranger = network.transport("a-stranger")
        announced, _ = header(width=WIDTH + 1)
        for _ in range(2):
            async with await stranger.open("last", PASS, timeout_s=1) as stream:
                await stream.send(announced.encode(), timeout_s=1)
                assert b"shape" in await stream.recv(timeout_s=5)
        expected = "expected a width of 16, got 17"
        assert last.said == [f"warning: ranger announces another shape: {expected}"]

    with_members(use, "last")


def test_ids_out_of_the_vocabulary_are_told_with_their_sender():
    async def use(network, first, last):
        stranger = network.transport("a-stranger")
        payload = Payload.of(b"\xff" * 4 * (LENGTH + 1), bytes(LENGTH * WIDTH))
        announced, _ = header(digest=payload.digest, origin="a-stranger")
        async with await stranger.open("last", PASS, timeout_s=1) as stream:
            await stream.send(announced.encode(), timeout_s=1)
            assert b"accepted" in await stream.recv(timeout_s=5)
            with pytest.raises(Refused):
                await stream.send(payload.tokens + payload.frame, timeout_s=1)
                await stream.recv(timeout_s=30)
        (told,) = last.said
        assert "ranger sends what cannot be used: expected ids from 0 to 255, got -1" in told
        assert "(a microbatch of ranger)" in told

    with_members(use, "last")


def test_a_peer_that_is_refused_is_told_why():
    async def use(network, first, last):
        last.hop._flow.intake.answer = lambda *given: refused("shape")
        first.carrier.look([record(last)])
        await until(lambda: first.said)
        assert first.said == ["warning: last refuses what this peer sends, as of another shape"]

    with_members(use, "last")


@pytest.mark.parametrize("kind", ["loss", "backward"])
def test_numbers_that_are_not_finite_are_told_with_sender_and_origin(kind):
    async def use(network, first, last):
        does = {"loss": last, "backward": first}[kind]
        honest = does.do

        def refuses(job):
            if job.kind == kind:
                does.bench.report("job_refused", job.key, sender=job.sender, text="got a scale NaN")
            else:
                honest(job)

        does.do = refuses
        first.carrier.look([record(last)])
        await until(lambda: len(first.ends) == 4)
        sender = {"loss": "first", "backward": "last"}[kind]
        text = f"{sender} sends what cannot be used: got a scale NaN (a microbatch of first)"
        assert does.said == [f"warning: {text}"]  # once
        assert does.hop.statistics().omitted == {"failed": 4}

    with_members(use, "last")


def test_a_payload_that_trickles_is_cut_off():
    async def use(network, first, last):
        stranger = network.transport("stranger")
        announced, payload = header()
        async with await stranger.open("last", PASS, timeout_s=1) as stream:
            await stream.send(announced.encode(), timeout_s=1)
            assert b"accepted" in await stream.recv(timeout_s=5)
            sent = 0
            with pytest.raises(Refused, match="too long"):
                while sent < len(payload.tokens):
                    await stream.send(payload.tokens[sent : sent + 1], timeout_s=5)
                    sent += 1
                    await asyncio.sleep(1.0)  # each byte well within the time for a message
                await stream.recv(timeout_s=5)
        assert sent <= last.hop.arrival_s + 1
        assert last.hop.statistics().in_flight == 0

    with_members(use, "last")


def test_a_peer_that_reads_slowly_keeps_no_payload_beyond_its_time(monkeypatch):
    took_s, honest = [], Carrier._sent

    async def timed(self, send, remaining_ms):
        began_s = asyncio.get_running_loop().time()
        try:
            return await honest(self, send, remaining_ms)
        finally:
            took_s.append(asyncio.get_running_loop().time() - began_s)

    monkeypatch.setattr(Carrier, "_sent", timed)

    async def use(network, first):
        async def reads_slowly(remote, stream):
            await stream.recv(timeout_s=5)
            await stream.send(ACCEPTED.encode(), timeout_s=5)
            while await stream.recv(timeout_s=60) is not None:
                await asyncio.sleep(9.0)

        network.transport("slow").serve_stream(PASS, reads_slowly)
        first.most = 1
        first.carrier.look([record(first, "slow")])
        await until(lambda: first.ends)
        assert first.ends[0].omission == "late"
        await until(lambda: took_s, limit_s=200)
        assert max(took_s) <= LIFETIME_S

    with_members(use, width=2_000_000)  # 16 MB, a message each 9 s


def test_a_peer_that_leaves_has_told_its_senders_when_its_tasks_end():
    async def use(network, first, last):
        last.do = lambda job: None  # its trainer has two jobs, and ends none
        first.carrier.look([record(last)])
        first.bench.report("evaluate", 2)
        await until(lambda: last.hop.statistics().in_flight == 4)
        await last.carrier.withdraw()
        assert last.hop.statistics().omitted == {"withdrawn": 2}
        assert [end.omission for end in first.ends] == ["no-peer", "no-peer"]

    with_members(use, "last")


def test_what_a_peer_has_that_is_about_to_move_is_not_sent_again():
    async def use(network, first, last, other):
        does, kept = last.do, []
        last.do = kept.append
        first.carrier.look([record(last)])
        await until(lambda: last.hop.statistics().in_flight == 2)
        first.carrier.look([record(other)], leaving=[record(last)])
        await asyncio.sleep(1.0)
        for job in kept:
            does(job)
        await until(lambda: len(first.ends) == 4)
        assert all(end.omission is None for end in first.ends)
        assert last.jobs["loss"] == other.jobs["loss"] == 2
        assert first.hop.statistics().resends == 0

    with_members(use, "last", "other")


def test_what_a_mover_had_is_sent_again_once_it_is_gone():
    async def use(network, first, last, other):
        last.do = lambda job: None
        first.carrier.look([record(last)])
        await until(lambda: last.hop.statistics().in_flight == 2)
        first.carrier.look([record(other)], leaving=[record(last)])
        first.carrier.look([record(other)])
        await until(lambda: len(first.ends) == 4)
        assert all(end.omission is None for end in first.ends)
        assert other.jobs["loss"] == 4 and first.hop.statistics().resends == 2

    with_members(use, "last", "other")


def test_a_result_that_the_hop_cannot_take_ends_its_job_alone():
    async def use(network, first, last):
        honest, failures = first.hop.began, []

        def began(key, **named):
            if not failures:
                failures.append(key)
                raise ValueError("no such number")
            return honest(key, **named)

        first.hop.began = began
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        first.most = last.most = 5
        first.carrier.look([record(last)])
        await until(lambda: len(first.ends) == 5)
        assert [end.omission for end in first.ends].count("failed") == 1
        assert first.hop.statistics().omitted == {"failed": 1}

    with_members(use, "last")


def test_peers_are_drawn_by_what_they_can_do_and_not_by_what_came():
    async def use(network, first, last):
        rates = []
        first.hop.appeared = lambda peer, **named: rates.append(named["rows_per_s"]) or []
        came = replace(record(last), tokens_per_s=9.0)
        first.carrier.look([came])
        first.carrier.look([replace(came, place=StagePlace(tokens_per_s=70.0))])
        assert rates == [None, 70.0]

    with_members(use, "last")


def test_payloads_for_one_peer_leave_one_after_the_other(monkeypatch):
    streams, honest = [], StreamEnd.send

    async def noted(self, data, *, timeout_s):
        if len(data) == PIECE_BYTES:
            streams.append((self.remote, id(self)))
            await asyncio.sleep(0.01)
        await honest(self, data, timeout_s=timeout_s)

    monkeypatch.setattr(StreamEnd, "send", noted)

    async def use(network, first, last):
        first.carrier.look([record(last)])
        await until(lambda: len(first.ends) == 4)
        outputs = [each for each in streams if each[0] == "last"]
        assert len(outputs) == 4 * 6
        assert len(list(groupby(outputs))) == 4

    with_members(use, "last", width=50_000)
