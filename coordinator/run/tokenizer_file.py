"""The file of a run's tokenizer, as it travels from the organiser to the peers.

The spec states the SHA-256 and the size of the JSON (`data.tokenizer_sha256`, `.tokenizer_bytes`).
On the wire and on the coordinator's disk the JSON is compressed: one zlib stream (RFC 1950) of at
most `MAX_PACKED_BYTES`. A receiver unpacks at most the size that the spec states, and checks the
digest before it parses anything.
"""

from __future__ import annotations

import hashlib
import zlib

from atoll.coordinator.run.sections import MAX_TOKENIZER_BYTES

# A vocabulary of 128,000 tokens takes 1.9 MB. The coordinator keeps the file in memory and sends
# it to each peer once.
MAX_PACKED_BYTES = 4 << 20


class TokenizerFileError(ValueError):
    """The bytes are not those of the run's tokenizer."""


def pack(raw: bytes) -> bytes | None:
    """Return the compressed file; None if it is too large to travel."""
    if not 0 < len(raw) <= MAX_TOKENIZER_BYTES:
        return None
    packed = zlib.compress(raw, level=9)
    return packed if len(packed) <= MAX_PACKED_BYTES else None


def unpack(packed: bytes, *, sha256: str, size: int) -> bytes:
    """Return the file's bytes.

    Args:
        packed: what `pack` returned, from an untrusted sender.
        sha256: digest of the file, in hex.
        size: size of the file in bytes.

    Raises:
        TokenizerFileError: it is another file, or damaged.
    """
    decompressor = zlib.decompressobj()
    try:
        raw = decompressor.decompress(packed, size + 1)  # at most one byte too many in memory
    except zlib.error:
        raise TokenizerFileError("expected a compressed tokenizer, got something else") from None
    if len(raw) != size or hashlib.sha256(raw).hexdigest() != sha256:
        raise TokenizerFileError(
            f"expected a tokenizer of {size} bytes with SHA-256 {sha256[:12]}, got another file"
        )
    return raw
