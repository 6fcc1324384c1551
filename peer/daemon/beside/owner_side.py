"""The questions that the network process asks while it joins, answered in the trainer's process.

The owner's terminal is here, and so is the code of the run's model, which nothing else imports: the
consent is given here, and the first state of the run is built here.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon.consent import Consent, RunTerms
from atoll.peer.errors import SetupError


class OwnerSide:
    """The owner of this machine, for the network process."""

    def __init__(self, consent: Consent, make_first: Callable[[RunSpec, str], OuterState]) -> None:
        """Answer by a consent.

        Args:
            consent: to the run.
            make_first: builds the first state of a module of the run; raises SetupError if the
                model or the tokenizer is not usable.
        """
        self._consent = consent
        self._make_first = make_first
        self._terms: RunTerms | None = None

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
        if not is_keeper:
            threading.Thread(target=_import_ahead, name="atoll-import", daemon=True).start()
        return needs_tokenizer

    def expect_tokenizer(self) -> None:
        """Open the tokenizer that has come; raise as `Consent.expect_tokenizer`."""
        assert self._terms is not None, "it comes after the yes"
        self._consent.expect_tokenizer(self._terms)

    def first_state(self, module: str) -> tuple[Any, ...] | None:
        """Return layout and vectors of the first state; None if the trainer will say why not."""
        assert self._terms is not None, "it is built after the yes"
        try:
            state = self._make_first(self._terms.spec, module)
        except SetupError:
            return None
        return state.layout.to_json(), state.params_N, state.memory_M


def _import_ahead() -> None:
    """Import what torch does when the first optimizer is made, seconds of work.

    The network process fetches the state of the run meanwhile, and this one would only wait.
    """
    importlib.import_module("torch._dynamo")
