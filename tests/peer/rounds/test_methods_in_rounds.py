"""Every method with a log and every codec, reduced by real rounds on the network in memory."""

import pytest
import torch

from atoll.compression import parse
from atoll.compression.registry import names
from atoll.dht.testing.virtualtime import run_virtual
from atoll.optim.log.entry import Entry
from atoll.optim.reduction.lowrank import LowRankCells
from atoll.optim.state import mapped
from atoll.optim.state.layout import Layout
from atoll.optim.state.updates import dense
from support.swarm import Swarm

LAYOUT = Layout(
    names=("embed", "blocks.0.w", "blocks.0.b", "blocks.1.w", "blocks.1.b"),
    shapes=((300, 70), (64, 130), (130,), (64, 2_100), (33,)),
)
CODECS = (
    "fp32",
    "fp16",
    "bf16",
    "int8",
    "int8-dynamic",
    "int8-uniform",
    "int4",
    "fp4",
    "nf4",
    "2bit",
    "ternary",
    "ternary(block=4096, stochastic=False)",
    "sign",
    "topk+int8",
    "topk(k=64)+2bit",
    "randk",
    "randk(scaled=False)+int8",
    "dct",
    "powersgd",
    "lgreco",
    "mixed(*=int4)",
    "zstd(int8)",
    "zstd(topk+2bit)",
)
METHODS = (
    "diloco",
    "diloco(state=bf16)",
    "streaming(count=2, state=bf16)",
    "diloco(state=bf16, codec=powersgd(rank=1))",
    "streaming(count=2)",
    "eager",
    "co2",
    "muloco",
    "sparseloco",
    "sparseloco(average=all)",
    "sparseloco(merge=select)",
    "demo",
    "dlion",
    "ddp",
    "ddp(codec=int8, feedback=1, clip_norm=1)",
    "ddp(codec=powersgd(rank=2), clip_norm=1)",
    "diloco(codec=powersgd(rank=1))",
    "eager(codec=powersgd(rank=4, values=bf16))",
    "streaming(count=2, codec=powersgd)",
)

USUAL_CODECS = {"fp32", "int8", "2bit", "ternary", "topk+int8", "randk", "dct", "powersgd", "sign"}
USUAL_METHODS = {
    "streaming(count=2)",
    "eager",
    "co2",
    "muloco",
    "sparseloco",
    "sparseloco(merge=select)",
    "demo",
    "dlion",
    "ddp(codec=powersgd(rank=2), clip_norm=1)",
}
"""One of each kind of frame, and of each way to reduce; the others are exhaustive."""


def marked(specs, *, usual):
    return [
        spec if spec in usual else pytest.param(spec, marks=pytest.mark.exhaustive)
        for spec in specs
    ]


def play(folder, rounds, *, peers=3, on_round=None, **options):
    """Rounds of a swarm; what every entry's update is and what its members had to give."""
    decided = []

    async def scenario():
        swarm = Swarm(folder, layout=LAYOUT, **options)
        members = await swarm.start(peers)
        await swarm.until(lambda: all(p.replica.position >= rounds for p in members))
        assert swarm.same_bits(members)
        store = members[0].replica.store
        for record in store.headers(0, rounds):
            entry = Entry.decode(record.entry)
            assert len(entry.complete_members()) == peers
            update_F = dense(swarm.replay.decode(entry, store.body(entry.position)))
            given = [p.offers[entry.position] for p in members]
            decided.append((entry, update_F, torch.stack(given).mean(dim=0)))
        await swarm.stop()
        return swarm

    return run_virtual(scenario()), decided


def error(got, expected):
    return float((got - expected).norm() / expected.norm())


def test_the_list_of_codecs_is_complete():
    listed = {parse(spec).name for spec in CODECS}
    assert listed == {n for n in names() if n not in ("feedback", "mixed-layers")}


@pytest.mark.parametrize("codec", marked(CODECS, usual=USUAL_CODECS))
def test_every_codec_is_the_way_up_and_the_way_down(tmp_path, codec):
    swarm, decided = play(tmp_path, 2, codec=codec)
    cells = swarm.replay.cells_at(0)
    entry, update_F, mean_F = decided[0]
    if isinstance(cells, LowRankCells):  # whose factors nobody has alone
        assert error(update_F, mean_F) < 1.0
        return
    alone = [cells.decode_sent(i, f) for i, f in enumerate(cells.encode(mean_F))]
    if swarm.replay.method.codec.mode == "contractive":
        assert error(update_F, mean_F) <= 2 * error(torch.cat(alone), mean_F) + 1e-6
    assert bool(update_F.any())
    assert entry.body_bytes <= cells.max_body_bytes(members=3)


