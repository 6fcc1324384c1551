"""A line of input at the foot of the screen: a filter for peers, or where a replay goes."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input


class Prompt(Input):
    """Hidden until a question opens it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "give_up", show=False)]

    class Told(Message):
        """The text has changed, or is complete."""

        def __init__(self, question: str, text: str, *, is_complete: bool) -> None:
            super().__init__()
            self.question = question
            self.text = text
            self.is_complete = is_complete

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, compact=True, max_length=64)
        self.question = ""
        self.display = False

    def ask(self, question: str, hint: str, text: str = "") -> None:
        """Open with a question."""
        self.question, self.placeholder = question, hint
        with self.prevent(Input.Changed):
            self.value = text
        self.display = True
        self.focus()

    def action_give_up(self) -> None:
        """Close, as if nothing had been typed."""
        self._tell("", is_complete=True)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Pass the text on while it is typed."""
        event.stop()
        self._tell(event.value, is_complete=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Pass the text on and close."""
        event.stop()
        self._tell(event.value, is_complete=True)

    def _tell(self, text: str, *, is_complete: bool) -> None:
        if self.display:
            self.post_message(self.Told(self.question, text, is_complete=is_complete))
        if is_complete:
            self.display = False
