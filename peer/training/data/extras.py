"""Packages that come with an extra: imported where they are needed, missed with a remedy."""

import importlib
from types import ModuleType

from atoll.peer.errors import DataError


def extra(name: str, purpose: str) -> ModuleType:
    """Import a module of the extra ``data``; ``purpose`` says what for.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DataError(
            f"{purpose} needs the package {package!r}, which is not installed; "
            'install it with: pip install "atoll[data]"'
        ) from error
