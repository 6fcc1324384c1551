"""Decoder-only transformers in the style of Llama, and the contract for custom models.

The built-in model has RMSNorm (arXiv:1910.07467) before each block, rotary positions
(RoPE, arXiv:2104.09864), SwiGLU (arXiv:2002.05202) and optional grouped
key/value heads (arXiv:2305.13245). Departures: query, key and value are one matrix, and so are gate
and up, so that a layer computes two large products instead of five small ones; the output
matrices of residual branches are initialised smaller by `sqrt(2 * layers)`.

A custom model is named `"module:function"`. The function is marked, so that a run can name no other
one, and called with keywords::

    from atoll.peer.training.models import model

    @model
    def build(*, vocab_size: int, seq_len: int, **overrides) -> torch.nn.Module: ...

It returns a module with one of two signatures:

- `forward(tokens_BT) -> logits_BTV`: Atoll computes the cross-entropy. The causal language models
  of `transformers` fit as they are: their logits are the result's `logits`;
- `forward(tokens_BT, targets_BT) -> loss`: a scalar, the mean over all positions. If the second
  parameter has a default, a call without it must return logits; sampling needs them.

If all peers bring their own training loop (docs/library.md), the model may take anything. Its
function is called with the spec's overrides only::

    @model(tokens=False)
    def build(**overrides) -> torch.nn.Module: ...

A model that a run may cut into stages is given as slices: a function for each, which builds it. A
peer calls only those of its own stage (`atoll.peer.training.stages` has the contract)::

    @model(slices=True)
    def build(*, vocab_size: int, seq_len: int, **overrides) -> list[Callable[[], nn.Module]]: ...

Peers share only floating-point parameters with `requires_grad`, not buffers, so a model must not
keep anything it learns in a buffer.

# B sequences, T positions, V vocabulary, D width, H heads, K key/value heads, E width of a head
"""

import copy
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, overload

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atoll.peer.errors import ModelError

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])

SliceBuilder = Callable[[], nn.Module]
"""Builds one slice of a model that can be cut into stages."""

Slicer = TypeVar("Slicer", bound=Callable[..., Sequence[SliceBuilder]])

_marked: set[object] = set()
"""Functions with the mark, by identity: an attribute would pass to what copies or wraps them."""

_without_tokens: set[object] = set()
"""Marked functions whose models take something other than tokens."""

_in_slices: set[object] = set()
"""Marked functions that return the builders of a model's slices instead of the model."""

INIT_STD = 0.02  # GPT-2's; larger values make the first steps of wide models unstable

