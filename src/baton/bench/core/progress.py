"""A progress bar on standard error while something is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int], None]]:
    """Show a progress bar on standard error, where that is a terminal; yields what is told of steps."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, done = bar.add_task("starting", total=None), 0

        def step(what: str, left: int) -> None:
            nonlocal done
            done += 1
            bar.update(task, description=what, completed=done, total=done + left)

        yield step
