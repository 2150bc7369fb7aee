"""``baton up``: a whole deployment on this machine with one command, and its output as text or JSON."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton.autoscale.controller import AutoscaleMetrics, Controller
from baton.background import keep_running
from baton.cli.autoscale import ProcessFleet, serving_metrics
from baton.cli.foreign_names import find_up_flag
from baton.cli.parser import CommandParser
from baton.cli.plan import autoscale_config, own_token, plan_from, read_file, restarts, worker_config
from baton.cli.supervisor import DeploymentPlan, ManagedProcess, Supervisor
from baton.client import AsyncClient
from baton.config import EngineConfig, add_flags
from baton.config.autoscale import AutoscaleConfig
from baton.config.cluster_file import ClusterFile
from baton.config.deployment import LOOPBACK, ListenConfig
from baton.config.flags import CLEAR_KV_HELP, LOG_FORMATS, LOG_LEVELS, AccessConfig, ServiceConfig
from baton.config.pipes import AUTO, PIPES_HELP
from baton.config.router import RouterConfig
from baton.config.secrets import flags_with_passwords
from baton.config.worker import WorkerConfig
from baton.rpc.service_token import read_token
from baton.rpc.tls import read_tls

AUTOSCALE = "autoscale"
_COLOURS = {"router": "cyan", "prefill": "yellow", "decode": "green", "kvstore": "magenta", AUTOSCALE: "blue"}
_STATES = {"waits": 0, "starts": 1, "ready": 2}
"""States of a process during the start of the deployment, in order; a starting instance loads its model."""


class TextOutput:
    """The output of ``baton up`` as text.

    Args:
        console: Console to print to; bars are shown on terminals only.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def line(self, name: str, text: str) -> None:
        """Show a line of a process's log."""
        colour = _COLOURS.get(name.split("-")[0], "white")
        self._console.print(f"[{colour}]{name:>10} |[/{colour}] ", end="")
        self._console.print(text, markup=False)

    @contextlib.contextmanager
    def starting(self, plan: DeploymentPlan) -> Iterator[None]:
        """Show the progress of the start while the context is open."""
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
        """Show that a process ``starts`` or is ``ready``."""
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
        """Print a table of processes and their addresses; ``own``: addresses of this process, by kind."""
        table = Table(title="Baton is up")
        for column in ("process", "pid", "listens"):
            table.add_column(column)
        rows = [(name, process.pid, dict(process.spec.listens)) for name, process in processes.items()]
        rows += [(AUTOSCALE, os.getpid(), own)] if own else []
        for name, pid, listens in sorted(rows):
            table.add_row(name, str(pid), "  ".join(f"{kind} {address}" for kind, address in listens.items()))
        self._console.print(table)
        self._console.print(
            f"OpenAI API: {plan.scheme}://{plan.http_address}/v1   console: {plan.scheme}://{plan.http_address}/console\n"
            f"gRPC: {plan.grpc_address}   Ctrl-C ends everything"
        )

    def show_event(self, event: str, text: str, *, style: str = "") -> None:
        """Show another event."""
        self._console.print(text, style=style or None, markup=False)


class JsonOutput:
    """The same as JSON: an object per line, with an ``event``; fields of services' JSON logs are among the object's."""

    def line(self, name: str, text: str) -> None:
        fields = _json_object(text)
        self._write({"event": "log", "process": name, **({"line": text} if fields is None else fields)})

    @contextlib.contextmanager
    def starting(self, plan: DeploymentPlan) -> Iterator[None]:
        self._print("starting", processes=[spec.name for group in plan.groups for spec in group])
        yield

    def state(self, name: str, state: str) -> None:
        self._print("process", process=name, state=state)

    def up(self, plan: DeploymentPlan, processes: dict[str, ManagedProcess], own: dict[str, str]) -> None:
        rows = {
            name: {"pid": process.pid, "role": process.spec.role, **dict(process.spec.listens)}
            for name, process in processes.items()
        }
        if own:
            rows[AUTOSCALE] = {"pid": os.getpid(), "role": AUTOSCALE, **own}
        self._print("up", openai=f"{plan.scheme}://{plan.http_address}/v1", grpc=plan.grpc_address, processes=rows)

    def show_event(self, event: str, text: str, *, style: str = "") -> None:
        self._print(event, text=text)

    def _print(self, event: str, **fields: Any) -> None:
        self._write({"event": event, **fields})

    def _write(self, fields: dict[str, Any]) -> None:
        print(json.dumps(fields), flush=True)