LOGITS = 1 << 26  # values that exist at once: 256 MiB in float32, and as much for their gradient


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder."""

    dim: int
    """Width of the residual stream."""
    num_layers: int
    """Number of blocks."""
    num_heads: int
    """Query heads; `dim / num_heads` is the width of a head and must be even."""
    ffn_dim: int
    """Width of the gated feed-forward layer."""
    num_kv_heads: int = 0
    """Key/value heads, a divisor of `num_heads`; 0 means `num_heads`."""
    vocab_size: int = 256
    """Number of different tokens; set from the tokenizer of the run."""
    max_seq_len: int = 128
    """Longest sequence, and the length of the RoPE tables; set from the data of the run."""
    tied: bool = True
    """True if the embedding is also the output matrix."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square before the root."""

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "ffn_dim", "vocab_size", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ModelError(f"model {name} must be at least 1, got {getattr(self, name)}")
        if self.dim % (2 * self.num_heads):
            raise ModelError(
                f"model dim must be an even multiple of num_heads, got dim={self.dim} and "
                f"num_heads={self.num_heads}; try dim={self.num_heads * 64}"
            )
        if self.num_kv_heads < 0 or self.num_heads % self.kv_heads:
            raise ModelError(
                f"model num_kv_heads must divide num_heads={self.num_heads} (or be 0 for "
                f"num_heads), got {self.num_kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads in use."""
        return self.num_kv_heads or self.num_heads

    @property
    def num_params(self) -> int:
        """Number of parameters, without building the model: a spec may name any width."""
        heads = self.num_heads + 2 * self.kv_heads
        attention = self.dim * self.head_dim * heads + self.dim * self.dim
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        tables = 1 if self.tied else 2
        return tables * self.vocab_size * self.dim + self.num_layers * block + self.dim


# Parameters without the tokenizer's embedding: 0.88M, 3.2M, 10.6M, 31M, 154M, 346M, 973M.
PRESETS: dict[str, ModelConfig] = {
    "nano": ModelConfig(dim=192, num_layers=2, num_heads=3, ffn_dim=512),
    "micro": ModelConfig(dim=256, num_layers=4, num_heads=4, ffn_dim=704),
    "mini": ModelConfig(dim=384, num_layers=6, num_heads=6, ffn_dim=1024),
    "30m": ModelConfig(dim=512, num_layers=9, num_heads=8, ffn_dim=1536),
    "150m": ModelConfig(dim=1024, num_layers=12, num_heads=16, ffn_dim=2816),
    "350m": ModelConfig(dim=1024, num_layers=24, num_heads=16, ffn_dim=3328),
    "1b": ModelConfig(
        dim=2048, num_layers=16, num_heads=32, num_kv_heads=8, ffn_dim=8192, rope_theta=500_000.0
    ),
}


class Rope(nn.Module):
    """Rotates query and key heads by their position.

    The table is computed once, in float64. It follows from the configuration, so it is not part of
    the state.
    """

    turn: Tensor
    """`(T, 1, E/2, 2)`: cosine and sine of each position's angle for each pair of values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        half = config.head_dim // 2
        frequency_E = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        positions_T = torch.arange(config.max_seq_len, dtype=torch.float64)
        angle_T1E = torch.outer(positions_T, frequency_E)[:, None, :]
        turn = torch.stack((angle_T1E.cos(), angle_T1E.sin()), dim=-1)
        self.register_buffer("turn", turn.float(), persistent=False)

    def forward(self, x_BTHE: Tensor, start: int = 0) -> Tensor:
        """Rotate neighbouring pairs of values in every head; return the shape of `x_BTHE`.

        Args:
            x_BTHE: of consecutive positions.
            start: the first of them.
        """
        turn = self.turn[start : start + x_BTHE.shape[1]]
        pairs = x_BTHE.view(*x_BTHE.shape[:-1], -1, 2)
        eager = x_BTHE.device.type == "cpu" and not torch.compiler.is_compiling()
        if eager and x_BTHE.dtype == torch.float32:  # half the time; torch.compile lacks complex
            turned = torch.view_as_complex(pairs) * torch.view_as_complex(turn)
            return torch.view_as_real(turned).flatten(-2)
        return rotate(pairs, turn).flatten(-2).to(x_BTHE.dtype)


def rotate(pairs: Tensor, turn: Tensor) -> Tensor:
    """Rotate each pair in the last dimension by an angle given as cosine and sine."""
    (a, b), (cos, sin) = pairs.unbind(-1), turn.unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)


class SliceCache:
    """The memory of a slice, or a block, about the positions of one text that it has seen."""

    def __init__(self, max_rows: int) -> None:
        """Begin without a position; a text has at most `max_rows`."""
        self.max_rows = max_rows
        self.rows = 0
        """positions that it has seen; whoever calls the slices counts them"""
        self.kept: dict[str, Tensor] = {}
        """buffers by names that the slice chooses"""

    def appended(self, name: str, new: Tensor, *, dim: int) -> Tensor:
        """Write new positions behind those that a buffer holds; return a view of all.

        Args:
            name: of the buffer, which is made with the first positions.
            new: of the positions from `rows` on.
            dim: that counts positions.
        """
        length = new.shape[dim]
        if self.rows + length > self.max_rows:
            raise ValueError(f"expected at most {self.max_rows} positions, got more")
        if name not in self.kept:
            shape = list(new.shape)
            shape[dim] = self.max_rows
            self.kept[name] = new.new_empty(shape)  # the system gives pages as they are written
        held = self.kept[name]
        held.narrow(dim, self.rows, length).copy_(new)
        return held.narrow(dim, 0, self.rows + length)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.kv_heads = config.num_heads, config.kv_heads
        self.head_dim = config.head_dim
        heads = self.num_heads + 2 * self.kv_heads
        self.qkv = nn.Linear(config.dim, heads * self.head_dim, False)
        self.out = nn.Linear(config.dim, config.dim, False)

    def forward(self, x_BTD: Tensor, rope: Rope, mask_B1TT: Tensor | None = None) -> Tensor:
        """Mix each position of `x_BTD` with itself and the earlier ones, or those of a mask."""
        query, key, value = self._heads(x_BTD, rope, 0)
        return self._mixed(query, key, value, mask_B1TT, is_causal=mask_B1TT is None)

    def extend(self, x_BTD: Tensor, rope: Rope, cache: SliceCache) -> Tensor:
        """Mix new positions with themselves and those in the cache, which takes them too."""
        start, length = cache.rows, x_BTD.shape[1]
        query, key, value = self._heads(x_BTD, rope, start)
        keys = cache.appended("key", key, dim=2)
        values = cache.appended("value", value, dim=2)
        mask_TS = None
        if start and length > 1:
            every = torch.ones(length, start + length, dtype=torch.bool, device=x_BTD.device)
            mask_TS = every.tril(start)
        return self._mixed(query, keys, values, mask_TS, is_causal=not start)

    def _heads(self, x_BTD: Tensor, rope: Rope, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, each `(B, heads, T, E)`."""
        batch, length, _ = x_BTD.shape
        qkv_BTHE = self.qkv(x_BTD).view(batch, length, -1, self.head_dim)
        rotated, value = qkv_BTHE.split([self.num_heads + self.kv_heads, self.kv_heads], dim=2)
        query, key = rope(rotated, start).split([self.num_heads, self.kv_heads], dim=2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _mixed(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool
    ) -> Tensor:
        mixed_BHTE = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,
            enable_gqa=self.kv_heads != self.num_heads,
        )
        batch, _, length, _ = query.shape
        return cast(Tensor, self.out(mixed_BHTE.transpose(1, 2).reshape(batch, length, -1)))


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.ffn_dim, False)
        self.out = nn.Linear(config.ffn_dim, config.dim, False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each position of `x_BTD` independently."""
        gate, up = self.gate_up(x_BTD).chunk(2, dim=-1)
        return cast(Tensor, self.out(F.silu(gate) * up))


class Block(nn.Module):
    """Attention, then feed-forward, each after a norm and with a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x_BTD: Tensor, rope: Rope, mask_B1TT: Tensor | None = None) -> Tensor:
        """Return the residual stream after the block."""
        return self._fed(x_BTD + self.attention(self.attention_norm(x_BTD), rope, mask_B1TT))

    def extend_by(self, x_BTD: Tensor, rope: Rope, cache: SliceCache) -> Tensor:
        """Return the residual stream of new positions after the block."""
        normed_BTD = self.attention_norm(x_BTD)
        return self._fed(x_BTD + self.attention.extend(normed_BTD, rope, cache))

    def _fed(self, x_BTD: Tensor) -> Tensor:
        return cast(Tensor, x_BTD + self.ffn(self.ffn_norm(x_BTD)))