@pytest.mark.parametrize("method", marked(METHODS, usual=USUAL_METHODS))
def test_every_method_with_a_log_ends_in_the_same_bits(tmp_path, method):
    swarm, decided = play(tmp_path, 4, method=method, codec=None)
    turns = [swarm.replay.fragment_at(p) for p in range(4)]
    assert [entry.fragment for entry, _, _ in decided] == turns
    for entry, update_F, _ in decided:
        assert update_F.shape == (swarm.replay.fragments[entry.fragment].numel,)
        assert bool(update_F.any())


@pytest.mark.parametrize(
    "method", [pytest.param("ddp", marks=pytest.mark.exhaustive), "ddp(codec=powersgd(rank=2))"]
)
def test_a_joiner_takes_all_that_the_outer_step_remembers(tmp_path, method):
    async def scenario():
        swarm = Swarm(tmp_path, layout=LAYOUT, method=method, codec=None, body_budget_bytes=1)
        peers = await swarm.start(3)
        await swarm.until(lambda: all(p.replica.position >= 7 for p in peers))
        joiner = swarm.add()
        await joiner.start()
        assert joiner.recovered.snapshot_position >= 4
        await swarm.until(lambda: joiner.rounds.statistics().included >= 2)
        await swarm.until(lambda: len({p.replica.position for p in swarm.peers}) == 1)
        assert swarm.same_bits(swarm.peers)
        assert bool(joiner.replica.state.memory_M[LAYOUT.numel :].any())
        await swarm.stop()

    run_virtual(scenario())


@pytest.mark.parametrize(
    "method", ["diloco", "streaming(count=2, state=bf16)", "diloco(codec=dct)"]
)
def test_states_in_memory_and_on_a_disk_have_the_same_bits(tmp_path, method, monkeypatch):
    monkeypatch.setattr(mapped, "IN_MEMORY", ())  # the tests' folder may lie there
    made = []

    def empty(numel, dtype=torch.float32):
        made.append(numel)
        return mapped.MappedVectors(tmp_path / "mapped").empty(numel, dtype)

    async def scenario():
        swarm = Swarm(tmp_path, layout=LAYOUT, method=method, codec=None, body_budget_bytes=1)
        on_disk = swarm.add(allocate=empty)
        await swarm.begin([on_disk, swarm.add()])
        await swarm.until(lambda: all(p.replica.position >= 7 for p in swarm.peers))
        joiners = [swarm.add(allocate=empty), swarm.add()]
        for joiner in joiners:
            await joiner.start()
            assert joiner.recovered.snapshot_position >= 4
        await swarm.until(lambda: len({p.replica.position for p in swarm.peers}) == 1)
        assert swarm.same_bits(swarm.peers)
        await swarm.stop()

    run_virtual(scenario())
    assert len(made) > 4


def test_what_is_gathered_is_the_mean_of_what_was_sent(tmp_path):
    swarm, decided = play(tmp_path, 1, method="sparseloco(feedback=0, average=all)", codec=None)
    cells = swarm.replay.cells_at(0)
    store = swarm.peers[0].feedbacks[0]
    sent = []
    for peer in swarm.peers:
        offer = store.offer(peer.offers[0], 128.0)
        sent.append(torch.cat([cells.decode_sent(i, f) for i, f in enumerate(offer.frames)]))
    _, update_F, _ = decided[0]
    torch.testing.assert_close(update_F, torch.stack(sent).mean(dim=0), rtol=1e-5, atol=1e-8)


def test_a_gathered_update_holds_more_the_more_members_there_are(tmp_path):
    few, two = play(tmp_path / "2", 1, peers=2, method="sparseloco", codec=None)
    _, four = play(tmp_path / "4", 1, peers=4, method="sparseloco", codec=None)
    assert four[0][0].body_bytes > 1.9 * two[0][0].body_bytes
    assert int((four[0][1] != 0).sum()) > int((two[0][1] != 0).sum())
    dense = few.replay.cells_at(0)
    assert four[0][0].body_bytes < dense.max_body_bytes(members=5)


def test_a_selected_update_is_as_long_for_four_members_as_for_two(tmp_path):
    method = "sparseloco(merge=select)"
    _, two = play(tmp_path / "2", 1, peers=2, method=method, codec=None)
    _, four = play(tmp_path / "4", 1, peers=4, method=method, codec=None)
    assert four[0][0].body_bytes == two[0][0].body_bytes
