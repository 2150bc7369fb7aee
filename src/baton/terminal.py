"""What long commands show: a progress bar, and sizes with units."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Step = Callable[[str, int], None]
"""Called with the name of each step and the number of steps left."""


def format_bytes(size: int) -> str:
    """Return a size with its unit, such as ``1.5 MiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


@contextlib.contextmanager
def progress() -> Iterator[Step]:
    """Show a progress bar on standard error, on a terminal; yields what to call per step."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        done = 0

        def step(what: str, left: int) -> None:
            nonlocal done
            done += 1
            bar.update(task, description=what, completed=done, total=done + left)

        yield step
