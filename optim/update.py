"""The bytes of an update: one codec frame a grid cell, back to back, in the order of the cells.

A frame is `codec.wire_bytes(cell values)` long, so the length of the body follows from the layout
and the codec alone, and the frames need no index. A body may come as several parts; a part holds
whole cells.

    UpdateError (ValueError)   a body of the wrong length, or a cell that does not decode
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from atoll.compression import Codec, CodecError
from atoll.optim.layout import CELL, cell_slices
from atoll.optim.state import is_finite

Bytes = bytes | bytearray | memoryview


class UpdateError(ValueError):
    """The body of an update does not decode to a vector of the layout."""


def cells_bytes(codec: Codec, numel: int) -> int:
    """Length of the frames of `numel` values that start on a cell boundary.

    Raises:
        UpdateError: when frames of the codec have no fixed length, or depend on earlier ones.
    """
    if codec.stateful or not codec.exact_size:
        raise UpdateError(
            f"expected a codec whose frames have a fixed length and stand alone, got {codec.spec}"
        )
    full, rest = divmod(numel, CELL)
    return full * codec.wire_bytes(CELL) + (codec.wire_bytes(rest) if rest else 0)


def encode_cells(codec: Codec, vector_N: Tensor) -> list[bytes]:
    """Encode a vector cell by cell.

    Raises:
        CodecError: when it holds NaN or infinity.
    """
    return [codec.encode(vector_N[cell]) for cell in cell_slices(vector_N.numel())]


def decode_cells(codec: Codec, frames: Sequence[Bytes], numel: int) -> Tensor:
    """Decode the frames of `encode_cells`.

    Returns:
        The vector of `numel` values, fp32 on the CPU.

    Raises:
        UpdateError: when the number of frames is wrong, or one does not decode.
    """
    cells = list(cell_slices(numel))
    if len(frames) != len(cells):
        raise UpdateError(f"expected {len(cells)} cells, got {len(frames)}")
    vector_N = torch.empty(numel, dtype=torch.float32)
    for index, (cell, frame) in enumerate(zip(cells, frames, strict=True)):
        _decode(codec, frame, index, vector_N[cell])
    return vector_N


def decode_update(parts: Sequence[Bytes], codec: Codec, numel: int) -> Tensor:
    """Decode the body of an update, deterministic to the bit.

    Args:
        parts: the body, in one piece or in several that hold whole cells, in order.
        codec: the run's codec.
        numel: number of values of the layout.

    Returns:
        update_N, fp32 on the CPU, all finite.

    Raises:
        UpdateError: when a length is wrong (checked before memory is taken), or a cell does
            not decode to finite numbers.
    """
    views = [memoryview(part) for part in parts]
    expected, got = cells_bytes(codec, numel), sum(view.nbytes for view in views)
    if got != expected:
        raise UpdateError(f"expected a body of {expected} bytes ({codec.spec}), got {got}")
    return decode_cells(codec, list(_frames(views, codec, numel)), numel)


def _frames(views: Sequence[memoryview], codec: Codec, numel: int) -> Iterator[memoryview]:
    sizes = (codec.wire_bytes(cell.stop - cell.start) for cell in cell_slices(numel))
    for view in views:
        offset = 0
        while offset < view.nbytes:
            size = next(sizes)
            if offset + size > view.nbytes:
                raise UpdateError("expected parts of whole cells, got a cell in two parts")
            yield view[offset : offset + size]
            offset += size


def _decode(codec: Codec, frame: Bytes, index: int, out: Tensor) -> None:
    try:
        codec.decode(frame, out.numel(), out=out)
    except CodecError as error:
        raise UpdateError(f"cell {index}: {error}") from error
    if not is_finite(out):
        raise UpdateError(f"cell {index}: expected finite numbers, got NaN or infinity")