class Decoder(nn.Module):
    """A decoder-only transformer; the module docstring lists its sources."""

    recomputes: bool = False
    """Whether blocks compute their activations again in the backward pass, to save memory."""
    document_end: int | None = None
    """Token that ends a document and begins the next one, which attends to nothing before it; None
    takes a sequence for one document."""

    def __init__(self, config: ModelConfig) -> None:
        """Draw fresh weights from torch's current random state."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.rope = Rope(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, False)
        if config.tied:
            self.head.weight = self.embedding.weight
        initialise_(self, config)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return the logits of the next tokens, or the loss if targets are given.

        Args:
            tokens_BT: int64 tokens, at most `config.max_seq_len` positions.
            targets_BT: int64, the token after each position.

        Returns:
            Logits `(B, T, V)`, or the mean cross-entropy in nats as a float32 scalar.
        """
        mask_B1TT = None
        if self.document_end is not None:
            mask_B1TT = same_document(tokens_BT, self.document_end)
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            if self.recomputes and torch.is_grad_enabled():
                # The blocks draw no random numbers.
                x_BTD = cast(
                    Tensor,
                    checkpoint(
                        block,
                        x_BTD,
                        self.rope,
                        mask_B1TT,
                        use_reentrant=False,
                        preserve_rng_state=False,
                    ),
                )
            else:
                x_BTD = block(x_BTD, self.rope, mask_B1TT)
        x_BTD = self.norm(x_BTD)
        if targets_BT is None:
            return cast(Tensor, self.head(x_BTD))
        return loss_after(self.head, x_BTD, targets_BT, width=self.config.vocab_size)


