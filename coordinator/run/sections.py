"""The sections of RUN.toml: one frozen model each, whose fields carry their own documentation.

What a field may be by itself is checked here; what fields may be together is checked by
`atoll.coordinator.run.spec.RunSpec`.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from atoll.compression import ErrorFeedback, parse
from atoll.coordinator.run.addresses import split_address
from atoll.optim import methods
from atoll.optim.reduction.robust import ReducerName
from atoll.optim.workers.schedules import QSR, Rate

_CUSTOM_MODEL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_OWN_KEYS = {
    "lr": "outer.lr",
    "momentum": "outer.momentum",
    "codec": "compression.codec",
    "feedback": "compression.feedback",
}
"""Options of methods that have a key of their own in RUN.toml."""

LONGEST = 10  # times the shortest window; a rate that falls to a tenth would ask for 100 times

Scalar = bool | int | float | str


class Section(BaseModel):
    """Frozen, strict, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunSection(Section):
    """The run as a whole."""

    name: str = Field(
        default="my-run",
        description="Name for people and file names: letters, digits, '.', '_', '-'.",
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of the first parameters and of the data order."
    )
    rounds: int = Field(
        default=0, ge=0, description="Rounds to train, then stop. 0: until the organiser stops it."
    )

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not _RUN_NAME.fullmatch(value):
            raise ValueError("expected 1 to 64 of: letters, digits, '.', '_', '-'")
        return value


class ModelSection(Section):
    """What is trained."""

    preset: str = Field(
        default="nano",
        min_length=1,
        description="Built-in model: 'nano' (about 1M parameters, for a CPU) up to '1b'.",
    )
    custom: str | None = Field(
        default=None,
        description="Your own model as 'module:function'; every peer must have it installed. "
        "Replaces the preset.",
        examples=["my_package.models:build"],
    )
    overrides: dict[str, Scalar] = Field(
        default_factory=dict,
        description="Fields of the preset to change, or arguments of the custom function.",
        examples=[{"num_layers": 6}],
    )

    @field_validator("custom")
    @classmethod
    def _custom(cls, value: str | None) -> str | None:
        if value is not None and not _CUSTOM_MODEL.fullmatch(value):
            raise ValueError("expected 'module:function', such as 'my_package.models:build'")
        return value


class DataSection(Section):
    """What it is trained on."""

    source: str = Field(
        default="stdlib",
        min_length=1,
        description="'stdlib' (the source of Python's own library, always there), a path of a "
        "file or folder on each peer, or a Hugging Face data set as 'hf:NAME'.",
    )
    format: Literal["auto", "text", "jsonl", "parquet", "hf"] = Field(
        default="auto", description="How to read the source: auto, text, jsonl, parquet or hf."
    )
    tokenizer: str = Field(
        default="bytes",
        min_length=1,
        description="'bytes' (256 tokens, nothing to download) or the path of a tokenizers JSON "
        "file.",
    )
    text_field: str = Field(
        default="text", min_length=1, description="Column that holds the text (jsonl, parquet, hf)."
    )
    valid_fraction: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="Share of the files (or documents) kept for validation.",
    )
    seq_len: int = Field(
        default=128, ge=8, le=1_048_576, description="Tokens in one training sequence."
    )


class InnerSection(Section):
    """The inner optimizer: AdamW, run by each peer alone between two rounds."""

    lr: float = Field(default=1.5e-3, gt=0, le=10, description="Peak learning rate.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay of the second moment.")
    weight_decay: float = Field(default=0.1, ge=0, le=10, description="Decoupled weight decay.")
    clip_norm: float = Field(
        default=1.0, ge=0, description="Largest L2 norm of a step's gradient. 0: no clipping."
    )
    warmup_steps: int = Field(
        default=30, ge=0, description="Inner steps from a rate of zero up to the peak."
    )
    min_lr_ratio: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Final rate as a share of the peak, reached by a cosine over run.rounds. "
        "Averaging over peers calms the steps already: 0.1 ends worse. "
        "Without an end of the run the rate stays at the peak.",
    )
    batch_size: int = Field(default=8, ge=1, description="Sequences in one micro-batch of a peer.")
    grad_accumulation: int = Field(
        default=1, ge=1, description="Micro-batches whose gradients make one inner step."
    )
    compile: bool = Field(
        default=False, description="Compile the model with torch.compile (slow to start)."
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Arithmetic of the forward pass: auto (bfloat16 on CUDA, else float32), "
        "float32 or bfloat16. Parameters are float32 in every case.",
    )

    @property
    def rate(self) -> Rate:
        """The schedule of the learning rate."""
        return Rate(peak=self.lr, warmup_steps=self.warmup_steps, min_ratio=self.min_lr_ratio)


