"""A client of texts: equal to the gathered checkpoint, whatever becomes of its servers."""

import asyncio
import math
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from atoll.dht.testing.memory import MemoryNetwork
from atoll.peer.inference.client import MAX_MOVES, NoServer, RunTooFast
from atoll.peer.inference.messages import TEXT, Extend, Extended, pack, unpack
from atoll.peer.training.data.load import ByteTokenizer
from atoll.peer.training.sampling import Continuation, SamplingOptions
from support.live_texts import CONTEXT, continued

GREEDY = {"max_tokens": 8, "temperature": 0}
SAMPLED = {"max_tokens": 8, "temperature": 0.9, "seed": 3}
ALL_AT_4 = (4, 4, 4)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED, SAMPLED | {"top_k": 5, "seed": 9}])
def test_a_text_is_that_of_the_gathered_checkpoint(live, stages, options):
    async def use(live):
        text, read = await continued(live.client(), "def x", **options)
        assert text == stages.text(ALL_AT_4, "def x", **options)
        assert set(read) == {ALL_AT_4}

    live(use)


@pytest.mark.parametrize("prompt", ["", "a prompt that is longer than the context of the model"])
def test_the_window_moves_as_it_does_for_a_checkpoint(live, stages, prompt):
    options = {"max_tokens": CONTEXT + 5, "temperature": 0.8, "seed": 1}

    async def use(live):
        model = live.client()
        text, _ = await continued(model, prompt, **options)
        assert text == stages.text(ALL_AT_4, prompt, **options)
        # One session at each server, which begins again.
        begun = [each.server.statistics().begun for each in live.servers]
        assert begun == [1] * len(stages.spec.modules)

    live(use, each=1)


def test_a_token_costs_one_question_a_stage(live, stages):
    async def use(live):
        questions = Counter()

        def count(src, dst, method, n):
            if src == "client":
                questions[method] += 1

        live.network.on_message = count
        await continued(live.client(), "def", **GREEDY)
        assert set(questions.values()) == {GREEDY["max_tokens"]}

    live(use, each=1)


def test_stages_may_stand_at_different_rounds(live, stages):
    async def use(live):
        live.server("stage-2-a").position = 5
        text, read = await continued(live.client(), "def x", **SAMPLED)
        assert set(read) == {(4, 5, 4)}
        assert text == stages.text((4, 5, 4), "def x", **SAMPLED)

    live(use, each=1)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_server_that_dies_is_replaced(live, stages, stage):
    async def use(live):
        model = live.client()
        died = []

        def kill(number):
            if number == 5:
                died.append(model.servers[stage])
                live.network.kill(model.servers[stage])

        text, read = await continued(model, "def x", between=kill, **SAMPLED)
        assert text == stages.text(ALL_AT_4, "def x", **SAMPLED)
        assert set(read) == {ALL_AT_4}
        assert died[0] not in model.servers
        # Its replacement computed the text from the beginning; the other stages did nothing twice.
        rows = {each.name: each.server.statistics().rows for each in live.servers}
        others = [rows[name] for name in model.servers if name[:7] != died[0][:7]]
        assert set(others) == {len("def x") + SAMPLED["max_tokens"] - 1}
        assert rows[model.servers[stage]] == others[0]

    live(use)


def spoken(live, stages, fault, at, *, options, prompt="ab", each=2):
    """Generate with a fault at one message, and check the text; return how many there were."""
    counts = []

    async def use(live):
        def strike(src, dst, method, n):
            counts.append(n)
            return fault(live.network, src, dst) if len(counts) == at else None

        live.network.on_message = strike
        model = live.client()
        text, _ = await continued(model, prompt, **options)
        assert text == stages.text(ALL_AT_4, prompt, **options)

    live(use, each=each)
    return len(counts)


def drop(network, src, dst):
    return False


def reset(network, src, dst):
    network.reset(src, dst)


def kill(network, src, dst):
    network.kill(dst if src == "client" else src)


def freeze(network, src, dst):
    network.freeze(dst if src == "client" else src)


