"""The manifest of a copy names every object of it, with its length and SHA-256.

    manifest    32 bytes of authentication code, then the JSON of a `Manifest`
    latest      32 bytes of authentication code, then the name of the newest manifest

A copy ends where the state can be computed: at the first update that is missing after the newest
snapshot, or at the end of the log. So whoever has nothing else can continue the run from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from atoll.coordinator.copies.sealing import MAC_BYTES, RecoveryKey
from atoll.coordinator.copies.target import CopyDamaged, CopyObject, Target

LATEST = "latest"
MAX_MANIFEST_BYTES = 64 << 20  # 100,000 rounds of 64 modules are about 13 MB
OWNER = re.compile(r"[0-9]{6}-[0-9a-f]{8}", re.ASCII)
_NAME = re.compile(r"[0-9]{6}-[0-9a-f]{8}/[a-z]+(\.[\w-]+)?-[\w-]{1,100}", re.ASCII)

_CONFIG = ConfigDict(strict=True, extra="forbid")

Count = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(pattern=_NAME)]
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class CopiedModule:
    """A copy of one log."""

    __pydantic_config__ = _CONFIG

    name: Annotated[str, Field(max_length=64)]
    """The name of the run's module; empty in a dense run."""
    position: Count
    """The end of the copy: the position of the next entry."""
    chain: Hex
    """The chain there; in a gossip run the root of the model."""
    base_position: Count
    """The position at which the log begins."""
    base_chain: Hex
    started: Annotated[str, Field(max_length=64)] = ""
    """When its first epoch opened, in seconds since 1970; empty before."""
    epochs: CopyObject
    rounds: tuple[CopyObject, ...]
    """Entries, in order."""
    snapshot_position: Count
    snapshot: CopyObject
    bodies: tuple[CopyObject, ...]
    """The updates after the snapshot, in order; an entry without an update has none."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything of one copy."""

    __pydantic_config__ = _CONFIG

    version: Literal[1] = 1
    run_id: Hex
    run_name: Annotated[str, Field(max_length=128)]
    serial: Annotated[int, Field(ge=1, lt=10**9)]
    at_s: float
    """Seconds since 1970."""
    before: Annotated[str, Field(max_length=256)] = ""
    """The name of the manifest of the copy before; empty if there is none."""
    files: CopyObject
    modules: tuple[CopiedModule, ...]

    def pieces(self) -> Iterator[CopyObject]:
        """Yield all objects of this copy."""
        yield self.files
        for module in self.modules:
            yield from (module.epochs, module.snapshot, *module.rounds, *module.bodies)

    @property
    def bytes(self) -> int:
        """Return the length of all objects together."""
        return sum(piece.bytes for piece in self.pieces())


_MANIFEST = TypeAdapter(Manifest)


def put_manifest(target: Target, key: RecoveryKey, name: str, manifest: Manifest) -> None:
    """Write a manifest, then name it in its owner's `latest`. Raises TargetFailed."""
    target.put(name, "", [key.signed(_MANIFEST.dump_json(manifest), name)])
    latest = f"{name.partition('/')[0]}/{LATEST}"
    target.replace(latest, key.signed(name.encode(), latest))


def read_latest(target: Target, key: RecoveryKey, owner: str) -> str:
    """Return the name of an owner's newest manifest, empty if it has none yet.

    Raises:
        NotOurs: it was written under another recovery key.
        TargetFailed: it cannot be read.
    """
    name = f"{owner}/{LATEST}"
    if LATEST not in target.names(owner):
        return ""
    told = key.opened(target.read(name, MAC_BYTES + 256), name).decode("ascii", "replace")
    return _expect_name(told, name)


def read_manifest(target: Target, key: RecoveryKey, name: str) -> Manifest:
    """Read a manifest.

    Raises:
        NotOurs: it was written under another recovery key.
        CopyDamaged: it is missing, or of a later version.
        TargetFailed: it cannot be read.
    """
    raw = key.opened(target.read(name, MAX_MANIFEST_BYTES), name)
    try:
        manifest = _MANIFEST.validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise CopyDamaged(
            f"{target.url}/{name}: this version of Atoll cannot read it: {first['msg']}"
        ) from None
    for piece in manifest.pieces():
        _expect_name(piece.name, name)
    return manifest


def _expect_name(told: str, where: str) -> str:
    if not _NAME.fullmatch(told):
        raise CopyDamaged(f"{where}: expected the name of an object, got {told[:80]!r}")
    return told
