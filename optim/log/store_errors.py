"""A log on disk raises these errors.

StoreError
StoreCorrupt      the file is no database, or a damaged one
WrongRun          the file is of another run
OutOfOrder        an entry that does not come next
Conflict          another entry at a position that is taken
NotStored         a body or snapshot that is not here (any more)
Damaged         the disk has spoiled it
"""


class StoreError(Exception):
    """The log on disk cannot do what was asked."""


class StoreCorrupt(StoreError):
    """The file is no database of a log, or a damaged one."""


class WrongRun(StoreError):
    """The file belongs to another run."""


class OutOfOrder(StoreError):
    """An entry that does not follow the last one."""


class Conflict(StoreError):
    """A different entry at a position that is decided."""


class NotStored(StoreError):
    """A body or snapshot that was pruned or never here."""


class Damaged(NotStored):
    """A body or snapshot that the disk has spoiled; it is no longer stored."""
