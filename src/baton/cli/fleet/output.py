"""What ``baton up`` shows: lines and tables, with a bar per process that starts, or a JSON object per line."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton.cli.supervisor import DeploymentPlan, ManagedProcess

AUTOSCALE = "autoscale"
_COLOURS = {"router": "cyan", "prefill": "yellow", "decode": "green", "kvstore": "magenta", AUTOSCALE: "blue"}
_STATES = {"waits": 0, "starts": 1, "ready": 2}
"""What a process does before everything is up, in order; an instance that starts loads its model."""


class Output(Protocol):
    """Where ``baton up`` says what happens."""

    def line(self, name: str, text: str) -> None:
        """Show a line of a process's log."""

    def starting(self, plan: DeploymentPlan) -> contextlib.AbstractContextManager[None]:
        """Show meanwhile how far the start is."""

    def state(self, name: str, state: str) -> None:
        """Note that a process ``starts`` or is ``ready``."""

    def up(self, plan: DeploymentPlan, processes: dict[str, ManagedProcess], own: dict[str, str]) -> None:
        """Say that everything is up; ``own``: what listens in this process, by kind."""

    def say(self, event: str, text: str, *, style: str = "") -> None:
        """Say something else."""


class TextOutput:
    """For people.

    Args:
        console: Where to; bars are shown on terminals alone.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def line(self, name: str, text: str) -> None:
        """Show a line of a process's log, in its role's colour."""
        colour = _COLOURS.get(name.split("-")[0], "white")
        self._console.print(f"[{colour}]{name:>10} |[/{colour}] ", end="")
        self._console.print(text, markup=False)

    @contextlib.contextmanager
    def starting(self, plan: DeploymentPlan) -> Iterator[None]:
        """Show a bar per process."""
        if not self._console.is_terminal:
            yield
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:>10}"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
        )
        with Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True) as self._bars:
            for spec in (spec for group in plan.groups for spec in group):
                task = self._bars.add_task(spec.name, start=False, total=_STATES["ready"], state="waits")
                self._tasks[spec.name] = task
            try:
                yield
            finally:
                self._bars = None

    def state(self, name: str, state: str) -> None:
        """Move a process's bar."""
        if self._bars is None or name not in self._tasks:
            return
        task = self._tasks[name]
        if state == "starts":
            self._bars.start_task(task)
        loads = state == "starts" and name.split("-")[0] in ("prefill", "decode")
        self._bars.update(task, completed=_STATES[state], state="loads the model" if loads else state)
        if state == "ready":
            self._bars.stop_task(task)

    def up(self, plan: DeploymentPlan, processes: dict[str, ManagedProcess], own: dict[str, str]) -> None:
        """Print the table of who listens where."""
        table = Table(title="Baton is up")
        for column in ("process", "pid", "listens"):
            table.add_column(column)
        rows = [(name, process.pid, dict(process.spec.listens)) for name, process in processes.items()]
        rows += [(AUTOSCALE, os.getpid(), own)] if own else []
        for name, pid, listens in sorted(rows):
            table.add_row(name, str(pid), "  ".join(f"{kind} {address}" for kind, address in listens.items()))
        self._console.print(table)
        self._console.print(
            f"OpenAI API: {plan.scheme}://{plan.http_address}/v1   gRPC: {plan.grpc_address}   Ctrl-C ends everything"
        )

    def say(self, event: str, text: str, *, style: str = "") -> None:
        """Print it."""
        self._console.print(text, style=style or None, markup=False)


class JsonOutput:
    """For programs: an object per line, with an ``event``."""

    def line(self, name: str, text: str) -> None:
        """Print a line of a process's log."""
        self._print("log", process=name, line=text)

    @contextlib.contextmanager
    def starting(self, plan: DeploymentPlan) -> Iterator[None]:
        """Print what will be started."""
        self._print("starting", processes=[spec.name for group in plan.groups for spec in group])
        yield

    def state(self, name: str, state: str) -> None:
        """Print it."""
        self._print("process", process=name, state=state)

    def up(self, plan: DeploymentPlan, processes: dict[str, ManagedProcess], own: dict[str, str]) -> None:
        """Print who listens where."""
        rows = {
            name: {"pid": process.pid, "role": process.spec.role, **dict(process.spec.listens)}
            for name, process in processes.items()
        }
        if own:
            rows[AUTOSCALE] = {"pid": os.getpid(), "role": AUTOSCALE, **own}
        self._print("up", openai=f"{plan.scheme}://{plan.http_address}/v1", grpc=plan.grpc_address, processes=rows)

    def say(self, event: str, text: str, *, style: str = "") -> None:
        """Print it."""
        self._print(event, text=text)

    def _print(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), flush=True)
