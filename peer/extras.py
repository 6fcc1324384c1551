"""Import optional packages when they are needed; name the extra to install if they are missing."""

import importlib
from types import ModuleType

from atoll.peer.errors import ExtraMissing

# Optional packages and the extra in pyproject.toml that brings each.
EXTRA_OF = {
    "datasets": "data",
    "huggingface_hub": "data",
    "lm_eval": "eval",
    "matplotlib": "lab",
    "peft": "hf",
    "pyarrow": "data",
    "textual": "dashboard",
    "tokenizers": "data",
    "transformers": "hf",
}


def extra(name: str, purpose: str) -> ModuleType:
    """Import module `name` of an optional package.

    Args:
        name: dotted name of the module.
        purpose: subject of the error message: the feature that needs the package.

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
