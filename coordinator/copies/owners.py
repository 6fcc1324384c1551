"""Whose copies count: each coordinator's directory has a folder in the target.

    TARGET/NUMBER-RANDOM/owner    32 bytes of authentication code, then JSON: run_id, run_name, at_s
    copies.json                   {"owner": "NUMBER-RANDOM"} in the coordinator's directory

A restore takes the next number, before anything of it serves. From then on the coordinator that
wrote the copies is superseded: it notices at its next look, and ends; started again, it refuses.
The owner with the highest name counts, so two restores at once leave one of them. Only a restore
can supersede: an owner's record is authenticated under the recovery key.
"""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path

from atoll.coordinator.copies.manifest import LATEST, OWNER
from atoll.coordinator.copies.sealing import MAC_BYTES, RecoveryKey
from atoll.coordinator.copies.target import CopyDamaged, NotOurs, Superseded, Target
from atoll.coordinator.run.files import replace_private

OWNER_FILE = "copies.json"
_RECORD = "owner"
_MAX_RECORD = 4096


def read_owner(state_dir: Path) -> str:
    """Return a directory's owner; empty if it has none, or its file is damaged."""
    try:
        told = json.loads((state_dir / OWNER_FILE).read_bytes()[:_MAX_RECORD])["owner"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return told if isinstance(told, str) and OWNER.fullmatch(told) else ""


def keep_owner(state_dir: Path, owner: str) -> None:
    """Write a directory's owner, synced."""
    replace_private(state_dir / OWNER_FILE, json.dumps({"owner": owner}).encode())


def number_of(owner: str) -> int:
    """Return an owner's number."""
    return int(owner[:6])


def owners(target: Target) -> list[str]:
    """Return the owners in a target, oldest first. Raises TargetFailed."""
    return [name for name in target.names() if OWNER.fullmatch(name)]


def expect_target(target: Target, state_dir: Path) -> None:
    """Check that copies of a directory can be written to a target, before a coordinator starts.

    Raises:
        TargetFailed: it cannot be written, or not be read.
        NotOurs: it holds copies of another run, or of another directory.
        Superseded: the run was restored elsewhere.
    """
    target.expect_writable()
    if own := expect_own(target, state_dir):
        expect_newest(target, RecoveryKey.of(state_dir), own)


def expect_own(target: Target, state_dir: Path) -> str:
    """Return a directory's owner in a target; empty if the target holds nobody's copies.

    Raises:
        TargetFailed: it cannot be read.
        NotOurs: it holds copies of another run, or of another directory.
    """
    there, own = owners(target), read_owner(state_dir)
    if own in there:
        return own
    if there:
        raise NotOurs(
            f"{target.url}: it holds copies of {_whose(target, there[-1])}, which this directory "
            f"({state_dir}) has not written; continue that run with --restore in a new directory, "
            "or choose another target"
        )
    return ""


def expect_newest(target: Target, key: RecoveryKey, own: str) -> None:
    """Check that nobody has restored the run since.

    Raises:
        Superseded: somebody has.
        TargetFailed: this cannot be read.
    """
    for later in (name for name in owners(target) if name > own):
        if _is_genuine(target, key, later):
            raise Superseded(
                f"{target.url}: the run was restored from its copies by another coordinator "
                f"({later}), so this one must not go on: two would split the run. Stop the other "
                "one first if this is the one to keep, and restore again, into a new directory"
            )


def claim(target: Target, key: RecoveryKey, *, run_id: str, run_name: str, after: str = "") -> str:
    """Become the newest owner; return its name. Raises TargetFailed.

    Its number is above that of `after`, an owner in another target, too: numbers of restores count
    in relocations, wherever the copies are.
    """
    known = [name for name in (*owners(target), after) if name]
    number = max(map(number_of, known), default=0) + 1
    owner = f"{number:06d}-{secrets.token_hex(4)}"
    record = {"run_id": run_id, "run_name": run_name, "at_s": time.time()}
    name = f"{owner}/{_RECORD}"
    target.replace(name, key.signed(json.dumps(record).encode(), name))
    return owner


def newest_with_copies(target: Target) -> str:
    """Return the newest owner that has a whole copy; empty if there is none."""
    found = (name for name in reversed(owners(target)) if LATEST in target.names(name))
    return next(found, "")


def _is_genuine(target: Target, key: RecoveryKey, owner: str) -> bool:
    name = f"{owner}/{_RECORD}"
    try:
        key.opened(target.read(name, _MAX_RECORD), name)
    except (NotOurs, CopyDamaged):
        return False
    return True


def _whose(target: Target, owner: str) -> str:
    """Return whose copies somebody's are, for a message: nothing vouches for it."""
    try:
        raw = target.read(f"{owner}/{_RECORD}", _MAX_RECORD)[MAC_BYTES:]
        return f"run {str(json.loads(raw)['run_name'])[:64]}"
    except (ValueError, KeyError, TypeError):  # CopyDamaged is a ValueError
        return "a run"
