"""The built-in decoder as a model of the Llama family, as `transformers` stores it, and back.

The two compute the same and store it differently. Ours has query, key and value in one matrix, and
gate and up in one; its rotary positions turn neighbouring values `(2i, 2i + 1)` of a head, theirs
turn `(i, i + E/2)`. So the rows of query and key are put in another order, which leaves all
products between a query and a key as they are.

    ours                     theirs
    embedding                model.embed_tokens
    blocks.N.attention_norm  model.layers.N.input_layernorm
    blocks.N.attention.qkv   model.layers.N.self_attn.q_proj | k_proj | v_proj, q and k reordered
    blocks.N.attention.out   model.layers.N.self_attn.o_proj
    blocks.N.ffn_norm        model.layers.N.post_attention_layernorm
    blocks.N.ffn.gate_up     model.layers.N.mlp.gate_proj | up_proj
    blocks.N.ffn.out         model.layers.N.mlp.down_proj
    norm                     model.norm
    head                     lm_head, absent if tied

# R rows of a matrix, D columns, H heads, E width of a head
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.peer.errors import ModelError
from atoll.peer.training.hf.folder import WeightFolder
from atoll.peer.training.models import Decoder, ModelConfig

FAMILY = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
"""Model types that the decoder can hold, and their class with a language head."""

FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
"""Fields of config.json that the decoder has no choice in, with the values that it computes."""


@dataclass(frozen=True, kw_only=True)
class RowRange:
    """One matrix of theirs, a range of the rows of one of ours."""

    name: str
    """Theirs, without `.weight`."""
    rows: int
    heads: int = 0
    """Heads whose rows are reordered; 0 for none."""


def overrides_of(config: Mapping[str, Any]) -> dict[str, bool | int | float]:
    """Return the fields of `ModelConfig` that a model's config.json states.

    Raises:
        ModelError: the decoder cannot hold this model, or a field is missing or malformed.
    """
    kind = config.get("model_type")
    if kind not in FAMILY:
        raise _cannot(f"model_type {kind!r}", f"one of {', '.join(map(repr, FAMILY))}")
    for name, values in FIXED.items():
        if config.get(name) not in values:
            raise _cannot(f"{name} = {config[name]!r}", repr(values[0]))
    dim, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    if config.get("head_dim") not in (None, dim // heads):
        raise _cannot(f"head_dim = {config['head_dim']!r}", f"hidden_size / heads = {dim // heads}")
    kv_heads = config.get("num_key_value_heads")
    return {
        "dim": dim,
        "num_layers": _integer(config, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": 0 if kv_heads in (None, heads) else _integer(config, "num_key_value_heads"),
        "ffn_dim": _integer(config, "intermediate_size"),
        "vocab_size": _integer(config, "vocab_size"),
        "max_seq_len": _integer(config, "max_position_embeddings"),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "rope_theta": _rope_theta(config),
        "norm_eps": _number(config, "rms_norm_eps", 1e-6),
    }


def config_of(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of a decoder, as `LlamaForCausalLM` reads it."""
    return {
        "architectures": [FAMILY["llama"]],
        "model_type": "llama",
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        # In `transformers` 5 rope_parameters, before it rope_theta.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
    }


def parts_of(config: ModelConfig) -> Iterator[tuple[str, tuple[RowRange, ...]]]:
    """Yield each weight of a decoder, without `.weight`, with the parts that theirs has of it."""
    vocab, dim, width = config.vocab_size, config.dim, config.ffn_dim
    q, kv = config.num_heads * config.head_dim, config.kv_heads * config.head_dim
    yield "embedding", (RowRange(name="model.embed_tokens", rows=vocab),)
    for number in range(config.num_layers):
        ours, theirs = f"blocks.{number}", f"model.layers.{number}"
        attention = f"{theirs}.self_attn"
        yield f"{ours}.attention_norm", (RowRange(name=f"{theirs}.input_layernorm", rows=dim),)
        yield (
            f"{ours}.attention.qkv",
            (
                RowRange(name=f"{attention}.q_proj", rows=q, heads=config.num_heads),
                RowRange(name=f"{attention}.k_proj", rows=kv, heads=config.kv_heads),
                RowRange(name=f"{attention}.v_proj", rows=kv),
            ),
        )
        yield f"{ours}.attention.out", (RowRange(name=f"{attention}.o_proj", rows=dim),)
        yield f"{ours}.ffn_norm", (RowRange(name=f"{theirs}.post_attention_layernorm", rows=dim),)
        yield (
            f"{ours}.ffn.gate_up",
            (
                RowRange(name=f"{theirs}.mlp.gate_proj", rows=width),
                RowRange(name=f"{theirs}.mlp.up_proj", rows=width),
            ),
        )
        yield f"{ours}.ffn.out", (RowRange(name=f"{theirs}.mlp.down_proj", rows=dim),)
    yield "norm", (RowRange(name="model.norm", rows=dim),)
    if not config.tied:
        yield "head", (RowRange(name="lm_head", rows=vocab),)


