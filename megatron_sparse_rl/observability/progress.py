"""A progress bar while answers are sampled.

In: how many answers are expected, and the engine's reports of tokens and finished answers. Out: a line that
is redrawn on a terminal and gone afterwards; nothing in a log file, where the step lines suffice.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class RolloutProgress:
    """Call it with (tokens, finished answers) inside `showing`; outside it, and off a terminal, it does
    nothing.
    """

    def __init__(self, *, enabled: bool, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._enabled = enabled and self._stream.isatty()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    @contextmanager
    def showing(self, title: str, answers: int) -> Iterator[None]:
        """The bar is on the terminal while the block runs, also when it raises; `answers` are expected."""
        if not self._enabled:
            yield
            return
        columns = (
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            TimeElapsedColumn(),
        )
        console = Console(file=self._stream, force_terminal=True)
        with Progress(*columns, console=console, transient=True) as self._bar:
            self._task = self._bar.add_task(title, total=answers, tokens=0)
            try:
                yield
            finally:
                self._bar = None

    def __call__(self, tokens: int, finished: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=finished, tokens=tokens)
