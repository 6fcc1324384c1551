"""Packages that come with an extra: imported where they are needed, missed with a remedy."""

import importlib
from types import ModuleType

from atoll.peer.errors import ExtraMissing

# The package that shows whether an extra is there, and the extra that pyproject.toml lists it in.
EXTRA_OF = {
    "datasets": "data",
    "matplotlib": "lab",
    "pyarrow": "data",
    "textual": "dashboard",
    "tokenizers": "data",
}


def extra(name: str, purpose: str) -> ModuleType:
    """Import module `name` of an optional package; `purpose` names what needs it.

    Raises:
        ExtraMissing: the package is not installed.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ExtraMissing(
            f"{purpose} needs the package {package!r}, which is not installed; "
            f'install it with: pip install "atoll[{EXTRA_OF[package]}]"'
        ) from error
