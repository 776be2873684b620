"""Progress bars: while answers are sampled, while weights are read or written.

In: what is expected, and reports of how much is done. Out: a line that is redrawn on a terminal and gone
afterwards; nothing in a log file, where the lines of steps and events suffice.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


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


@contextmanager
def showing_bytes(title: str, total: int, *, stream: TextIO | None = None) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes while the block runs; the block calls what it is given with bytes done."""
    stream = stream or sys.stdout
    columns = (TextColumn(title), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    console = Console(file=stream, force_terminal=stream.isatty())
    with Progress(*columns, console=console, transient=True, disable=not stream.isatty()) as bar:
        task = bar.add_task(title, total=total)
        yield lambda size: bar.advance(task, size)
