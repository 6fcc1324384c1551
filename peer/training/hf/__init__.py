"""Models in the formats of Hugging Face: weights to begin with, adapters, and exports.

    folder.py      a folder of safetensors files: tensors by name, and their digest
    llama.py       the built-in decoder as a model of the Llama family, and back
    beginning.py   a run's model, with the weights and adapters that its spec names
    lora.py        low-rank adapters, by the package `peft`
    tokenizer.py   a run's tokenizer as `transformers` reads it
    export.py      a trained model as a folder that `transformers` loads

Nothing here reads a pickle, downloads anything, or runs code that a folder contains.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.peer.training.hf.folder import WeightFolder, weights_digest

__all__ = ["WeightFolder", "weights_digest"]

__getattr__ = exports(__name__, {"WeightFolder": "folder", "weights_digest": "folder"})
