"""A stage that computes texts with the synced parameters of its log, beside the one that trains.

It is a module without values of its own: before each computation its parameters become views of the
state's vector, so it holds no copy of them, whatever position a session reads. It computes in
float32 on the CPU, where the state is, as `atoll sample` does with a checkpoint.

# T positions, D width, V vocabulary, N parameters
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from atoll.optim.state.layout import Layout
from atoll.peer.errors import ModelError
from atoll.peer.inference.messages import TextShape
from atoll.peer.training.models import SliceCache
from atoll.peer.training.stages import StageModel


class BadPayload(ValueError):
    """A question holds an id outside the vocabulary, or a number that is not finite."""


class ServedStage:
    """One stage, bound to one state at a time; for one thread."""

    def __init__(self, model: StageModel, num_logits: int) -> None:
        """Take over a stage on the CPU; its values are dropped.

        Args:
            model: the stage.
            num_logits: that the last stage gives for a position.
        """
        self.shape = TextShape(
            is_first=model.is_first,
            is_last=model.is_last,
            width=model.shape.width,
            vocab_size=model.shape.vocab_size,
            num_logits=num_logits,
            max_rows=model.shape.seq_len,
        )
        self._layout = Layout.of(model)
        self._model = model.eval()
        self._places = [_place(model, name) for name in self._layout.names]
        for module, name in self._places:  # as plain attributes they may be any tensors
            del module._parameters[name]

    def cache_bytes(self, rows: int) -> int:
        """Return what a session of so many positions keeps."""
        return self._model.cache_bytes(rows)

    def caches(self, max_rows: int) -> list[SliceCache]:
        """Return the empty caches of a session."""
        return self._model.caches(max_rows)

    def expect_extends(self, params_N: Tensor) -> None:
        """Compute two positions, one after the other.

        Raises:
            ModelError: the stage cannot continue a text.
        """
        caches, row = self.caches(2), bytes(self.shape.row_bytes)
        try:
            for _ in range(2):
                self.extend(params_N, caches, memoryview(row), 1)
        except ModelError:
            raise
        except Exception as error:  # of a custom model's own code
            raise ModelError(
                f"the {self._model.title} failed at a position of its own: "
                f"{type(error).__name__}: {error}; its slices must take sequences of any length, "
                "and the last one must return logits if it is given no targets"
            ) from error

    def extend(
        self, params_N: Tensor, caches: list[SliceCache], payload: memoryview, rows: int
    ) -> bytes:
        """Compute new positions of a text.

        Args:
            params_N: of the state that the session reads.
            caches: of the session.
            payload: of the question, of the right length.
            rows: new positions.

        Returns:
            The payload of the answer.

        Raises:
            BadPayload: an id or a number is out of range.
            ModelError: the model gives another shape than its contract says, or is not finite.
        """
        with torch.inference_mode():
            inputs = self._inputs(payload, rows)
            for (module, name), piece in zip(
                self._places, self._layout.split(params_N), strict=True
            ):
                setattr(module, name, piece)
            output = self._model.extend(inputs, caches)
            return self._payload(output, rows)

    def _inputs(self, payload: memoryview, rows: int) -> Tensor:
        """Return `tokens_1T` or `x_1TD`."""
        if self.shape.is_first:
            ids = torch.from_numpy(np.frombuffer(payload, dtype="<i4").astype(np.int64))
            if int(ids.min()) < 0 or int(ids.max()) >= self.shape.vocab_size:
                raise BadPayload(f"expected ids from 0 to {self.shape.vocab_size - 1}")
            return ids.view(1, rows)
        x_1TD = torch.from_numpy(np.frombuffer(payload, dtype="<f4").astype(np.float32))
        if not torch.isfinite(x_1TD).all():
            raise BadPayload("expected finite numbers")
        return x_1TD.view(1, rows, self.shape.width)

    def _payload(self, output: Tensor, rows: int) -> bytes:
        if self.shape.is_last and output.dim() == 3:
            output = output[:, -1:]
        expected = (
            (1, 1, self.shape.num_logits)
            if self.shape.is_last
            else (
                1,
                rows,
                self.shape.width,
            )
        )
        if tuple(output.shape) != expected:
            raise ModelError(
                f"expected an output of shape {expected} from the {self._model.title}, got "
                f"{tuple(output.shape)}"
            )
        if not torch.isfinite(output).all():
            raise ModelError(f"the {self._model.title} gave numbers that are not finite")
        return output.float().contiguous().numpy().astype("<f4", copy=False).tobytes()


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last
