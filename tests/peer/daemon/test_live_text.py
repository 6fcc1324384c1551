"""Text through peers of a pipeline over libp2p: equal to that of the states in the log."""

import asyncio
import contextlib

import pytest

from atoll.dht.identity import Identity
from atoll.peer.daemon.live_text import DenseRun, LiveOptions, _key_file, live_run
from atoll.peer.paths import PeerPaths
from atoll.peer.training.sampling import SamplingOptions
from support.live_texts import drawn_again
from support.organiser import LOOPBACK, until

OPTIONS = SamplingOptions(max_tokens=24, temperature=0.9, seed=4)


@pytest.fixture
def spec(kit):
    """A pipeline of two stages whose rounds last for seconds."""
    return kit.tiny_spec(
        run={"name": "tiny", "rounds": 0},
        inner={"batch_size": 2, "grad_accumulation": 2, "warmup_steps": 2},
        round={"min_peers": 2, "snapshot_every": 1, "grace_s": 10.0, "stall_s": 3.0},
        topology={"stages": 2},
    )


def live(organiser, folder, **options):
    return LiveOptions(
        invite=organiser.invite, state_dir=folder / "texts", listen=LOOPBACK, **options
    )


def test_a_live_pipeline_speaks_as_its_logs(organise, start, spec, tmp_path):
    organiser = organise(spec)
    peers = [start(organiser.invite, f"peer-{index}", serve=0.5) for index in range(2)]
    until(lambda: all(m.position >= 1 for m in organiser.status().modules), "a round")
    assert all(peer.said("serves texts") for peer in peers)
    said = []

    async def use():
        options = live(organiser, tmp_path)
        async with live_run(options, lambda level, text: said.append(text)) as run:
            pieces = [piece async for piece in run.generate("def ", OPTIONS)]
            return "".join(pieces), run.readings

    text, readings = asyncio.run(use())
    assert text == drawn_again(spec, organiser.folder, "def ", OPTIONS, readings)
    assert readings[0].token == 0 and min(readings[0].positions) >= 1
    # A client is nobody's member: the run counts its trainers alone.
    assert len(organiser.status().peers) == 2
    assert [peer.error for peer in peers] == [None, None]


def test_a_dense_run_names_what_works_instead(organise, kit, tmp_path):
    organiser = organise(kit.tiny_spec())

    async def use():
        async with live_run(live(organiser, tmp_path)):
            raise AssertionError("expected a refusal")

    with pytest.raises(DenseRun, match=r"is no pipeline.* atoll sample CHECKPOINT"):
        asyncio.run(use())


def test_two_clients_at_once_have_keys_of_their_own(tmp_path):
    paths = PeerPaths(root=tmp_path / "texts")
    with contextlib.ExitStack() as stack:
        first = _key_file(stack, paths, b"r" * 32)
        with contextlib.ExitStack() as other:
            second = _key_file(other, paths, b"r" * 32)
            assert first == paths.identity != second
            Identity.load_or_create(second)
        assert not second.exists()
    with contextlib.ExitStack() as stack:
        assert _key_file(stack, paths, b"r" * 32) == first  # one use of an invite in all
