from argparse import Namespace

import pytest
import sizes_pieces
import torch


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_each_piece_is_timed_on_one_thread_and_on_two(monkeypatch):
    monkeypatch.setattr(sizes_pieces, "REPEATS", 1)
    rows = sizes_pieces.all_pieces("70000,140000", Namespace(method="diloco", inner_steps=2))
    assert [(row["params"], row["piece"], row["threads"]) for row in rows] == [
        (params, piece, threads)
        for params in (70_000, 140_000)
        for beside in ("", ", beside")
        for piece in (f"apply{beside}", f"root{beside}", f"residual{beside}")
        for threads in (1, 2)
    ]
    assert all(row["ns_per_param"] > 0 and row["copies"] > 0 for row in rows)
    assert len(sizes_pieces.piece_table(rows)) == 1 + len(rows)


def test_a_copy_of_fewer_values_counts_by_the_value(monkeypatch):
    monkeypatch.setattr(sizes_pieces, "COPIED", 1_000)
    copied = []

    def fastest_s(works, clock):
        copied.append([works[0].read_bytes, works[1].work().numel()])
        return [3.0, 0.01]

    monkeypatch.setattr(sizes_pieces, "fastest_s", fastest_s)
    rows = sizes_pieces.all_pieces("100000", Namespace(method="diloco", inner_steps=2))
    assert copied == [[read, 1_000] for read in (12, 12, 8, 8, 8, 8) * 2]
    assert rows[0]["copies"] == pytest.approx(1.0)  # 300 copies of a hundredth, of 4 bytes each
    assert rows[0]["copies_moved"] == pytest.approx(1.2)
    assert rows[-1]["copies"] == pytest.approx(1.5)


def test_noise_longer_than_what_is_drawn_repeats_it(monkeypatch):
    monkeypatch.setattr(sizes_pieces, "NOISE", 1_000)
    values = sizes_pieces.noise(2_500)
    assert torch.equal(values[1_000:2_000], values[:1_000])
    assert torch.equal(values[2_000:], values[:500])
    assert values.std() > 0.5