def _json_object(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


Output: TypeAlias = TextOutput | JsonOutput
_FILE_HELP = "the deployment in one file (YAML); the environment and flags go before it"
_CALL_TIMEOUT_S = 10.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("up", help="run router, prefill and decode instances and a KV store here")
    parser.add_argument(
        "--json", action="store_true", help="a JSON object per line instead of text; also with --log-format json"
    )
    add_deployment_flags(parser)
    if isinstance(parser, CommandParser):
        parser.find_hint = find_up_flag
    parser.set_defaults(run=run)


def add_deployment_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe a deployment."""
    parser.add_argument("--config", "-f", default="", metavar="FILE", help=_FILE_HELP)
    parser.add_argument("--ratio", default=None, metavar="xPyD", help="instances, e.g. 2P3D (default: 1P1D)")
    add_flags(parser, ListenConfig)
    router_help = {item.name: item.metadata["help"] for item in dataclasses.fields(RouterConfig)}
    parser.add_argument("--api-keys", default=None, metavar="FILE", help=f"router: {router_help['api_keys']}")
    parser.add_argument(
        "--open-http", action=argparse.BooleanOptionalAction, default=None, help=f"router: {router_help['open_http']}"
    )
    parser.add_argument("--pipe", default=None, help=f"{PIPES_HELP} (default: {AUTO})")
    text = "run a KV store too, which instances load from and save to and the router follows"
    parser.add_argument("--kvstore", action=argparse.BooleanOptionalAction, default=None, help=text)
    log_help = {item.name: item.metadata["help"] for item in dataclasses.fields(ServiceConfig)}
    access_help = {item.name: item.metadata["help"] for item in dataclasses.fields(AccessConfig)}
    text = f"{access_help.pop('token_file')}; default: none, or a new one for --api-keys"
    parser.add_argument("--token-file", default=None, help=text)
    text = "end the whole when one process dies"
    parser.add_argument("--no-restart", action="store_true", default=None, help=text)
    parser.add_argument("--router-args", default="", help="more flags for the router, quoted")
    parser.add_argument("--prefill-args", default="", help="more flags for prefill instances, quoted")
    parser.add_argument("--decode-args", default="", help="more flags for decode instances, quoted")
    for role in ("prefill", "decode"):
        for size, what in (("tp", "tensor parallelism"), ("pp", "pipeline stages")):
            text = f"{what} of {role} instances (default: --{size})"
            parser.add_argument(f"--{role}-{size}", type=int, default=None, metavar="N", help=text)
    for name, text in access_help.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=None, help=f"{text}; of all services")
    for name, choices in (("log_format", LOG_FORMATS), ("log_level", LOG_LEVELS)):
        text = f"{log_help[name]}; of all services"
        parser.add_argument(f"--{name.replace('_', '-')}", choices=choices, default=None, help=text)
    parser.add_argument("--clear-kv", action="store_true", default=None, help=CLEAR_KV_HELP)
    text = "run the controller of the ratio, too: instances change roles as the load wants it (--scale-...)"
    parser.add_argument("--autoscale", action=argparse.BooleanOptionalAction, default=None, help=text)
    add_flags(parser, AutoscaleConfig)
    add_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Run the deployment until interrupted; returns the exit status."""
    file = read_file(args)
    with own_token(args, file) as token_file:
        return asyncio.run(_up(args, file, token_file))


async def _up(args: argparse.Namespace, file: ClusterFile, token_file: str) -> int:
    plan = plan_from(args, file)
    workers = worker_config(args, file)
    scaling = autoscale_config(args, file)
    as_json = args.json or workers.log_format == "json"
    output: Output = JsonOutput() if as_json else TextOutput(Console(highlight=False, soft_wrap=True))
    for flag in flags_with_passwords(sys.argv[1:]):
        text = f"all users of this host can read the password in {flag} (ps): write @FILE there"
        output.show_event("warning", text, style="yellow")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    supervisor = Supervisor(
        plan,
        output.line,
        restart=restarts(args, file),
        token=read_token(workers.token_file),
        tls=read_tls(workers),
    )
    supervisor.on_state = output.state

    def on_signal() -> None:
        if stop.is_set():
            supervisor.hurry()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    starting = asyncio.ensure_future(supervisor.start())
    interrupted = asyncio.ensure_future(stop.wait())
    try:
        with output.starting(plan):
            await asyncio.wait([starting, interrupted], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return 130
        starting.result()
        async with autoscaled(scaling, supervisor, workers, output) as own:
            if token_file:
                output.show_event("token", f"Token of the services, as baton scale --token-file wants it: {token_file}")
            output.up(plan, supervisor.processes, own)
            ended = asyncio.ensure_future(supervisor.wait())
            await asyncio.wait([ended, interrupted], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            output.show_event("failed", f"{ended.result()}: ending the whole (--no-restart)", style="red")
            return 1
        ended.cancel()
        output.show_event("draining", "draining ... (Ctrl-C again kills)")
        return 0
    finally:
        starting.cancel()
        interrupted.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await supervisor.stop()


@contextlib.asynccontextmanager
async def autoscaled(
    config: AutoscaleConfig | None, supervisor: Supervisor, access: WorkerConfig, output: Output
) -> AsyncIterator[dict[str, str]]:
    """Run the autoscaler beside the processes, if it is enabled.

    Args:
        config: Configuration of the autoscaler; ``None``: it is disabled.
        supervisor: Supervisor whose processes the autoscaler starts, changes and ends.
        access: Token and certificates.
        output: Output for the autoscaler's log.

    Yields:
        Addresses of the autoscaler, by kind.
    """
    if config is None:
        yield {}
        return
    plan = supervisor.plan
    metrics = AutoscaleMetrics()
    port = plan.scaling_metrics_port
    async with (
        serving_metrics(LOOPBACK, port, metrics),
        AsyncClient(
            plan.grpc_address, token_file=access.token_file, tls=read_tls(access), timeout=_CALL_TIMEOUT_S
        ) as client,
    ):
        fleet = ProcessFleet(client, supervisor, config.scale_drain_s)
        controller = Controller(config, client, fleet, lambda text: output.line(AUTOSCALE, text), metrics=metrics)
        running = keep_running(controller.run, "autoscale")
        try:
            yield {"metrics": f"{LOOPBACK}:{port}/metrics"}
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