@pytest.mark.parametrize("fault", [drop, reset, kill, freeze])
def test_a_fault_at_any_message_changes_no_text(live, stages, fault):
    options = {"max_tokens": 4, "temperature": 0.9, "seed": 3}
    total = spoken(live, stages, drop, 0, options=options)
    assert total == 2 * len(stages.spec.modules) * options["max_tokens"]
    for at in range(1, total + 1):
        assert spoken(live, stages, fault, at, options=options) >= total - 1


@pytest.mark.parametrize("fault", [drop, reset])
def test_a_fault_in_a_prompt_of_several_pieces_changes_no_text(live, stages, fault, monkeypatch):
    monkeypatch.setattr("atoll.peer.inference.messages.PIECE_BYTES", 3 * 64)
    once = {
        "options": {"max_tokens": 2, "temperature": 0.9, "seed": 3},
        "prompt": "a long one",
        "each": 1,
    }
    total = spoken(live, stages, drop, 0, **once)
    assert total == 2 * len(stages.spec.modules) * (4 + 1)
    for at in range(1, total + 1):
        spoken(live, stages, fault, at, **once)


def test_a_lost_answer_of_the_only_server_is_asked_for_again(live, stages):
    async def use(live):
        numbers = []

        def lose(src, dst, method, n):
            numbers.append(n)
            if len(numbers) == 10:  # an answer of the second stage
                assert src == "stage-2-a"
                live.network.reset(src, dst)
                return False
            return None

        live.network.on_message = lose
        text, _ = await continued(live.client(), "ab", **SAMPLED)
        assert text == stages.text(ALL_AT_4, "ab", **SAMPLED)
        statistics = live.server("stage-2-a").server.statistics()
        assert (statistics.begun, statistics.rows) == (1, 2 + SAMPLED["max_tokens"] - 1)

    live(use, each=1)


def test_a_session_that_was_forgotten_is_rebuilt(live, stages):
    """A server answers with a gap, and gets again what it lacks."""

    async def use(live):
        def forget(number):
            if number == 4:
                sessions = live.server("stage-2-a").server._sessions
                for one in sessions:
                    sessions.failed(one, "failed")

        text, _ = await continued(live.client(), "ab", between=forget, **SAMPLED)
        assert text == stages.text(ALL_AT_4, "ab", **SAMPLED)
        assert live.server("stage-2-a").server.statistics().begun == 2

    live(use, each=1)


def test_a_text_goes_on_at_the_rounds_it_began_with(live, stages):
    async def use(live):
        def move(number):
            if number == 3:
                for each in live.servers:
                    each.position = 5

        text, read = await continued(live.client(), "def x", between=move, **SAMPLED)
        assert set(read) == {ALL_AT_4}
        assert text == stages.text(ALL_AT_4, "def x", **SAMPLED)

    live(use)


def test_a_text_that_is_left_behind_goes_on_at_the_newest_rounds(live, stages):
    """Each token is that of the checkpoint of the rounds that the client names."""

    async def use(live):
        model = live.client()

        def move(number):
            if number == 3:  # the server of the second stage dies, and the other one has moved on
                live.network.kill(model.servers[1])
                for each in live.servers:
                    each.position = 5

        text, read = await continued(model, "def x", between=move, **SAMPLED)
        assert read == [ALL_AT_4] * 3 + [(5, 5, 5)] * 5
        assert live.told("the run went on to its next round")
        whole = stages.text(ALL_AT_4, "def x", **SAMPLED)
        assert text[:3] == whole[:3]

    live(use)


def test_a_run_that_outruns_the_text_is_named(live, monkeypatch):
    """The one server of a stage has moved on before the second piece of the text comes."""
    monkeypatch.setattr("atoll.peer.inference.messages.PIECE_BYTES", 3 * 64)

    async def use(live):
        asked = []

        async def serve(client, body):
            question, _ = unpack(Extend, body)
            asked.append(question.position)
            if question.position is not None:
                return pack(Extended(verdict="moved", position=9))
            return await honest(client, body)

        server = live.server("stage-3-a")
        honest = server.server._serve
        live.network._peers["stage-3-a"].serve(f"{TEXT}@stage-3", serve)
        with pytest.raises(RunTooFast, match="atoll sample CHECKPOINT"):
            await continued(live.client(), "longer", **SAMPLED)
        assert asked == [None, 4] * MAX_MOVES

    live(use, each=1)


