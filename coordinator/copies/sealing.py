"""The recovery key: what makes a copy useless to whoever can read it, and hard to forge.

A copy holds all that the coordinator is: the run's key, the certificate's, the node's. Whoever has
these can act as the coordinator, and buckets are read by more people than they should be. So the
small files are sealed (ChaCha20-Poly1305), and manifests, which name the digests of everything
else, are authenticated (HMAC-SHA256). Both keys derive from a random one. It is none of the run's
keys, which may be rotated: it stays the same for as long as there are copies. States and updates
are not encrypted.

    recovery.key    "atoll-recovery-1 HEX", 32 random bytes, 0600, beside keys.json
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from atoll.coordinator.copies.target import CopiesError, NotOurs
from atoll.coordinator.run.keys import write_private

RECOVERY_FILE = "recovery.key"
_MARK = "atoll-recovery-1"
_KEY_BYTES = 32
_NONCE_BYTES = 12
MAC_BYTES = 32


class RecoveryKey:
    """Seals and authenticates what a copy holds."""

    def __init__(self, key: bytes) -> None:
        """Derive the keys from 32 random bytes."""
        self._key = key
        self._seal = ChaCha20Poly1305(_derived(key, b"seal"))
        self._mac = _derived(key, b"authenticate")

    @classmethod
    def of(cls, state_dir: Path) -> RecoveryKey:
        """Return the key of a directory; make one if it has none.

        Raises:
            CopiesError: the file is damaged.
        """
        path = state_dir / RECOVERY_FILE
        if path.exists():
            return cls.read(path)
        key = cls(os.urandom(_KEY_BYTES))
        key.write(path)
        return key

    @classmethod
    def read(cls, path: Path) -> RecoveryKey:
        """Read a key. Raises CopiesError."""
        try:
            mark, _, text = path.read_text(encoding="ascii").strip().partition(" ")
            key = bytes.fromhex(text)
        except OSError as error:
            raise CopiesError(
                f"{path}: cannot be read: {error.strerror}; pass the recovery.key that was kept "
                "from the coordinator's state directory"
            ) from None
        except ValueError:
            mark, key = "", b""
        if mark != _MARK or len(key) != _KEY_BYTES:
            raise CopiesError(
                f"{path}: not a recovery key; pass the recovery.key that was kept from the "
                "coordinator's state directory"
            )
        return cls(key)

    def write(self, path: Path) -> None:
        """Write the key into a new file."""
        write_private(path, f"{_MARK} {self._key.hex()}\n".encode())

    def seal(self, data: bytes, place: str) -> bytes:
        """Encrypt and authenticate; it opens at the same place alone."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._seal.encrypt(nonce, data, place.encode())

    def unseal(self, data: bytes, place: str) -> bytes:
        """Open what was sealed at a place. Raises NotOurs."""
        try:
            return self._seal.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], place.encode())
        except (InvalidTag, ValueError):
            raise NotOurs(f"{place}: sealed with another recovery key, or damaged") from None

    def signed(self, data: bytes, place: str) -> bytes:
        """Return the data behind its authentication code."""
        return self._code(data, place) + data

    def opened(self, raw: bytes, place: str) -> bytes:
        """Return authenticated data. Raises NotOurs."""
        code, data = raw[:MAC_BYTES], raw[MAC_BYTES:]
        if not hmac.compare_digest(code, self._code(data, place)):
            raise NotOurs(f"{place}: written under another recovery key, or damaged")
        return data

    def _code(self, data: bytes, place: str) -> bytes:
        bound = len(place).to_bytes(4, "big") + place.encode() + data
        return hmac.digest(self._mac, bound, hashlib.sha256)


def _derived(key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, b"atoll copies 1\0" + purpose, hashlib.sha256)