def initialise_(module: nn.Module, config: ModelConfig) -> None:
    """Draw the matrices of a decoder, or of a part of one, from normal distributions.

    The output matrices of residual branches have a narrower one.
    """
    residual_std = INIT_STD / math.sqrt(2 * config.num_layers)
    for name, param in module.named_parameters():
        if param.dim() > 1:
            std = residual_std if name.endswith("out.weight") else INIT_STD
            nn.init.normal_(param, std=std)


def same_document(tokens_BT: Tensor, end: int) -> Tensor:
    """Return which positions each one attends to, bool `(B, 1, T, T)`: earlier, same document.

    The end of a document is predicted from it, and is itself the first position of the next one: so
    every target counts, and none is predicted from another document.
    """
    document_BT = (tokens_BT == end).cumsum(1, dtype=torch.int32)
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    return same_BTT.tril()[:, None]


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, computed in float32."""
    return loss_after(nn.Identity(), logits_BTV, targets_BT, width=logits_BTV.shape[-1])


def loss_after(head: nn.Module, x_BTD: Tensor, targets_BT: Tensor, *, width: int) -> Tensor:
    """Return the mean cross-entropy in nats of the logits that a head gives.

    If the logits are more than `LOGITS` values, only those of some positions exist at a time: they
    are computed again in the backward pass. This costs one more product by the head.

    Args:
        head: gives `(..., width)` for `(..., D)`, each position by itself.
        x_BTD: what goes into the head.
        targets_BT: int64.
        width: V.
    """
    x_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
    if len(targets_N) * width <= LOGITS:
        return F.cross_entropy(head(x_BTD).float().flatten(0, 1), targets_N)
    rows = max(1, LOGITS // width)
    total = torch.zeros((), device=x_ND.device)
    for x_RD, targets_R in zip(torch.split(x_ND, rows), torch.split(targets_N, rows), strict=True):
        if torch.is_grad_enabled():
            part = cast(
                Tensor,
                checkpoint(
                    _summed,
                    head,
                    x_RD,
                    targets_R,
                    use_reentrant=False,
                    preserve_rng_state=False,
                ),
            )
        else:
            part = _summed(head, x_RD, targets_R)
        total = total + part
    return total / len(targets_N)


def _summed(head: nn.Module, x_RD: Tensor, targets_R: Tensor) -> Tensor:
    return F.cross_entropy(head(x_RD).float(), targets_R, reduction="sum")


def separate_documents(model: nn.Module, end: int | None) -> None:
    """Let no document attend to another one in its sequence.

    Raises:
        ModelError: the model is a custom one, or the tokenizer has no token that ends a document.
    """
    if not isinstance(model, Decoder):
        raise ModelError(
            "data.packing = 'documents' is for the built-in models: a custom model sees the end "
            "of a document in its tokens, and masks what it attends to itself; remove the setting"
        )
    if end is None:
        raise ModelError(
            "data.packing = 'documents' needs a tokenizer that ends documents with a token of its "
            "own, and this one has none; remove the setting"
        )
    model.document_end = end


def can_recompute(model: nn.Module) -> bool:
    """Return whether `recompute_activations` changes anything in a model."""
    return isinstance(model, Decoder) or callable(
        getattr(model, "gradient_checkpointing_enable", None)
    )


def recompute_activations(model: nn.Module) -> None:
    """Keep only the inputs of blocks for the backward pass, which then takes a forward pass more.

    Built-in models and those of `transformers` can; others stay as they are.
    """
    if isinstance(model, Decoder):
        model.recomputes = True
    elif can_recompute(model):
        enable = cast("Callable[..., None]", model.gradient_checkpointing_enable)
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def preset(
    name: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    vocab_size: int,
    seq_len: int,
) -> ModelConfig:
    """Return the configuration of a preset with some fields changed.

    Args:
        name: a key of `PRESETS`.
        overrides: fields of `ModelConfig`; `vocab_size` and `max_seq_len` override the data's.
        vocab_size: number of tokens of the run's tokenizer.
        seq_len: positions per sequence of the run.

    Raises:
        ModelError: an unknown preset or field, a value of the wrong type or an impossible shape.
    """
    if name not in PRESETS:
        raise ModelError(f"unknown model preset {name!r}; the presets are {', '.join(PRESETS)}")
    changes = {"vocab_size": vocab_size, "max_seq_len": seq_len, **(overrides or {})}
    kinds = {field.name: field.type for field in fields(ModelConfig)}
    for key, value in changes.items():
        _check_override(key, value, kinds)
    config = replace(PRESETS[name], **changes)
    if config.vocab_size < vocab_size or config.max_seq_len < seq_len:
        raise ModelError(
            f"the model must hold {vocab_size} tokens and {seq_len} positions, but the overrides "
            f"set vocab_size={config.vocab_size} and max_seq_len={config.max_seq_len}; drop them"
        )
    return config


def _check_override(key: str, value: object, kinds: Mapping[str, Any]) -> None:
    if key not in kinds:
        raise ModelError(f"unknown model override {key!r}; the fields are {', '.join(kinds)}")
    kind = kinds[key]
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits:
        raise ModelError(f"model override {key} must be {kind.__name__}, got {value!r}")


@overload
def model(function: Builder) -> Builder: ...


@overload
def model(*, tokens: bool = True) -> Callable[[Builder], Builder]: ...


@overload
def model(*, slices: Literal[True]) -> Callable[[Slicer], Slicer]: ...


# The overloads give the types.
def model(function: Any = None, *, tokens: bool = True, slices: bool = False) -> Any:
    """Mark a function of your own that builds a model, so that a run may name it.

    The mark keeps a run from calling anything else that its module contains or imports. It does not
    allow the function: each peer's owner does, with `--allow-model`.

    Args:
        function: the function, if the mark has no arguments.
        tokens: False for a model that takes something other than tokens; only training loops of
            your own can train it.
        slices: True for a function that returns a list of functions, each of which builds one
            slice of the model; such a model takes tokens.
    """

    def mark(builder: Builder) -> Builder:
        _marked.add(builder)
        if not tokens:
            _without_tokens.add(builder)
        if slices:
            _in_slices.add(builder)
        return builder

    return mark if function is None else mark(function)


def build(
    preset_name: str = "nano",
    *,
    custom: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    vocab_size: int,
    seq_len: int,
    seed: int,
    allowed: Collection[str] = (),
    own_loop: bool = False,
    source_sha256: str | None = None,
) -> nn.Module:
    """Build the model of a run on the CPU, with weights that depend on `seed` alone.

    Leave the caller's random state unchanged.

    Args:
        preset_name: a key of `PRESETS`; ignored when `custom` is given.
        custom: `"module:function"`, as the module docstring describes.
        overrides: fields of `ModelConfig`, or additional keywords of the custom function.
        vocab_size: number of tokens of the run's tokenizer.
        seq_len: positions per sequence of the run.
        seed: seed of the weights.
        allowed: custom models that this machine's owner allows; nothing else is imported.
        own_loop: accept a model that takes no tokens, which only a loop of its own can train.
        source_sha256: digest of the custom model's source, in hex; None accepts any source.

    Raises:
        ModelError: the preset, the overrides or the custom model are not usable.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        if custom is None:
            return Decoder(preset(preset_name, overrides, vocab_size=vocab_size, seq_len=seq_len))
        function = _find_custom(custom, allowed, source_sha256)
        if function in _in_slices:
            raise ModelError(
                f"model {custom!r} gives slices, for a run that is cut into stages; set stages in "
                "[topology], or name a function marked with @model that returns the whole model"
            )
        keywords = dict(overrides or {})
        takes_tokens = function not in _without_tokens
        if takes_tokens:
            keywords = {"vocab_size": vocab_size, "seq_len": seq_len, **keywords}
        elif not own_loop:
            raise ModelError(
                f"model {custom!r} takes no tokens, so only a training loop of its own can train "
                "it; join with `connect` (docs/library.md) instead of `atoll peer`"
            )
        model = _call_custom(custom, function, keywords)
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"model {custom!r} must return a torch.nn.Module, got {type(model).__name__}"
            )
        _check_parameters(custom, model)
        if takes_tokens:
            _check_shapes(custom, model, seq_len)
        return model


