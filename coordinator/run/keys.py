"""The coordinator's secrets, in one file that only its owner can read; and the organiser's key.

    keys.json   {"version": 1, "run_key", "tls_key", "tls_certificate", "token", "session_secret"}
    organiser-PUBLIC.json   {"version": 1, "run_id", "key"}, 0600; PUBLIC begins the public key

`run_key` (Ed25519) signs admissions and epochs; the invite pins the TLS certificate; `token` admits
the holders of an invite; `session_secret` derives session tokens. The file is written once, in one
piece, with mode 0600, and is never overwritten. Without it the run's invite is lost; anyone who
copies it can act as the run's coordinator.

The run's key is also the organiser's, which signs orders, until `atoll keys rotate` names another
one: that is in a file of its own, which may lie elsewhere, and the coordinator does not read it.

Exceptions:

    ValueError
      KeysError     the file is damaged, of another version, or cannot be read or written
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from atoll.coordinator.run.files import replace_private

ORGANISER_FILES = "organiser-*.json"  # of the keys that `atoll keys rotate` made
KEYS_FILE = "keys.json"  # in the directory of every coordinator, and of nothing else
TLS_NAME = "atoll-coordinator"
"""The name in every certificate; peers check the pin instead of the name."""

_MAX_FILE_BYTES = 64 * 1024  # a few kB are used
_FIELDS = ("run_key", "tls_key", "tls_certificate", "token", "session_secret")


class KeysError(ValueError):
    """The coordinator's key file cannot be used."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RunKeys:
    """The secrets of one run."""

    run_key: bytes
    """Ed25519 private key, 32 bytes."""
    tls_key: bytes
    """PEM."""
    tls_certificate: bytes
    """PEM."""
    token: bytes
    session_secret: bytes

    @classmethod
    def generate(cls) -> Self:
        """Return new random keys."""
        tls_key, tls_certificate = _self_signed()
        return cls(
            run_key=Ed25519PrivateKey.generate().private_bytes_raw(),
            tls_key=tls_key,
            tls_certificate=tls_certificate,
            token=secrets.token_bytes(16),
            session_secret=secrets.token_bytes(32),
        )

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """Read the file, or create it if it does not exist. Raises KeysError."""
        try:
            return cls._load(path) if path.exists() else cls._create(path)
        except OSError as error:
            raise KeysError(f"{path}: {error.strerror or error}; check its permissions") from None

    @cached_property
    def signer(self) -> Ed25519PrivateKey:
        """The run's signing key."""
        return Ed25519PrivateKey.from_private_bytes(self.run_key)

    @cached_property
    def run_public_key(self) -> bytes:
        """The run's public key, 32 bytes; every invite contains it."""
        return self.signer.public_key().public_bytes_raw()

    def sign(self, data: bytes) -> bytes:
        """Sign with the run's key."""
        return self.signer.sign(data)

    @cached_property
    def tls_sha256(self) -> bytes:
        """SHA-256 of the certificate's DER; the invite pins it."""
        certificate = x509.load_pem_x509_certificate(self.tls_certificate)
        return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()

    @classmethod
    def _load(cls, path: Path) -> Self:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES)
        try:
            values = json.loads(raw)
            if values["version"] != 1:
                raise KeysError(f"{path}: expected keys of version 1, got {values['version']!r}")
            keys = cls(**{name: bytes.fromhex(values[name]) for name in _FIELDS})
            _ = keys.run_public_key, keys.tls_sha256
        except KeysError:
            raise
        except (ValueError, KeyError, TypeError):
            raise KeysError(
                f"{path}: damaged; restore a copy, or start the run in a new directory"
            ) from None
        return keys

    @classmethod
    def _create(cls, path: Path) -> Self:
        keys = cls.generate()
        values = {name: getattr(keys, name).hex() for name in _FIELDS}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, json.dumps({"version": 1, **values}, indent=1).encode())
        return keys


@dataclass(frozen=True, kw_only=True, repr=False)
class OrganiserKey:
    """A key with which the organiser signs orders: the run's own, or a later one."""

    key: Ed25519PrivateKey
    path: Path
    """The file that holds it."""

    @cached_property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self.key.public_key().public_bytes_raw()

    def sign(self, data: bytes) -> bytes:
        """Sign with it."""
        return self.key.sign(data)

    @classmethod
    def create(cls, folder: Path, run_id: bytes) -> Self:
        """Make a new key and its file, on the disk when this returns. Raises OSError."""
        key = Ed25519PrivateKey.generate()
        name = key.public_key().public_bytes_raw().hex()[:16]
        path = folder / ORGANISER_FILES.replace("*", name)
        values = {"version": 1, "run_id": run_id.hex(), "key": key.private_bytes_raw().hex()}
        replace_private(path, json.dumps(values, indent=1).encode())
        return cls(key=key, path=path)


def is_organiser_file(path: Path) -> bool:
    """Return whether a file is one that `OrganiserKey.create` made, by its name."""
    return path.match(ORGANISER_FILES)


def organiser_keys(given: Path, run_key: bytes, run_id: bytes) -> list[OrganiserKey]:
    """Return the keys of a run in a file or a directory, the later ones first.

    Args:
        given: `keys.json`, one of `ORGANISER_FILES`, or a directory that holds some.
        run_key: the run's public key.
        run_id: the run's.

    Raises:
        KeysError: a file is damaged.
    """
    paths = [*sorted(given.glob(ORGANISER_FILES)), given / KEYS_FILE] if given.is_dir() else [given]
    found = (_organiser_key(path, run_key, run_id) for path in paths if path.exists())
    return [key for key in found if key is not None]


def _organiser_key(path: Path, run_key: bytes, run_id: bytes) -> OrganiserKey | None:
    """Return the key in a file; None if it is another run's. Raises KeysError."""
    try:
        with path.open("rb") as file:
            values = json.loads(file.read(_MAX_FILE_BYTES))
        if "run_key" in values:
            keys = RunKeys.load_or_create(path)
            return (
                OrganiserKey(key=keys.signer, path=path) if keys.run_public_key == run_key else None
            )
        key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(values["key"]))
        is_ours = bytes.fromhex(values["run_id"]) == run_id
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror or error}; check its permissions") from None
    except KeysError:
        raise
    except (ValueError, KeyError, TypeError):
        raise KeysError(f"{path}: damaged; restore a copy of the organiser's key") from None
    return OrganiserKey(key=key, path=path) if is_ours else None


def write_private(path: Path, data: bytes) -> None:
    """Write a new file with mode 0600, whole or not at all. Raises FileExistsError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, path)  # fails if it exists: a rename would replace the run's keys
    finally:
        partial.unlink()


def _self_signed() -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, TLS_NAME)])
    # A peer's clock may be wrong before its first contact, so the certificate is always valid.
    start = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start.replace(year=2100))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(TLS_NAME)]), critical=False)
        # A client takes it for the only root of its channel.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    key_pem = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return key_pem, certificate.public_bytes(pem)
