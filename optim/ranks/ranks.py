"""The ranks of a peer: their messages and their deadlines.

Messages go over gloo, in the main memory, beside whatever the model's own collectives use. A
message is a JSON header and tensors as bytes; nothing is unpickled. All ranks make the same calls
in the same order, from one thread each.

    header      length, int64; then UTF-8 of {"fields": any, "tensors": [[dtype, shape], ...]}
    tensors     their bytes, those without values left out

The leader may wait for the network for long. Meanwhile it sends a sign of life every `PULSE_S`;
a rank that hears nothing for `timeout_s` ends with an error. So does every rank whose connection
to a rank that died is closed: nothing is left running, and whoever started the ranks starts them
all anew.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

LEADER = 0
PULSE_S = 5.0  # a sign of life costs each rank a wake-up
TIMEOUT_S = 600.0  # above the first compilation of a model, which one rank may have cached
MAX_HEADER_BYTES = 1 << 28  # lengths of all frames of 7B values are a tenth of it

_WAITS, _FAILED = "waits", "failed"


class RanksError(RuntimeError):
    """A rank failed, fell silent, or is out of step with the others."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message from one rank to another."""

    fields: Any = None
    """Whatever JSON holds."""

    tensors: Sequence[Tensor] = field(default_factory=tuple)
    """On the CPU."""


class Ranks:
    """This process among the ranks of its peer, those of the default process group."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """Connect to the others; all ranks call this together.

        Args:
            timeout_s: longest wait for another rank, which may be slower by so much at one step.

        Raises:
            RanksError: there is no process group.
        """
        if not distributed.is_initialized():
            raise RanksError(
                "expected a process group; start the loop with torchrun, and call "
                "torch.distributed.init_process_group() first"
            )
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, distributed.ProcessGroup), "every rank is a member"
        self._group = group

    @property
    def leads(self) -> bool:
        """Return whether this rank talks to other peers."""
        return self.rank == LEADER

    def close(self) -> None:
        """Disconnect from the others."""
        distributed.destroy_process_group(self._group)

    def tell_each(self, messages: Sequence[Message] | None) -> Message:
        """Give each rank a message of the leader.

        Args:
            messages: by rank, at the leader; None elsewhere.

        Returns:
            The message to this rank.

        Raises:
            RanksError: a rank is gone or silent, or the leader has failed.
        """
        if messages is None:
            return self._receive(LEADER)
        for rank, message in enumerate(messages):
            if rank != LEADER:
                self._send(rank, message)
        return messages[LEADER]

    def tell(self, fields: Any) -> Any:  # noqa: ANN401 - JSON
        """Give all ranks the leader's fields; those of the other ranks are ignored."""
        message = Message(fields=fields)
        return self.tell_each([message] * self.size if self.leads else None).fields

    def gather(self, message: Message) -> list[Message]:
        """Give the leader a message of each rank; the others get an empty list."""
        if not self.leads:
            self._send(LEADER, message)
            return []
        others = (r for r in range(self.size) if r != LEADER)
        return [message, *(self._receive(rank) for rank in others)]

    def gathered(self, fields: Any) -> list[Any]:  # noqa: ANN401 - JSON
        """Give the leader what JSON holds of each rank; the others get an empty list."""
        return [message.fields for message in self.gather(Message(fields=fields))]

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Copy one rank's tensor to all; contiguous, on the CPU."""
        if tensor.numel():
            with losing():
                distributed.broadcast(_bytes(tensor), src=source, group=self._group)

    def totals(self, *numbers: float) -> list[float]:
        """Return the sums of numbers over all ranks, in fp64."""
        sums = torch.tensor(numbers, dtype=torch.float64)
        with losing():
            distributed.all_reduce(sums, group=self._group)
        return [float(total) for total in sums]

    def all_of(self, is_true: bool) -> bool:
        """Return whether something is true on all ranks."""
        return self.totals(float(not is_true)) == [0.0]

    @contextmanager
    def leading(self, on_break: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Let the leader do in the block what the others wait for; it MUST `tell` them next.

        What it raises is told in place of that.

        Args:
            on_break: called in another thread when a rank is gone meanwhile.
        """
        if not self.leads:
            yield
            return
        ended = threading.Event()
        pulse = threading.Thread(
            target=self._pulse, args=(ended, on_break), name="atoll-ranks", daemon=True
        )
        pulse.start()
        try:
            yield
        except BaseException as error:
            ended.set()
            pulse.join()
            self._report_failure(error)
            raise
        ended.set()
        pulse.join()

    def _pulse(self, ended: threading.Event, on_break: Callable[[], None]) -> None:
        while not ended.wait(PULSE_S):
            try:
                self.tell({_WAITS: True})
            except RanksError:
                on_break()  # the next call of the leader's own thread raises it
                return

    def _report_failure(self, error: BaseException) -> None:
        for rank in range(self.size):
            if rank != LEADER:
                try:
                    self._send(rank, Message(fields={_FAILED: f"{type(error).__name__}: {error}"}))
                except RanksError:
                    continue  # gone before

    def _send(self, rank: int, message: Message) -> None:
        tensors = [tensor.contiguous() for tensor in message.tensors]
        described = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        text = json.dumps({"fields": message.fields, "tensors": described}).encode()
        header = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        with losing(rank):
            distributed.send(torch.tensor([len(text)]), rank, group=self._group)
            distributed.send(header, rank, group=self._group)
            for tensor in tensors:
                if tensor.numel():
                    distributed.send(_bytes(tensor), rank, group=self._group)

    def _receive(self, rank: int) -> Message:
        while True:
            message = self._receive_one(rank)
            fields = message.fields if isinstance(message.fields, dict) else {}
            if _FAILED in fields:
                raise RanksError(f"rank {rank} failed: {fields[_FAILED]}")
            if _WAITS not in fields:
                return message

    def _receive_one(self, rank: int) -> Message:
        length = torch.zeros(1, dtype=torch.int64)
        with losing(rank):
            distributed.recv(length, rank, group=self._group)
            if not 0 < int(length) <= MAX_HEADER_BYTES:
                raise RanksError(f"rank {rank} is out of step: a header of {int(length)} bytes")
            header = torch.empty(int(length), dtype=torch.uint8)
            distributed.recv(header, rank, group=self._group)
            content = json.loads(bytes(header.numpy()))
            tensors = [
                torch.empty(shape, dtype=getattr(torch, dtype))
                for dtype, shape in content["tensors"]
            ]
            for tensor in tensors:
                if tensor.numel():
                    distributed.recv(_bytes(tensor), rank, group=self._group)
        return Message(fields=content["fields"], tensors=tensors)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


@contextmanager
def losing(rank: int | None = None) -> Iterator[None]:
    """Turn the errors of a collective into one that says which rank is gone.

    Raises:
        RanksError: what is called in the block has failed.
    """
    try:
        yield
    except RanksError:
        raise
    except RuntimeError as error:
        who = "a rank" if rank is None else f"rank {rank}"
        reason = str(error).splitlines()[0]
        raise RanksError(
            f"lost {who} of this peer ({reason}); all ranks end, and continue from the saved "
            "state when they are started again"
        ) from error