def slice_builders(
    custom: str,
    *,
    overrides: Mapping[str, Any] | None = None,
    vocab_size: int,
    seq_len: int,
    allowed: Collection[str] = (),
    source_sha256: str | None = None,
) -> Sequence[SliceBuilder]:
    """Return the functions that build the slices of a custom model; call none of them.

    Args: as `build`.

    Raises:
        ModelError: the model is not usable, or cannot be cut into stages.
    """
    function = _find_custom(custom, allowed, source_sha256)
    if function not in _in_slices:
        raise ModelError(
            f"model {custom!r} cannot be cut into stages: its function returns the whole model; "
            "name one marked with @model(slices=True) that returns a list of functions, each of "
            "which builds a slice, or remove stages from [topology]"
        )
    keywords = {"vocab_size": vocab_size, "seq_len": seq_len, **(overrides or {})}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        builders = _call_custom(custom, function, keywords)
    if not isinstance(builders, (list, tuple)):
        raise ModelError(
            f"model {custom!r} must return a list with a function for each slice, got "
            f"{type(builders).__name__}"
        )
    for index, builder in enumerate(builders):
        # A module can be called too, but it exists already, and every peer would hold it.
        if isinstance(builder, nn.Module) or not callable(builder):
            raise ModelError(
                f"slice {index} of model {custom!r} must be a function that builds it, got "
                f"{type(builder).__name__}; write `lambda: Module(...)` or functools.partial, so "
                "that a peer builds the slices of its own stage alone"
            )
    return builders


