"""Training data: corpora, documents, tokenizers and data sets of the Hugging Face hub.

`open_corpus` and `open_tokenizer` are the entry points.
"""

from typing import TYPE_CHECKING

from atoll.coordinator.exports import exports

if TYPE_CHECKING:
    from atoll.peer.training.data.corpus import Corpus
    from atoll.peer.training.data.load import open_corpus
    from atoll.peer.training.data.tokens import Tokenizer, open_tokenizer

__all__ = ["Corpus", "Tokenizer", "open_corpus", "open_tokenizer"]

__getattr__ = exports(
    __name__,
    {"Corpus": "corpus", "Tokenizer": "tokens", "open_corpus": "load", "open_tokenizer": "tokens"},
)
