"""A peer's identity: an Ed25519 key pair on disk, whose public half *is* the PeerID.

The file is a libp2p private key, as p2pd reads it (libp2p specification, peer-ids): a protobuf of
two fields::

    08 01          key type 1, Ed25519
    12 40          64 bytes follow
    seed[32] public[32]

The PeerID is the identity multihash of the public key's protobuf, so anyone can take the key out of
the PeerID::

    00 24          identity multihash of 36 bytes
    08 01 12 20    key type 1, 32 bytes follow
    public[32]

in base58 (Bitcoin alphabet), always 52 characters from "12D3Koo". A signature is bound to the
PeerID by this alone; no table of keys is needed.

Errors::

    IdentityError     the key file is not one of ours, or cannot be written; nothing was overwritten
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

# The protobufs of the module's docstring.
_KEY_PREFIX = bytes.fromhex("08011240")
_ID_PREFIX = bytes.fromhex("002408011220")
_KEY_BYTES = len(_KEY_PREFIX) + 64
_ID_CHARS = 52  # 38 bytes in base 58
_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGIT = {char: value for value, char in enumerate(_ALPHABET)}
SIGNATURE_BYTES = 64  # of Ed25519


class IdentityError(Exception):
    """The key file cannot be used."""


class Identity:
    """A key pair, from `load_or_create` or `ephemeral`; `path` is None for an ephemeral one."""

    def __init__(self, key: Ed25519PrivateKey, path: Path | None) -> None:
        self._key = key
        self.path = path
        self.public_key: bytes = key.public_key().public_bytes_raw()
        self.peer_id: str = peer_id_of(self.public_key)

    @classmethod
    def ephemeral(cls) -> Self:
        """Return a new key that is never written."""
        return cls(Ed25519PrivateKey.generate(), None)

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> Self:
        """Read the key file, or create it (with its folder) if it does not exist.

        Raises:
            IdentityError: the file is no Ed25519 identity or cannot be read or written.
        """
        path = Path(path)
        try:
            return cls._load(path) if path.exists() else cls._create(path)
        except OSError as error:
            raise IdentityError(f"identity file {path}: {error.strerror or error}") from error

    @classmethod
    def _load(cls, path: Path) -> Self:
        with path.open("rb") as file:
            data = file.read(_KEY_BYTES + 1)
        if len(data) != _KEY_BYTES or not data.startswith(_KEY_PREFIX):
            raise IdentityError(
                f"identity file {path}: expected {_KEY_BYTES} bytes of a libp2p Ed25519 key, "
                "got something else; move it away, and a new identity is created"
            )
        key = Ed25519PrivateKey.from_private_bytes(data[4:36])
        if key.public_key().public_bytes_raw() != data[36:]:
            raise IdentityError(
                f"identity file {path}: its halves do not match; restore a copy of it"
            )
        return cls(key, path)

    @classmethod
    def _create(cls, path: Path) -> Self:
        identity = cls(Ed25519PrivateKey.generate(), path)
        path.parent.mkdir(parents=True, exist_ok=True)
        identity._write(path)
        return identity

    def _write(self, path: Path) -> None:
        partial = path.with_name(f"{path.name}.{os.getpid()}.new")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.key_file())
                file.flush()
                os.fsync(file.fileno())
            os.link(partial, path)  # fails if another process was faster: never replaces a key
        finally:
            partial.unlink()

    def key_file(self) -> bytes:
        """Return the private key in p2pd's format. Keep it secret."""
        return _KEY_PREFIX + self._key.private_bytes_raw() + self.public_key

    def sign(self, data: bytes) -> bytes:
        """Return a signature, 64 bytes; start `data` with a prefix that no other use has."""
        return self._key.sign(data)

    def __repr__(self) -> str:
        """Name the identity without its private key."""
        return f"Identity({self.peer_id})"


def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Return True if the owner of `peer_id` signed exactly `data`. Never raises."""
    public_key = public_key_of(peer_id)
    if public_key is None or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def peer_id_of(public_key: bytes) -> str:
    """Return the PeerID of a 32-byte public key."""
    number, digits = int.from_bytes(_ID_PREFIX + public_key), []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_ALPHABET[digit])
    return "1" + "".join(reversed(digits))  # the leading 1 stands for the leading zero byte


@lru_cache(maxsize=4096)
def public_key_of(peer_id: str) -> bytes | None:
    """Return the 32-byte public key in a PeerID, or None if it is no Ed25519 PeerID."""
    if len(peer_id) != _ID_CHARS or not peer_id.startswith("1"):
        return None
    number = 0
    for char in peer_id:
        digit = _DIGIT.get(char)
        if digit is None:
            return None
        number = number * 58 + digit
    if number >= 1 << (8 * (len(_ID_PREFIX) + 32)):
        return None
    data = number.to_bytes(len(_ID_PREFIX) + 32)
    return data[len(_ID_PREFIX) :] if data.startswith(_ID_PREFIX) else None


def short(peer_id: str) -> str:
    """Return the end of a PeerID, by which people tell peers apart: all begin alike."""
    return peer_id[-6:]
