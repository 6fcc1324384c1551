"""The checksum of a frame; its definition is in `atoll.compression.base`."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

SEGMENT_SIDE = 64  # 64 x 64 words of 8 bytes are a segment of 32 KiB, as the format has it
SEGMENT_BYTES = SEGMENT_SIDE * SEGMENT_SIDE * 8
SEGMENTS_AT_ONCE = 16  # 512 KiB are in the L2 cache when they are summed the second time
SEGMENTS_WORTH_IT = 4  # fewer wait for more: a call costs more than it saves in cache


def of_rows(payload_RB: Tensor, head: bytes) -> list[int]:
    """Return the checksum of each row (uint8, CPU, aligned to 8), each with this start."""
    whole = payload_RB.shape[1] // SEGMENT_BYTES
    crc, end = zlib.crc32(head), whole * SEGMENT_BYTES
    if not whole:
        return [zlib.crc32(row, crc) for row in payload_RB.numpy()]
    words = payload_RB[:, :end].view(torch.int64)
    segments = words.view(-1, whole, SEGMENT_SIDE, SEGMENT_SIDE)
    sums = torch.empty((len(segments), whole, 2, SEGMENT_SIDE), dtype=torch.int64)
    torch.sum(segments, 3, out=sums[:, :, 0])
    torch.sum(segments, 2, out=sums[:, :, 1])
    pairs = zip(sums.numpy(), payload_RB[:, end:].numpy(), strict=True)
    return [zlib.crc32(rest, zlib.crc32(of_row, crc)) for of_row, rest in pairs]


class Checksum:
    """Checksum of a payload (uint8, CPU, aligned to 8), updated as it grows or taken at the end.

    What was just written is still in cache: summing it then costs half.
    """

    def __init__(self, payload: Tensor) -> None:
        """Take the payload, which need not be filled yet."""
        self._payload = payload
        self._whole = whole = payload.numel() // SEGMENT_BYTES
        self._first = self._done = 0
        if whole:
            words = payload[: whole * SEGMENT_BYTES].view(torch.int64)
            self._segments = words.view(-1, SEGMENT_SIDE, SEGMENT_SIDE)
            self._sums = torch.empty((whole, 2, SEGMENT_SIDE), dtype=torch.int64)

    def postpone(self, written_last: Tensor) -> None:
        """Sum the segments up to the end of `written_last`, a part, only when all is complete.

        Scales come first in a payload, but are complete only after the last codes.
        """
        end = written_last.data_ptr() + written_last.numel() * written_last.dtype.itemsize
        whole = -(-(end - self._payload.data_ptr()) // SEGMENT_BYTES)
        self._first = self._done = min(whole, self._whole)

    def reach(self, written: Tensor) -> None:
        """Sum the segments up to the end of `written`, a part: all before it is final.

        Postponed segments are excepted.
        """
        end = written.data_ptr() + written.numel() * written.dtype.itemsize
        complete = (end - self._payload.data_ptr()) // SEGMENT_BYTES
        if complete - self._done >= SEGMENTS_WORTH_IT:
            self._sum(self._done, complete)
            self._done = complete

    def value(self, head: bytes) -> int:
        """Return the checksum, the payload being complete, with the start of the header."""
        crc = zlib.crc32(head)
        if not self._whole:
            return zlib.crc32(self._payload.numpy().data, crc)
        self._sum(0, self._first)
        self._sum(self._done, self._whole)
        crc = zlib.crc32(self._sums.numpy().data, crc)
        return zlib.crc32(self._payload[self._whole * SEGMENT_BYTES :].numpy().data, crc)

    def _sum(self, start: int, stop: int) -> None:
        for at in range(start, stop, SEGMENTS_AT_ONCE):
            pick = slice(at, min(at + SEGMENTS_AT_ONCE, stop))
            segments, sums = self._segments[pick], self._sums[pick]
            torch.sum(segments, 2, out=sums[:, 0])
            torch.sum(segments, 1, out=sums[:, 1])
