"""The questions that the network process asks while it joins, answered in the trainer's process.

The owner's terminal is here, and so is the code of the run's model, which nothing else imports: the
consent is given here, and the first state of the run is built here. Once the owner agrees, what the
trainer needs beside the state is opened here while the state comes (`OpenedAhead`).
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.module import WHOLE
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon.consent import Consent, RunTerms
from atoll.peer.errors import SetupError
from atoll.peer.training.opening import Opened

AHEAD_S = 3.0  # from the owner's yes to the question for a state, on busy cores
IMPORTS = ("torch._dynamo",)  # by the first optimizer that is made: seconds of work

_log = logging.getLogger(__name__)


class OwnerSide:
    """The owner of this machine, for the network process."""

    def __init__(
        self,
        consent: Consent,
        make_first: Callable[[RunSpec, str], OuterState],
        open_run: Callable[[RunSpec], Opened] | None = None,
    ) -> None:
        """Answer by a consent.

        Args:
            consent: to the run.
            make_first: builds the first state of a module of the run; raises SetupError if the
                model or the tokenizer is not usable.
            open_run: opens text and model of a run that is not cut into stages, in another
                thread, while its state comes; None if the trainer opens them itself.
        """
        self._consent = consent
        self._make_first = make_first
        self._open_run = open_run
        self._terms: RunTerms | None = None
        self._is_asked = threading.Event()
        self._ahead: OpenedAhead | None = None

    def admit(self, spec: bytes, layout: str, module: str, is_keeper: bool) -> bool:
        """Return whether the run's tokenizer has to come, if the owner wants to take part.

        Raises:
            Exception: as `Consent.admit`.
        """
        self._terms = RunTerms(
            spec=RunSpec.from_json(spec),
            layout=Layout.from_json(layout),
            module=module,
            is_keeper=is_keeper,
        )
        needs_tokenizer = self._consent.admit(self._terms)
        if not needs_tokenizer:
            self._begin()
        return needs_tokenizer

    def expect_tokenizer(self) -> None:
        """Open the tokenizer that has come; raise as `Consent.expect_tokenizer`."""
        assert self._terms is not None, "it comes after the yes"
        self._consent.expect_tokenizer(self._terms)
        self._begin()

    def first_state(self, module: str) -> tuple[Any, ...] | None:
        """Return layout and vectors of the first state; None if the trainer will say why not."""
        assert self._terms is not None, "it is built after the yes"
        if self._ahead is not None:
            self._ahead.join()  # torch's random state, which gives the weights, is one for all
        try:
            state = self._make_first(self._terms.spec, module)
        except SetupError:
            return None
        return state.layout.to_json(), state.params_N, state.memory_M

    def note_recovery(self) -> None:
        """Note, in any thread, that a state is under way; until then the other process has work."""
        self._is_asked.set()

    def take_opened(self) -> Opened | None:
        """Return what was opened while the state came, once; None if the trainer has to open it.

        None too after a failure: the trainer meets it again, and reports it.
        """
        ahead, self._ahead = self._ahead, None
        return ahead.result() if ahead is not None else None

    def _begin(self) -> None:
        terms = self._terms
        assert terms is not None
        if terms.is_keeper or self._ahead is not None:
            return
        open_run = self._open_run if terms.module == WHOLE else None
        opening = partial(open_run, terms.spec) if open_run is not None else None
        self._ahead = OpenedAhead(opening, self._is_asked)


class OpenedAhead:
    """Imports and opens in a thread what a trainer needs, while the network process recovers.

    It begins once the state is asked for: earlier it would take cores from the process that asks,
    and afterwards the state takes its time.

    The model and its gradient take 8 bytes a parameter here, beside at most some 14 in the other
    process: less than a round takes.
    """

    def __init__(self, open_run: Callable[[], Opened] | None, is_asked: threading.Event) -> None:
        """Begin when `is_asked` is set, or soon; without `open_run` only modules are imported."""
        self._open_run = open_run
        self._is_asked = is_asked
        self._opened: Opened | None = None
        # A peer that is stopped meanwhile does not wait for it.
        self._thread = threading.Thread(target=self._work, name="atoll-ahead", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Begin at once, if it has not, and wait until it is done."""
        self._is_asked.set()
        self._thread.join()

    def result(self) -> Opened | None:
        """Wait; return what was opened."""
        self.join()
        return self._opened

    def _work(self) -> None:
        self._is_asked.wait(AHEAD_S)
        for module in IMPORTS:
            importlib.import_module(module)
        if self._open_run is None:
            return
        try:
            self._opened = self._open_run()
        except Exception as error:  # a model's own code may raise anything
            _log.info("the trainer opens the run again: %s", error)
