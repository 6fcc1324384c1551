"""Rounds in which each layer has a codec of its own."""

import pytest
import torch

from atoll.compression import CodecError, parse
from atoll.dht.testing.virtualtime import run_virtual
from atoll.optim.log.entry import Entry
from atoll.optim.log.replay import Replay
from atoll.optim.methods import parse as parse_method
from atoll.optim.reduction.cells import unpack
from atoll.optim.state.layout import Layout
from atoll.optim.state.pieces import codec_of
from support.swarm import Swarm

LAYOUT = Layout(
    names=("embed", "blocks.0.w", "blocks.0.norm", "blocks.1.w", "blocks.1.norm"),
    shapes=((300, 70), (64, 130), (130,), (640, 2_100), (33,)),
)
MIXED = "mixed(embed=int8, *norm=fp32, blocks.1.*=topk(k=64)+int4, *=int4)"
CODECS = ("int8", "int4", "fp32", "topk(k=64)+int4", "fp32")  # of the layers, in order


def play(folder, method, rounds=2):
    """Rounds of three peers; the entries, and the frames in their bodies."""
    decided = []

    async def scenario():
        swarm = Swarm(folder, layout=LAYOUT, method=method, codec=MIXED)
        peers = await swarm.start(3)
        await swarm.until(lambda: all(p.replica.position >= rounds for p in peers))
        assert swarm.same_bits(peers)
        store = peers[0].replica.store
        for record in store.headers(0, rounds):
            entry = Entry.decode(record.entry)
            cells = swarm.replay.cells_at(entry.position)
            limits = [cells.max_reduced_bytes(i, 3) for i in range(len(cells))]
            frames = unpack(memoryview(store.body(entry.position)), limits)
            decided.append((entry, cells, [bytes(frame) for frame in frames]))
        given = torch.stack([p.offers[0] for p in peers]).mean(dim=0)
        await swarm.stop()
        return swarm, given

    swarm, given = run_virtual(scenario())
    return swarm, given, decided


def frame_of(codec, dims):
    """Codec number and length of a frame."""
    return parse(codec).code, parse(codec).wire_bytes(dims)


@pytest.mark.parametrize("method", ["diloco", "streaming(count=2)"])
def test_each_layer_travels_in_its_own_codec(tmp_path, method):
    _, _, decided = play(tmp_path, method)
    names = dict(zip(LAYOUT.names, CODECS, strict=True))
    seen = set()
    for _, cells, frames in decided:
        for dims, frame in zip(cells.fragment.pieces, frames, strict=True):
            assert (frame[0], len(frame)) == frame_of(names[dims.layer], dims)
            seen.add(dims.layer)
    assert seen == set(LAYOUT.names)


def test_results_are_as_close_to_the_mean_as_each_layers_codec_allows(tmp_path):
    swarm, mean_F, decided = play(tmp_path, "diloco", rounds=1)
    _, cells, frames = decided[0]
    updates = [torch.empty(cut.stop - cut.start) for cut in cells.fragment.slices]
    for index, (update, frame) in enumerate(zip(updates, frames, strict=True)):
        cells.decode_reduced(index, frame, update)
        mean = mean_F[cells.fragment.slices[index]]
        codec, dims = cells.codec_at(index), cells.dims(index)
        once = codec.decode(codec.encode(mean.view(dims)), dims).view(-1)
        # twice, up and down
        assert float((update - mean).norm()) <= 2 * float((once - mean).norm()) + 1e-5
    assert swarm.replay.cells_at(0).codec_at(0) == parse("int8")


def test_the_log_is_read_from_method_and_layout_alone(tmp_path):
    swarm, _, decided = play(tmp_path, "diloco", rounds=1)
    _, cells, frames = decided[0]
    again = Replay(parse_method(swarm.replay.method.spec), LAYOUT).cells_at(0)
    for index, frame in enumerate(frames):
        first, second = (torch.empty(each.dims(index)).view(-1) for each in (cells, again))
        cells.decode_reduced(index, frame, first)
        again.decode_reduced(index, frame, second)
        assert torch.equal(first, second)


def test_a_large_tensor_is_cut_and_all_its_pieces_have_its_codec():
    cells = Replay(parse_method("diloco", codec=MIXED), LAYOUT).cells_at(0)
    pieces = [dims for dims in cells.fragment.pieces if dims.layer == "blocks.1.w"]
    assert len(pieces) == 10
    assert {codec_of(parse(MIXED), dims).spec for dims in pieces} == {"topk+int4"}


@pytest.mark.parametrize("method", ["diloco", "streaming(count=2)", "demo"])
def test_a_layer_without_a_codec_is_refused_by_name(method):
    with pytest.raises(CodecError, match=r"pattern for layer 'blocks\.0\.w'.*add \*=CODEC"):
        Replay(parse_method(method, codec="mixed(embed=int8, *norm=fp32, *.1.*=int4)"), LAYOUT)