class OuterSection(Section):
    """The outer optimizer: what the peers do together at the end of a window."""

    method: str = Field(
        default="diloco",
        description="Outer method, with options of its own in brackets: 'diloco', 'sparseloco', "
        "'streaming(count=4, tau=5)', ...",
    )
    inner_steps: int = Field(
        default=30,
        ge=1,
        le=100_000,
        description="Inner steps in a window, the H of DiLoCo: more of them, less traffic.",
    )
    windows: Literal["equal", "deadline", "qsr"] = Field(
        default="equal",
        description="'equal': inner_steps for every peer. 'deadline': as many as a peer does while "
        "the median one does inner_steps, within half to twice that, so that peers of several "
        "speeds are ready together. 'qsr': longer ones for all peers as the learning rate falls, "
        "(growth / rate)^2 steps, from inner_steps up to max_inner_steps.",
    )
    growth: float = Field(
        default=0.0,
        ge=0,
        description="Growth coefficient of 'qsr', the alpha of its paper: windows grow once the "
        "rate is below growth / sqrt(inner_steps + 1). 0 with other windows.",
    )
    max_inner_steps: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="Longest window of 'qsr'. 0: ten times inner_steps.",
    )
    lr: float | Literal["auto"] = Field(
        default="auto",
        description="Outer learning rate above 0, or 'auto': the method's; that of diloco follows "
        "the length of the run.",
    )
    momentum: float | Literal["auto"] = Field(
        default="auto", description="Outer momentum in [0, 1), or 'auto'."
    )

    @property
    def longest(self) -> int:
        """Steps of the longest window that the run has for all peers."""
        if self.windows != "qsr":
            return self.inner_steps
        return self.max_inner_steps or LONGEST * self.inner_steps

    @property
    def qsr(self) -> QSR:
        """The rule by which windows of QSR grow."""
        return QSR(shortest=self.inner_steps, longest=self.longest, growth=self.growth)

    @field_validator("method")
    @classmethod
    def _method(cls, value: str) -> str:
        elsewhere = sorted(methods.given(value) & _OWN_KEYS.keys())
        if elsewhere:
            keys = " and ".join(f"{name} as {_OWN_KEYS[name]}" for name in elsewhere)
            raise ValueError(f"expected {keys}, a key of its own in the file, got {value!r}")
        return value

    @field_validator("lr")
    @classmethod
    def _lr(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 < value <= 10:
            raise ValueError("expected 'auto' or a number above 0 and at most 10")
        return value

    @field_validator("momentum")
    @classmethod
    def _momentum(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 <= value < 1:
            raise ValueError("expected 'auto' or a number in [0, 1)")
        return value


class CompressionSection(Section):
    """What goes over the wire."""

    codec: str = Field(
        default="auto",
        description="Codec of the updates, both ways: 'int8', 'int4', 'topk(k=64)+2bit', ..., or "
        "'auto': the method's, int8 for diloco.",
    )
    feedback: float | Literal["auto"] = Field(
        default="auto",
        description="Share of what compression lost that is added to the next update, 0 for none, "
        "or 'auto': the method's, and 0 where the codec allows none.",
    )

    @field_validator("codec")
    @classmethod
    def _codec(cls, value: str) -> str:
        codec = None if value == "auto" else parse(value)
        if isinstance(codec, ErrorFeedback):
            raise ValueError(
                f"expected a codec whose frames stand alone, got {value!r}; peers keep what was "
                f'lost themselves: write codec = "{codec.codec.spec}" and '
                f"feedback = {codec.decay:g}"
            )
        return value

    @field_validator("feedback")
    @classmethod
    def _feedback(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 <= value <= 1:
            raise ValueError("expected 'auto' or a number between 0 and 1")
        return value


class RoundSection(Section):
    """How a round is held."""

    min_peers: int = Field(
        default=2, ge=1, le=4096, description="Peers that must be ready before the run starts."
    )
    grace_s: float = Field(
        default=3.0,
        gt=0,
        le=600,
        description="Seconds a ready group waits at most for late members, who then miss the round "
        "and lose nothing.",
    )
    stall_s: float = Field(
        default=1.5,
        ge=0.1,
        le=60,
        description="Seconds without a byte after which a peer counts as gone from the round.",
    )
    snapshot_every: int = Field(
        default=4,
        ge=1,
        le=1024,
        description="Positions between two state roots: snapshots that joiners can fetch.",
    )
    reducer: ReducerName = Field(
        default="mean",
        description="How the owner of a part reduces it: 'mean' (weighted), or, where peers are "
        "not trusted, 'trimmed-mean', 'median', 'centered-clip' or 'flag-aggregator'; these count "
        "all members alike.",
    )
    log_mb: int = Field(
        default=512,
        ge=1,
        description="Megabytes of old updates that each peer keeps for those who catch up.",
    )


class CoordinatorSection(Section):
    """Where the coordinator lives. May change between restarts without changing the run."""

    listen: str = Field(
        default="0.0.0.0:7700", description="Address of the gRPC service, 'host:port'."
    )
    advertise: str | None = Field(
        default=None,
        description="Host name or IP address that peers reach this machine by. Left out: found by "
        "itself.",
        examples=["203.0.113.7"],
    )
    dht_listen: str = Field(
        default="0.0.0.0:7701",
        description="Address of the run's first DHT node, 'host:port'; peers meet there.",
    )
    invite_only: bool = Field(
        default=True, description="Admit only peers that hold the invite's token."
    )
    admission_hours: float = Field(
        default=168.0,
        gt=0,
        le=24 * 366,
        description="Hours an admission lasts; renewed while the peer is in touch.",
    )
    checkpoint_every: int = Field(
        default=25,
        ge=0,
        description="Positions between two checkpoints. 0: only at the end of the run.",
    )
    keep_checkpoints: int = Field(
        default=3,
        ge=0,
        description="How many of the newest checkpoints are kept; of older ones every tenth stays. "
        "0: all.",
    )
    metrics_listen: str | None = Field(
        default=None,
        description="Address of a Prometheus endpoint, 'host:port'. Left out: none.",
        examples=["127.0.0.1:9700"],
    )

    @field_validator("listen", "dht_listen", "metrics_listen")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value
