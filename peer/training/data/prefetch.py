"""Draw batches ahead of the step that trains on them."""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

from atoll.peer.training.data.corpus import TokenStream

AHEAD = 4  # batches: enough for one document that is long, or comes late


class Prefetched(TokenStream):
    """Draws the batches of another stream in a thread of its own, in the same order.

    The state is that of the batches handed out, so what was drawn ahead is drawn again after a
    restart. An error of the stream is raised where its batch would have been.
    """

    def __init__(self, stream: TokenStream, *, ahead: int = AHEAD) -> None:
        """Take over a stream; nobody else may use it.

        Args:
            stream: the stream.
            ahead: batches that are drawn ahead, at most.
        """
        self._stream, self._ahead = stream, ahead
        self._state = stream.state_dict()
        self._coming: deque[Future[tuple[Tensor, dict[str, Any]]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")

    def next_batch(self) -> Tensor:
        """Return the next batch; wait for it if it is not there yet."""
        while len(self._coming) <= self._ahead:
            self._coming.append(self._thread.submit(self._draw))
        batch, self._state = self._coming.popleft().result()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch that was handed out."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a stream with this state stopped.

        Raises:
            DataError: the state belongs to another kind of stream.
        """
        self._drop()
        self._stream.load_state_dict(state)
        self._state = self._stream.state_dict()

    def close(self) -> None:
        """End the thread, after the batch that it draws."""
        self._drop()
        self._thread.shutdown()

    def _draw(self) -> tuple[Tensor, dict[str, Any]]:
        return self._stream.next_batch(), self._stream.state_dict()

    def _drop(self) -> None:
        for coming in self._coming:
            coming.cancel()
        wait(self._coming)
        self._coming.clear()
