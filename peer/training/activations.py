"""The memory that a step of a built-in model takes beside parameters, gradients and moments.

This is what the forward pass keeps for the backward pass, and the most that the backward pass adds:
at the loss, or in a block. A block keeps, for each position:

    inputs of both norms, and normalised inputs       4 D
    inputs of products: qkv, out, gate_up, down       3 D + F
    qkv, and queries and keys after rotation          2 D + 3 E
    gate and up, and silu of gate                     3 F

In bfloat16 and float16 all but the first row take 2 bytes instead of 4, and the forward pass makes
copies of the matrices; the fused norm of GPUs keeps no normalised inputs. A model that recomputes
keeps the input of each block, and in the backward pass all of one block.

# B sequences, T positions, N = B T, D width, E width of all key heads, F of the feed-forward layer,
# V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.peer.training import models

FP32, HALF = 4, 2  # bytes of a value
LOSS_VALUES = 3  # of V: the log-softmax, its gradient, and that of the logits, all in fp32

# Parameters of `models.Decoder` that tell its shape.
EMBEDDING, HEAD = "embedding.weight", "head.weight"
QKV, GATE_UP = "attention.qkv.weight", "ffn.gate_up.weight"


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """The shape of a built-in model, as far as it counts here."""

    num_layers: int
    dim: int
    keys: int
    """E"""
    ffn_dim: int
    vocab_size: int
    tied: bool
    numel: int
    """Of all parameters."""
    matrices: int
    """Values of the matrices."""

    @classmethod
    def of(cls, layout: Layout) -> DecoderShape | None:
        """Return the shape of a whole built-in model; None if the layout is of another one."""
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        qkv = [shape for name, shape in shapes.items() if name.endswith(QKV)]
        gate_up = [shape for name, shape in shapes.items() if name.endswith(GATE_UP)]
        if not qkv or len(qkv) != len(gate_up) or EMBEDDING not in shapes:
            return None
        (vocab_size, dim), (rows, _), (gates, _) = shapes[EMBEDDING], qkv[0], gate_up[0]
        pairs = zip(layout.shapes, layout.sizes, strict=True)
        return cls(
            num_layers=len(qkv),
            dim=dim,
            keys=(rows - dim) // 2,
            ffn_dim=gates // 2,
            vocab_size=vocab_size,
            tied=HEAD not in shapes,
            numel=layout.numel,
            matrices=sum(size for shape, size in pairs if len(shape) == 2),
        )


@dataclass(frozen=True, kw_only=True)
class StepPass:
    """The pass of some sequences through a model, forward and backward."""

    shape: DecoderShape
    sequences: int
    seq_len: int
    recompute: bool = False
    half: bool = False
    """Whether products are in bfloat16 or float16, on a GPU."""
    documents: bool = False
    """Whether attention is masked by documents."""

    @property
    def bytes(self) -> int:
        """Return the most that exists at once beside all gradients, as an earlier pass left them.

        Copies of matrices last until the loss, and without recomputation until they are used again.
        """
        kept, copies = self._kept_bytes, self._copies_bytes
        block = self._block_bytes if self.recompute else copies
        return kept + max(copies + self._loss_bytes, block + self._backward_bytes)

    @property
    def more_bytes(self) -> int:
        """Return the same for a first pass, whose gradients come as activations go.

        The most is there at its beginning, without gradients, or in its last block, with all.
        """
        gradients = FP32 * self.shape.numel
        return max(self.bytes - gradients, self._block_bytes + self._backward_bytes)

    @property
    def least(self) -> StepPass:
        """Return the pass of one sequence whose activations are recomputed."""
        return replace(self, sequences=1, recompute=True)

    @property
    def _rows(self) -> int:
        return self.sequences * self.seq_len

    @property
    def _value(self) -> int:
        return HALF if self.half else FP32

    @property
    def _norm_bytes(self) -> int:
        return FP32 * self.shape.dim * (1 if self.half else 2)

    @property
    def _kept_bytes(self) -> int:
        shape = self.shape
        if self.recompute:
            return shape.num_layers * FP32 * shape.dim * self._rows
        return shape.num_layers * self._block_bytes

    @property
    def _block_bytes(self) -> int:
        shape = self.shape
        values = 5 * shape.dim + 3 * shape.keys + 4 * shape.ffn_dim
        masks = self._value * self.documents * self.sequences * self.seq_len**2
        return (2 * self._norm_bytes + self._value * values) * self._rows + masks

    @property
    def _copies_bytes(self) -> int:
        return HALF * self.shape.matrices * self.half

    @property
    def _loss_bytes(self) -> int:
        shape, logits = self.shape, self._rows * self.shape.vocab_size
        last_norm = (self._norm_bytes + self._value * shape.dim) * self._rows
        # Gradients of the output matrix by parts of the logits are added up beside its own.
        parts = 2 * FP32 * shape.vocab_size * shape.dim * (logits > models.LOGITS)
        return last_norm + FP32 * LOSS_VALUES * min(logits, models.LOGITS) + parts

    @property
    def _backward_bytes(self) -> int:
        shape = self.shape
        # The gradient of a tied matrix by the logits waits for that by the embedding.
        waiting = FP32 * shape.vocab_size * shape.dim * shape.tied
        return 2 * self._value * shape.ffn_dim * self._rows + waiting


def step_of(spec: RunSpec, layout: Layout, *, half: bool) -> StepPass | None:
    """Return the pass of a run's micro-batch; None if its model is not a whole built-in one.

    Args:
        spec: of the run.
        layout: of the model.
        half: whether products are in bfloat16 or float16, as on a GPU.
    """
    shape = None if spec.topology.num_stages > 1 else DecoderShape.of(layout)
    if shape is None:
        return None
    return StepPass(
        shape=shape,
        sequences=spec.inner.batch_size,
        seq_len=spec.data.seq_len,
        half=half and spec.inner.precision != "float32",
        documents=spec.data.packing == "documents",
    )