def test_a_stage_without_a_server_is_waited_for(live, stages):
    async def use(live):
        gone = live.server("stage-2-a")
        gone.here = False

        async def come_back():
            await asyncio.sleep(12.0)
            gone.here = True

        returning = asyncio.create_task(come_back())
        text, _ = await continued(live.client(wait_s=60.0), "ab", **SAMPLED)
        assert text == stages.text(ALL_AT_4, "ab", **SAMPLED)
        assert live.told("no peer of stage-2 is in the run; waiting up to 60 s for a server")
        assert asyncio.get_running_loop().time() > 12.0
        await returning

    live(use, each=1)


def test_the_wait_for_a_server_ends_with_the_reason(live):
    async def use(live):
        live.server("stage-2-a").here = False
        with pytest.raises(NoServer, match=r"no server of stage-2 within 5 s: no peer of stage-2"):
            await continued(live.client(wait_s=5.0), "ab", **SAMPLED)

    live(use, each=1)


def test_peers_that_serve_no_texts_are_named(live):
    async def use(live):
        server = live.server("stage-3-a")
        del live.network._peers["stage-3-a"]
        live.network.transport("stage-3-a")  # the same peer, without --serve
        assert server.here
        with pytest.raises(NoServer, match=r"1 serving no texts; .* start them with --serve"):
            await continued(live.client(wait_s=3.0), "ab", **SAMPLED)

    live(use, each=1)


# Servers that lie


def lie(live, name, change):
    """Let a server answer with what `change(answer, payload)` returns."""
    server = live.server(name)
    honest = server.server._serve

    async def serve(client, body):
        record, payload = unpack(Extended, await honest(client, body))
        return change(record, bytes(payload))

    live.network._peers[name].serve(f"{TEXT}@{server.module}", serve)


def with_number(value, record, payload):
    row = np.frombuffer(payload, "<f4").copy()
    row[-1] = value
    return pack(record, row.tobytes())


LIES = {
    "nan": (partial(with_number, math.nan), "not finite"),
    "infinity": (partial(with_number, math.inf), "not finite"),
    "shorter": (lambda record, payload: pack(record, payload[:-4]), "of another shape"),
    "longer": (lambda record, payload: pack(record, payload + bytes(4)), "of another shape"),
    "nothing": (lambda record, payload: pack(record), "of another shape"),
    "no record": (lambda record, payload: b"\xff" * 300, "that is none"),
    "rows": (
        lambda record, payload: pack(record.model_copy(update={"held": 9}), payload),
        "for another session",
    ),
    "moved": (lambda record, payload: pack(Extended(verdict="moved", position=9)), "not asked for"),
    "ahead": (lambda record, payload: pack(Extended(verdict="gap", held=9)), "cannot be"),
    "gaps": (lambda record, payload: pack(Extended(verdict="gap", held=0)), "cannot be"),
}


@pytest.mark.parametrize("kind", LIES)
@pytest.mark.parametrize("stage", ["stage-1", "stage-3"])
def test_a_false_answer_is_named_and_its_server_replaced(live, stages, kind, stage):
    change, told = LIES[kind]

    async def use(live):
        live.server(f"{stage}-b").tokens_per_s = 1e-3
        live.server(f"{stage}-c").here = False
        lie(live, f"{stage}-a", change)
        texts = set()
        for name in ("client", "another", "third"):  # one of them begins with the liar
            model = live.client(name=name)
            texts.add((await continued(model, "ab", **SAMPLED))[0])
            assert dict(zip(stages.spec.modules, model.servers, strict=True))[stage][-1] == "b"
        assert texts == {stages.text(ALL_AT_4, "ab", **SAMPLED)}
        assert live.told(told) and live.told(f"of {stage} gave an answer")

    live(use, each=3)


