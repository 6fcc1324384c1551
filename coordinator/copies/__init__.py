"""Copies of a run on another disk, from which a new machine continues it with the same invite.

    TARGET/000002-1f6a90c3/                      all of one owner: the coordinator of one directory
        owner                                    whose it is (`owners`)
        latest                                   names the newest manifest; written last
        manifest-000000017-…                     names everything of one copy (`manifest`)
        files-… epochs-… rounds-…                small files, sealed; epoch records; entries
        snapshot-… body-…                        a state; an update after it

A copy is written in this order: objects, the manifest, `latest`. Every object has a new name and is
never written again, so a crash at any point leaves the copy before whole; what an object holds
already is not sent again. What neither the newest copy nor the one before names is deleted.

    target     an fsspec file system: objects of known digests, errors as text for people
    sealing    the recovery key: small files are encrypted, manifests authenticated
    owners     which directory's copies count, and who has been superseded
    manifest   the records
    archive    entries of the log as objects
    writing    one copy, as far as the log has moved since the last one
    keeping    copies of a running coordinator: when, and what becomes of failures
    restoring  a state directory from a copy
    rebuilding the same from a follower's folder, which is no copy: it lacks the keys

Exceptions:

    ValueError
      CopiesError         gives the fact and the remedy
        TargetFailed      the target cannot be read or written
        NotOurs           the target holds copies of another run, or under another recovery key
        CopyDamaged       an object is missing, shorter than it was, or has other bytes
        Superseded        the run was restored on another machine
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.coordinator.copies.beside import CopyToRestore, copying, open_target
    from atoll.coordinator.copies.target import CopiesError

__all__ = ["CopiesError", "CopyToRestore", "copying", "open_target"]

__getattr__ = exports(
    __name__,
    {
        "CopiesError": "target",
        "CopyToRestore": "beside",
        "copying": "beside",
        "open_target": "beside",
    },
)
