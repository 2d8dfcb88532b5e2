"""Standard output and standard error: Rich where something is to be laid out, plain lines without it."""

from __future__ import annotations

import os
import select
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    _Base = Console
else:
    _Base = object

__all__ = ["Output"]


class Output(_Base):
    """A Rich console that is made on first use: a command that prints lines or JSON does not wait for Rich to load.

    Goes on in silence when its reader has gone (``| head -1``): a deployment under way is worth more.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        self._to_stderr = stderr
        self.gone = False
        """Whoever read it has gone."""

    @property
    def _stream(self) -> TextIO:
        return sys.stderr if self._to_stderr else sys.stdout

    @cached_property
    def console(self) -> Console:
        """The console itself, for those who look at more than its attributes."""
        from rich.console import Console

        output = self

        class Patient(Console):
            def on_broken_pipe(self) -> None:
                output.on_broken_pipe()

        return Patient(stderr=self._to_stderr, highlight=False)

    @property
    def is_terminal(self) -> bool:
        """As Rich says; it is asked only where there is a terminal or the environment may overrule that."""
        asked = "FORCE_COLOR" in os.environ or "TTY_COMPATIBLE" in os.environ or self._stream.isatty()
        return asked and self.console.is_terminal

    def write_line(self, text: str) -> None:
        """Print one line as it is."""
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except BrokenPipeError:
            self.on_broken_pipe()

    def look(self) -> None:
        """Find out whether the reader of a pipe has gone, without writing: :attr:`gone` says it."""
        poll = select.poll()
        try:
            poll.register(self._stream.fileno(), 0)
        except (OSError, ValueError):
            return
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """From now on nothing is printed."""
        self.gone = True
        self.console.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.console, name)