def test_an_answer_of_another_round_is_not_mixed_in(live, stages):
    async def use(live):
        model = live.client()
        begun = []

        def begin(number):
            if number == 3:
                begun.append(model.servers[1])
                lie(
                    live,
                    model.servers[1],
                    lambda record, payload: pack(
                        record.model_copy(update={"position": 9}), payload
                    ),
                )

        text, read = await continued(model, "ab", between=begin, **SAMPLED)
        assert text == stages.text(ALL_AT_4, "ab", **SAMPLED) and set(read) == {ALL_AT_4}
        assert model.servers[1] != begun[0] and live.told("for another session")

    live(use)


def test_a_busy_server_is_left_alone_and_not_banned(live, stages):
    async def use(live):
        answers = Counter()

        def busy_at_first(record, payload):
            answers["asked"] += 1
            if answers["asked"] <= 3:
                return pack(Extended(verdict="busy", retry_ms=200))
            return pack(record, payload)

        lie(live, "stage-2-a", busy_at_first)
        text, _ = await continued(live.client(wait_s=20.0), "ab", **SAMPLED)
        assert text == stages.text(ALL_AT_4, "ab", **SAMPLED)
        assert not live.told("asked no more")

    live(use, each=1)


def test_a_server_that_is_busy_in_the_middle_keeps_the_text(live, stages):
    async def use(live):
        asked = Counter()

        async def serve(client, body):
            question, _ = unpack(Extend, body)
            asked[question.start] += 1
            if question.start == 4 and asked[4] <= 3:
                return pack(Extended(verdict="busy", retry_ms=500))
            return await honest(client, body)

        server = live.server("stage-2-a")
        honest = server.server._serve
        live.network._peers["stage-2-a"].serve(f"{TEXT}@stage-2", serve)
        text, _ = await continued(live.client(), "ab", **SAMPLED)
        assert text == stages.text(ALL_AT_4, "ab", **SAMPLED)
        assert asked[4] == 4 and server.server.statistics().begun == 1

    live(use, each=1)


def test_long_texts_travel_in_pieces(live, stages, monkeypatch):
    monkeypatch.setattr("atoll.peer.inference.messages.PIECE_BYTES", 3 * 64)

    async def use(live):
        model = live.client()

        def kill_one(number):
            if number == 2:
                live.network.kill(model.servers[1])

        text, _ = await continued(model, "long prompt", between=kill_one, **SAMPLED)
        assert text == stages.text(ALL_AT_4, "long prompt", **SAMPLED)

    live(use)


@pytest.mark.parametrize("seed", range(12))
def test_kills_restarts_and_rounds_at_random_change_no_token(live, stages, seed):
    """Whatever happens, each token is that of the rounds which the client names."""
    rng = random.Random(seed)
    options = {"max_tokens": 20, "temperature": 0.9, "seed": seed}

    async def use(live):
        model = live.client(wait_s=300.0)

        def strike(number):
            what = rng.random()
            module = rng.choice(stages.spec.modules)
            if what < 0.2:
                server = rng.choice([each for each in live.servers if each.module == module])
                if server.here and sum(e.here for e in live.servers if e.module == module) > 1:
                    server.here = False
                    live.network.kill(server.name)
            elif what < 0.35:
                live.serve(f"{module}-{len(live.servers)}", module, position=newest[module])
            elif what < 0.5:
                newest[module] += 1
                for each in live.servers:
                    if each.module == module:
                        each.position = newest[module]

        newest = dict.fromkeys(stages.spec.modules, 4)
        text, read = await continued(model, "ab", between=strike, **options)
        check(stages, text, read, options)

    live(use, network=MemoryNetwork(random.Random(seed), latency_s=0.01, jitter_s=0.05))


def check(stages, text, read, options):
    """Draw each token again, from the checkpoint of the rounds that were named for it."""
    again = Continuation(ByteTokenizer(), "ab", SamplingOptions(**options))
    pieces = []
    for positions in read:
        with torch.no_grad():
            logits_1TV = stages.whole(positions)(torch.tensor([again.tokens[-CONTEXT:]]))
        pieces.append(again.take(logits_1TV[0, -1]))
    assert "".join(pieces) == text and again.is_over
