"""A run's tokenizer as the files that `transformers` reads: tokenizer.json and its config.

The byte tokenizer has no file. Its tokens are written as a byte-level BPE without merges, whose
token `i` is the byte `i`, so any text gets the same tokens as in training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atoll.peer.errors import DataError
from atoll.peer.training.data.tokens import BYTES, Tokenizer, tokenizer_file

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
BESIDE = (CONFIG, "special_tokens_map.json", "chat_template.jinja")
"""Files beside tokenizer.json that say how `transformers` uses it."""


def files_of(name: str, opened: Tokenizer, *, context: int) -> dict[str, str]:
    """Return the texts of a tokenizer's files by name.

    A folder of Hugging Face gives its own: they have the chat template, for example.

    Args:
        name: `"bytes"`, or the path of a `tokenizers` JSON file on this machine, or of a folder
            with one.
        opened: that tokenizer.
        context: tokens that the model takes.

    Raises:
        DataError: the file cannot be read.
    """
    text = byte_level() if name == BYTES else _read(tokenizer_file(name))
    folder = Path(name).expanduser()
    if name != BYTES and (folder / CONFIG).is_file():
        beside = {each: _read(folder / each) for each in BESIDE if (folder / each).is_file()}
        return {FILE: text} | beside
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    end = end_text(opened)
    if end is not None:
        config["eos_token"] = end
    return {FILE: text, CONFIG: json.dumps(config, indent=2) + "\n"}


def end_text(opened: Tokenizer) -> str | None:
    """Return the text of the token that ends a document; None if there is none."""
    if opened.end_token is None:
        return None
    text_of = getattr(opened, "text_of", None)  # a file's; the byte tokenizer ends with byte 0
    return byte_letters()[opened.end_token] if text_of is None else str(text_of(opened.end_token))


def byte_letters() -> list[str]:
    """Return the letter for each byte in byte-level BPE (GPT-2): itself if it can be printed."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


def byte_level() -> str:
    """Return the `tokenizers` JSON of the byte tokenizer."""
    letters = byte_letters()
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    fields: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(letters)},
            "merges": [],
        },
    }
    return json.dumps(fields, ensure_ascii=False, indent=1) + "\n"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the tokenizer {str(path)!r} cannot be read: {error}") from None
