"""A progress bar while answers are sampled.

In: how many answers are expected, and the engine's reports of tokens and finished answers. Out: a line that
is redrawn on a terminal and gone afterwards; nothing in a log file, where the step lines suffice.
"""

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class RolloutProgress:
    """Call it with (tokens, finished answers) between `begin` and `end`; outside it does nothing."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled and sys.stdout.isatty()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def begin(self, title: str, answers: int) -> None:
        if not self._enabled:
            return
        columns = (
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
        )
        self._bar = Progress(*columns, TimeElapsedColumn(), console=Console(), transient=True)
        self._task = self._bar.add_task(title, total=answers, tokens=0)
        self._bar.start()

    def __call__(self, tokens: int, finished: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=finished, tokens=tokens)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
