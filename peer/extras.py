"""Import optional packages when they are needed; name what to install if they are missing."""

import importlib
from types import ModuleType

from atoll.peer.errors import ExtraMissing

# Modules of optional packages, and what pip installs for each. Atoll itself is on no index, so an
# advice to install an extra of it by name would fetch whatever somebody else registers there.
PACKAGE_OF = {
    "datasets": "datasets",
    "huggingface_hub": "datasets",
    "lm_eval": "lm-eval",
    "matplotlib": "matplotlib",
    "peft": "peft",
    "pyarrow": "pyarrow",
    "pynvml": "nvidia-ml-py",
    "tensorboard": "tensorboard",
    "textual": "textual",
    "tokenizers": "tokenizers",
    "torchao": "torchao",
    "transformers": "transformers",
    "wandb": "wandb",
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
            f"install it with: pip install {PACKAGE_OF[package]}"
        ) from error
