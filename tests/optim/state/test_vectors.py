import gc
import weakref

import numpy as np
import pytest
import torch

from atoll.optim.state import vectors

N = vectors.LONG + 3
N_LONG = 2 * vectors.LONG


@pytest.fixture(autouse=True)
def _keeping(monkeypatch):
    """Whatever other tests of this process have chosen."""
    monkeypatch.setattr(vectors, "_keeps", True)


def address(numel: int) -> int:
    return vectors.empty(numel).data_ptr()


def test_memory_is_used_again_once_nobody_has_it():
    first = address(N)
    assert address(N) == first


def test_memory_that_a_view_holds_is_not_given_out():
    held = vectors.empty(N)
    held.fill_(7.0)
    view, at = memoryview(held[5:9].numpy()), held.data_ptr()
    del held
    others = [vectors.empty(N).fill_(1.0) for _ in range(3)]
    assert at not in [other.data_ptr() for other in others]
    assert list(view) == [7.0] * 4
    del view
    gc.collect()
    assert at in [vectors.empty(N).data_ptr(), *[address(N) for _ in others]]


@pytest.fixture
def nothing_kept(monkeypatch):
    for name, value in (("_spare", {}), ("_longest", 0), ("_most", vectors.SPARE)):
        monkeypatch.setattr(vectors, name, value)


def test_spare_memory_is_bounded_in_bytes(nothing_kept):
    for numel in (N, 3 * N, N // 2 + vectors.LONG // 2):
        held = [vectors.empty(numel) for _ in range(8)]
        del held
        longest = max(numel, vectors._longest)
        assert 0 < vectors.spare_bytes() <= vectors.SPARE * 4 * longest


def test_short_windows_keep_what_they_need_again(nothing_kept, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(vectors.time, "monotonic", lambda: now_s)
    for numel, least_s in ((N, 5.0), (10**9, 70.0)):
        once = vectors.OnceAWindow()
        kept = []
        for window_s in (0.0, 0.9 * least_s, 0.9 * least_s, 1.1 * least_s, 1.1 * least_s):
            now_s += window_s
            once.trim(numel)
            held = [vectors.empty(N) for _ in range(5)]
            del held
            kept.append(vectors.spare_bytes() / (4 * N_LONG))
        short = vectors.SHORT_SPARE
        assert kept == [vectors.SPARE, short, short, vectors.SPARE, vectors.SPARE]


def test_a_trim_gives_back_what_short_windows_kept(nothing_kept, monkeypatch):
    monkeypatch.setattr(vectors, "_most", vectors.SHORT_SPARE)
    held = [vectors.empty(N) for _ in range(5)]
    del held
    vectors.trim(vectors.LONG - 1)  # of a small model
    assert vectors.spare_bytes() == vectors.SHORT_SPARE * 4 * N_LONG
    vectors.trim(N)
    assert vectors.spare_bytes() == vectors.SPARE * 4 * N_LONG


def test_a_process_that_keeps_none_gives_memory_back_at_once(nothing_kept):
    held = vectors.empty(N)
    del held
    assert vectors.spare_bytes() > 0
    held = [vectors.empty(N), vectors.empty(3 * N)]
    vectors.keep_none()
    assert vectors.spare_bytes() == 0
    del held
    assert vectors.spare_bytes() == 0


def test_the_length_that_nobody_asks_for_goes_back_to_the_system(nothing_kept):
    longer = 4 * vectors.LONG
    # Room is for one of the longest, or two of the shorter ones.
    for numel, expected in ((3 * N, {longer: 1}), (N, {longer: 0, N_LONG: 2})):
        held = [vectors.empty(numel) for _ in range(5)]
        del held
        assert {length: len(kept) for length, kept in vectors._spare.items()} == expected


def test_nearly_equal_lengths_share_memory():
    first = address(2 * vectors.LONG)
    assert address(2 * vectors.LONG - 7) == first
    assert vectors.empty(2 * vectors.LONG - 7).shape == (2 * vectors.LONG - 7,)


def test_long_vectors_begin_with_a_cache_line():
    long = [vectors.empty(N + number) for number in range(3)]
    assert [vector_N.data_ptr() % 64 for vector_N in long] == [0, 0, 0]


def test_short_vectors_are_plain_ones():
    short = vectors.empty(5)
    assert short.shape == (5,)
    assert short.dtype == torch.float32
    assert 5 not in vectors._spare


def test_vectors_are_put_one_after_another():
    parts = [torch.randn(3), torch.randn(1), torch.randn(4)]
    assert torch.equal(vectors.cat(parts), torch.cat(parts))
    assert torch.equal(vectors.cat(parts[:1]), parts[0])


def test_neighbours_in_one_memory_are_joined_without_a_copy():
    whole = torch.randn(8)
    joined = vectors.joined([whole[1:3], whole[3:7], whole[7:]])
    assert torch.equal(joined, whole[1:])
    assert joined.data_ptr() == whole[1:].data_ptr()


def test_vectors_that_do_not_lie_one_after_another_are_copied():
    whole, other = torch.randn(8), torch.randn(8)
    for parts in ([whole[:3], other[3:]], [whole[3:], whole[:3]], [whole[:3], whole[4:]]):
        assert torch.equal(vectors.joined(parts), torch.cat(parts))


def test_what_waits_can_be_given_back():
    address(N)
    assert vectors.spare_bytes() >= 4 * N
    vectors.release()
    assert vectors.spare_bytes() == 0
    assert vectors.empty(N).shape == (N,)


def test_bytes_go_back_to_the_system_with_the_last_view():
    for num_bytes in (10, 4 * N):
        body = vectors.buffer(num_bytes)
        assert len(body) == num_bytes
        body[3:5] = b"ab"
        memory, view = weakref.ref(body.obj) if num_bytes == 4 * N else None, body[3:5]
        del body
        assert view == b"ab"
        del view
        assert memory is None or memory() is None


def test_long_vectors_lie_where_they_are_told_to(monkeypatch):
    made = []

    def allocate(length):
        made.append(np.zeros(length, dtype=np.float32))
        return made[-1]

    monkeypatch.setattr(vectors, "_memory", vectors._memory)
    before = vectors.empty(vectors.LONG)
    vectors.take_memory_from(allocate)
    del before  # of the heap: it is not used again
    first = vectors.empty(vectors.LONG)
    assert first.data_ptr() == made[0].ctypes.data
    vectors.release()