def expect_allowed(custom: str, allowed: Collection[str]) -> None:
    """Check that the owner of this machine allows a custom model; import nothing.

    Raises:
        ModelError: the name is malformed, or not among those allowed.
    """
    if not all(custom.partition(":")):
        raise ModelError(f'a custom model is named "module:function", got {custom!r}')
    if custom not in allowed:
        raise ModelError(
            f"the run names the custom model {custom!r}, code on this machine that its owner has "
            f"not allowed; read that code, then pass --allow-model {custom}"
        )


def expect_source(custom: str, sha256: str | None) -> None:
    """Check that an allowed custom model has the run's source; do not import its module.

    Raises:
        ModelError: its source is another, or it has none.
    """
    if sha256 is None:
        return
    found = source_sha256(custom)
    if found != sha256:
        has = "has no source file" if found is None else f"has the SHA-256 {found[:12]}"
        raise ModelError(
            f"the source of model {custom!r} is not the run's: expected the SHA-256 {sha256[:12]}, "
            f"but the file on this machine {has}; install the organiser's version, or pass "
            "--any-model-source if yours computes the same"
        )


def source_sha256(custom: str) -> str | None:
    """Return the digest, in hex, of the file that defines an allowed custom model.

    It covers that file alone, not what the file imports. The packages around the module are
    imported, the module is not.

    Returns:
        None if the module has no source file.

    Raises:
        ModelError: there is no such module.
    """
    module_name = custom.partition(":")[0]
    _search_here()
    try:
        found = importlib.util.find_spec(module_name)
    except Exception as error:
        raise _cannot_import(custom, f"{type(error).__name__}: {error}") from error
    if found is None:
        raise _cannot_import(custom, "no such module")
    if not found.has_location or found.origin is None or not found.origin.endswith(".py"):
        return None
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()


def _search_here() -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last, so that a file here cannot shadow an installed module


def _cannot_import(custom: str, reason: str) -> ModelError:
    return ModelError(
        f"model {custom!r}: cannot import {custom.partition(':')[0]!r} ({reason}); install it, or "
        f"start from the folder that contains it (now {Path.cwd()})"
    )


def _call_custom(
    custom: str, function: Callable[..., object], keywords: Mapping[str, Any]
) -> object:
    try:
        return function(**keywords)
    except Exception as error:
        raise ModelError(
            f"model {custom!r} failed when called with {', '.join(keywords)} as keywords: "
            f"{type(error).__name__}: {error}"
        ) from error


