import pytest
import torch
from torch import nn

from atoll.peer.errors import DeviceError
from atoll.peer.training.devices import number_of_gpus
from atoll.peer.training.ranks import (
    FIT_SHARE,
    FROZEN_BYTES,
    TRAIN_BYTES,
    fits,
    is_one_of_several,
)
from support.rank_work import (
    adapters_on_ranks,
    memory_is_remembered,
    memory_of_a_shard,
    memory_of_one_rank,
    moments_of_8_bits,
    rank_lost_while_loading,
    resume_moments_of_8_bits,
    scaled_trainers,
    too_little_memory,
    trainers_on_ranks,
    trainers_on_two_hosts,
)
from support.ranks import on_ranks
from support.weights import write_folder


@pytest.mark.slow
def test_ranks_train_a_model_that_is_whole_on_each_or_cut_over_them(tmp_path):
    on_ranks(2, trainers_on_ranks, tmp_path, folder=tmp_path)


@pytest.mark.slow
def test_ranks_take_smaller_pieces_where_one_is_out_of_memory(tmp_path):
    on_ranks(2, memory_of_one_rank, tmp_path, folder=tmp_path)
    on_ranks(2, too_little_memory, tmp_path, folder=tmp_path)


@pytest.mark.slow
def test_ranks_of_a_cut_model_start_again_with_smaller_pieces(tmp_path):
    on_ranks(2, memory_of_a_shard, tmp_path, folder=tmp_path)
    on_ranks(2, memory_is_remembered, tmp_path, folder=tmp_path)


@pytest.mark.slow
def test_ranks_scale_the_loss_alike(tmp_path):
    on_ranks(2, scaled_trainers, tmp_path, folder=tmp_path)


@pytest.mark.slow
def test_ranks_save_moments_of_8_bits(tmp_path):
    pytest.importorskip("torchao")
    on_ranks(2, moments_of_8_bits, tmp_path, folder=tmp_path)
    on_ranks(3, resume_moments_of_8_bits, tmp_path, folder=tmp_path)


@pytest.mark.slow
def test_ranks_resume_with_adapters_on_a_frozen_model(tmp_path):
    pytest.importorskip("peft")
    write_folder(tmp_path / "base")
    on_ranks(2, adapters_on_ranks, tmp_path, folder=tmp_path)


@pytest.mark.slow
def test_a_rank_lost_while_loading_is_no_fault_of_the_saved_state(tmp_path):
    on_ranks(2, rank_lost_while_loading, tmp_path, folder=tmp_path, dying=(1,))


@pytest.mark.slow
def test_four_ranks_on_two_hosts_train_one_model(tmp_path):
    on_ranks(4, trainers_on_two_hosts, tmp_path, folder=tmp_path)


def test_a_model_fits_if_its_state_leaves_room_for_activations(monkeypatch):
    class Memory:
        total = 100 << 30

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    room_bytes, cpu = int(FIT_SHARE * (25 << 30)), torch.device("cpu")

    def of(num_trained, num_frozen=0):
        sizes = [(num_trained, True), (num_frozen, False)]
        params = [
            nn.Parameter(torch.empty(size, device="meta"), requires_grad=trains)
            for size, trains in sizes
        ]
        return nn.ParameterList(params)

    most = room_bytes // TRAIN_BYTES
    assert fits(of(most), cpu, ranks=4)
    assert not fits(of(most + 1), cpu, ranks=4)
    assert fits(of(most + 1), cpu, ranks=3)
    under = (room_bytes - TRAIN_BYTES) // FROZEN_BYTES
    assert fits(of(1, under), cpu, ranks=4), "what is frozen has no gradient and no moments"
    assert not fits(of(1, under + 1), cpu, ranks=4)


def test_a_process_is_one_of_several_if_it_was_started_so(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not is_one_of_several()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not is_one_of_several()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_one_of_several()


def test_gpus_are_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert number_of_gpus(0, device="auto") == 4
    assert number_of_gpus(3, device="cuda") == 3
    with pytest.raises(DeviceError, match="but there are 4"):
        number_of_gpus(5, device="auto")
    with pytest.raises(DeviceError, match="got both"):
        number_of_gpus(2, device="cuda:1")


def test_gpus_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="sees no CUDA device"):
        number_of_gpus(0, device="auto")