def load_(model: Decoder, folder: WeightFolder) -> None:
    """Copy the weights of an open folder into a decoder.

    Raises:
        ModelError: they are of another shape, or some are missing or left over.
    """
    params = dict(model.named_parameters())
    left = folder.names
    with torch.no_grad():
        for ours, parts in parts_of(model.config):
            whole = params[f"{ours}.weight"]
            start = 0
            for part in parts:
                place = whole[start : start + part.rows]
                name = f"{part.name}.weight"
                place.copy_(neighbours(folder.tensor(name, tuple(place.shape)), part.heads))
                start += part.rows
                left.discard(name)
    if model.config.tied:
        left.discard("lm_head.weight")  # some files hold it twice
    expect_none_left(folder, left)


def state_dict_of(model: Decoder) -> dict[str, Tensor]:
    """Return the weights of a decoder by the names of `LlamaForCausalLM`; mostly views."""
    params = dict(model.named_parameters())
    return {
        f"{name}.weight": rows
        for ours, parts in parts_of(model.config)
        for name, rows in split(params[f"{ours}.weight"].detach(), parts)
    }


def split(whole: Tensor, parts: tuple[RowRange, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield their parts of one of our weights, with the rows in their order."""
    pieces = torch.split(whole, [part.rows for part in parts])
    for part, piece in zip(parts, pieces, strict=True):
        yield part.name, halves(piece, part.heads)


def neighbours(rows_RD: Tensor, heads: int) -> Tensor:
    """Put the rows of a query or key matrix in our order: pairs beside each other."""
    return _reordered(rows_RD, heads, (2, -1))


def halves(rows_RD: Tensor, heads: int) -> Tensor:
    """Put the rows of a query or key matrix in their order: first halves of pairs first."""
    return _reordered(rows_RD, heads, (-1, 2))


def _reordered(rows_RD: Tensor, heads: int, pairs: tuple[int, int]) -> Tensor:
    if not heads:
        return rows_RD
    shape = rows_RD.shape
    return rows_RD.reshape(heads, *pairs, *shape[1:]).transpose(1, 2).reshape(shape)


def expect_none_left(folder: WeightFolder, left: set[str]) -> None:
    """Refuse weights for which a model has no place, except tables that follow from the config.

    Raises:
        ModelError: there are some.
    """
    tables = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
    more = sorted(name for name in left if not name.endswith(tables))
    if more:
        raise ModelError(
            f"the weights in {folder.path} have {more[0]!r} and {len(more) - 1} others for which "
            "the model has no place; name the folder of this model, or correct model.overrides"
        )


def _cannot(found: str, expected: str) -> ModelError:
    return ModelError(
        f"the built-in model cannot begin with these weights: config.json has {found}, expected "
        f"{expected}; train the class of `transformers` as a custom model (docs/recipes.md)"
    )


def _rope_theta(config: Mapping[str, Any]) -> float:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise _cannot(f"rope_parameters = {scaling!r}", "an object")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise _cannot(f"rope_type = {kind!r}", "'default'")
    if scaling.get("partial_rotary_factor") not in (None, 1):
        raise _cannot(f"partial_rotary_factor = {scaling['partial_rotary_factor']!r}", "1.0")
    return _number({**config, **scaling}, "rope_theta", 10_000.0)


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 0 < value < 1 << 40:
        raise _cannot(f"{name} = {value!r}", "a positive integer")
    return value


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise _cannot(f"{name} = {value!r}", "a positive number")
    return float(value)