def _find_custom(
    custom: str, allowed: Collection[str], sha256: str | None = None
) -> Callable[..., object]:
    expect_allowed(custom, allowed)  # before its module is imported, which runs code
    expect_source(custom, sha256)
    module_name, _, function_name = custom.partition(":")
    _search_here()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise _cannot_import(custom, f"{type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ModelError(f"model {custom!r}: {module_name!r} has no function {function_name!r}")
    # The module must define it: a marked function of another one was not what the owner allowed.
    is_marked = any(function is each for each in _marked)
    if not is_marked or getattr(function, "__module__", None) != module_name:
        raise ModelError(
            f"model {custom!r}: expected a function that {module_name!r} defines and marks as a "
            "model; put @model from atoll.peer.training.models on it"
        )
    return cast("Callable[..., object]", function)


def _check_parameters(custom: str, model: nn.Module) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained or not all(p.is_floating_point() for p in trained):
        raise ModelError(f"model {custom!r} must have trainable parameters, all floating-point")


def _check_shapes(custom: str, model: nn.Module, seq_len: int) -> None:
    """Raise ModelError if a model's result has a shape that breaks the contract.

    A copy without values computes it. Any other failure means nothing yet: some kernels run on a
    GPU only, and some results depend on values.
    """
    tokens_BT = torch.zeros(2, min(seq_len, 8), dtype=torch.int64, device="meta")
    try:
        empty = copy.deepcopy(model, _without_values(model))
        with torch.no_grad():
            loss_of(empty, tokens_BT, tokens_BT)
    except ModelError as error:
        raise ModelError(f"model {custom!r}: {error}") from error
    except Exception:
        return  # `expect_runs` reports it, on the device of a peer that trains


def _without_values(model: nn.Module) -> dict[int, Any]:
    """Return what `deepcopy` takes instead of each parameter and buffer."""
    memo: dict[int, Any] = {id(value): value.to("meta") for value in model.buffers()}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
    return memo


def expect_runs(
    custom: str, model: nn.Module, device: torch.device, *, vocab_size: int, seq_len: int
) -> None:
    """Run one tiny forward and backward pass of a custom model on the device that it is on.

    Raises:
        ModelError: it breaks the contract.
    """
    tokens_BT = (torch.arange(2 * min(seq_len, 8)).view(2, -1) % vocab_size).to(device)
    try:
        loss = loss_of(model, tokens_BT, tokens_BT)
        loss.backward()  # type: ignore[no-untyped-call]
    except ModelError as error:
        raise ModelError(f"model {custom!r}: {error}") from error
    except Exception as error:
        raise ModelError(
            f"model {custom!r} failed on tokens of shape {tuple(tokens_BT.shape)}: "
            f"{type(error).__name__}: {error}; if it takes something else and all peers bring "
            "their own training loop, mark its function with @model(tokens=False)"
        ) from error
    model.zero_grad(set_to_none=True)


def takes_targets(model: nn.Module) -> bool:
    """Return whether `model.forward` takes targets as its second positional parameter."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    uncompiled = getattr(model, "_orig_mod", model)
    parameters = inspect.signature(uncompiled.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in positional]
    # In `transformers` the targets are `labels`, further behind; a mask or a cache is second.
    return len(names) >= 2 and "labels" not in names[2:]


def loss_of(model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean loss of `model` on a batch, for either signature of the contract.

    Raises:
        ModelError: the result does not have the shape that the contract requires.
    """
    if takes_targets(model):
        loss = cast(Tensor, model(tokens_BT, targets_BT))
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise ModelError(
                f"forward(tokens, targets) must return a scalar, got {_shape(loss)}; wrap the "
                "model in a module of three lines, whose forward(tokens) returns the logits "
                "(docs/library.md)"
            )
        return loss
    return cross_entropy(logits_of(model, tokens_BT), targets_BT)


def logits_of(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """Return the logits `(B, T, V)` of a model.

    Raises:
        ModelError: the model returns something else.
    """
    output = model(tokens_BT)
    logits_BTV = cast(Tensor, getattr(output, "logits", output))
    fits = isinstance(logits_BTV, Tensor) and logits_BTV.dim() == 3
    if not fits or logits_BTV.shape[:2] != tokens_BT.shape:
        batch, length = tokens_BT.shape
        raise ModelError(
            f"forward(tokens) must return logits of shape ({batch}, {length}, vocabulary), or an "
            f"object with them as `logits`; got {_shape(logits_BTV)}"
        )
    return logits_BTV


def _shape(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
