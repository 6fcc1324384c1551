"""Saved progress in shards: one file a rank, and what any other number of ranks makes of it."""

from contextlib import closing

import pytest
import torch

from atoll.peer.errors import SavedStateError
from atoll.peer.training import saved
from atoll.peer.training.ranks import OneRank
from atoll.peer.training.shards import Saver
from support.rank_work import compare, load_shards, loaded, save_in_shards, vector_worker
from support.ranks import on_ranks
from support.reducer_bench import Bench


def shards(folder):
    return sorted(file.name for file in folder.glob("trainer.*"))


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_two_ranks_save_and_any_number_resumes_from_the_last_whole_save(world, tmp_path):
    on_ranks(2, save_in_shards, tmp_path, folder=tmp_path)
    with closing(Bench(tmp_path / "log", position=1, patience_s=0.1)) as bench:
        worker = vector_worker(bench.reducer)
        state, read = Saver(tmp_path / "trainer.safetensors", OneRank(), run="run").load()
        worker.load_shared(worker.places.shared(state, read))
        compare(loaded(tmp_path / "whole.pt"), worker.state_dict())
    on_ranks(world, load_shards, tmp_path, folder=tmp_path)


def test_a_shard_that_is_gone_is_one_clear_message(tmp_path):
    path = tmp_path / "trainer.safetensors"
    saved.save(path, {"shards": ["0123abcd", 2]}, kind="trainer", run="run")
    with pytest.raises(SavedStateError, match=r"number 2 is on no machine .* with 2 processes"):
        Saver(path, OneRank(), run="run").load()


def test_shards_of_another_state_are_refused(tmp_path):
    path, shard = tmp_path / "trainer.safetensors", tmp_path / "trainer.0123abcd.1.safetensors"
    saved.save(path, {"shards": ["0123abcd", 2]}, kind="trainer", run="run")
    one = saved.TensorPart(values=torch.ones(2), runs=((0, 2),), shape=(2,))
    saved.save(shard, {"parts": [one]}, kind="trainer-shard", run="run")
    with pytest.raises(SavedStateError, match="is of another state"):
        Saver(path, OneRank(), run="run").load()
    saved.save(shard, {"parts": []}, kind="trainer-shard", run="another")
    with pytest.raises(SavedStateError, match="is of another run"):
        Saver(path, OneRank(), run="run").load()
