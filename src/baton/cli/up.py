"""``baton up``: a whole deployment on this machine with one command."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from rich.console import Console
from rich.table import Table

from baton.cli.deployment import own_token, plan_from, read_file, restarts, worker_config
from baton.cli.supervisor import DeploymentPlan, Supervisor
from baton.config import EngineConfig, add_flags
from baton.config.cluster_file import ClusterFile
from baton.config.flags import (
    CLEAR_KV_HELP,
    TLS_CA_HELP,
    TLS_CERT_HELP,
    TLS_KEY_HELP,
    TLS_NAME_HELP,
    TOKEN_FILE_HELP,
)
from baton.config.pipes import AUTO, PIPES_HELP
from baton.config.secrets import flags_with_passwords
from baton.rpc.service_token import read_token
from baton.rpc.tls import read_tls

_FILE_HELP = "the deployment in one file (YAML); the environment and flags go before it"
_TLS = {"tls_cert": TLS_CERT_HELP, "tls_key": TLS_KEY_HELP, "tls_ca": TLS_CA_HELP, "tls_name": TLS_NAME_HELP}
_COLOURS = {"router": "cyan", "prefill": "yellow", "decode": "green", "kvstore": "magenta"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("up", help="run router, prefill and decode instances and a KV store here")
    add_deployment_flags(parser)
    parser.set_defaults(run=run)


def add_deployment_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe a deployment."""
    parser.add_argument("--config", "-f", default="", metavar="FILE", help=_FILE_HELP)
    parser.add_argument("--ratio", default=None, metavar="xPyD", help="instances, e.g. 2P3D (default: 1P1D)")
    parser.add_argument("--port", type=int, default=None, help="HTTP port (default: 8000; 0: a free one)")
    parser.add_argument("--grpc-port", type=int, default=None, help="gRPC port (default: 8001; 0: a free one)")
    parser.add_argument("--pipe", default=None, help=f"{PIPES_HELP} (default: {AUTO})")
    text = "run a KV store too, which instances load from and save to and the router follows"
    parser.add_argument("--kvstore", action=argparse.BooleanOptionalAction, default=None, help=text)
    parser.add_argument(
        "--token-file",
        default=None,
        help=f"{TOKEN_FILE_HELP}; default: none, or a new one for --api-keys",
    )
    text = "end the whole when one process dies"
    parser.add_argument("--no-restart", action="store_true", default=None, help=text)
    parser.add_argument("--router-args", default="", help="more flags for the router, quoted")
    parser.add_argument("--prefill-args", default="", help="more flags for prefill instances, quoted")
    parser.add_argument("--decode-args", default="", help="more flags for decode instances, quoted")
    for role in ("prefill", "decode"):
        for size, what in (("tp", "tensor parallelism"), ("pp", "pipeline stages")):
            text = f"{what} of {role} instances (default: --{size})"
            parser.add_argument(f"--{role}-{size}", type=int, default=None, metavar="N", help=text)
    for name, text in _TLS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=None, help=f"{text}; of all services")
    parser.add_argument("--clear-kv", action="store_true", default=None, help=CLEAR_KV_HELP)
    add_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Run until interrupted; returns the exit status.

    Raises:
        ConfigError: A flag cannot work, or a port is in use.
        UnavailableError: A process ended or was not ready in time.
    """
    file = read_file(args)
    with own_token(args, file):
        return asyncio.run(_up(args, file))


async def _up(args: argparse.Namespace, file: ClusterFile | None) -> int:
    console = Console(stderr=False, highlight=False, soft_wrap=True)
    plan, workers = plan_from(args, file), worker_config(args, file)
    for flag in flags_with_passwords(sys.argv[1:]):
        console.print(
            f"[yellow]everybody on this host can read the password in {flag} (ps): write @FILE there[/yellow]"
        )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    supervisor = Supervisor(
        plan,
        lambda name, line: _emit(console, name, line),
        restart=restarts(args, file),
        token=read_token(workers.token_file),
        tls=read_tls(workers),
    )

    def on_signal() -> None:
        if stop.is_set():
            supervisor.hurry()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    starting = asyncio.ensure_future(supervisor.start())
    interrupted = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([starting, interrupted], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return 130
        starting.result()
        _print_table(console, plan, supervisor)
        ended = asyncio.ensure_future(supervisor.wait())
        await asyncio.wait([ended, interrupted], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            console.print(f"[red]{ended.result()}: ending the whole (--no-restart)[/red]")
            return 1
        ended.cancel()
        console.print("draining ... (Ctrl-C again kills)")
        return 0
    finally:
        starting.cancel()
        interrupted.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await supervisor.stop()


def _emit(console: Console, name: str, line: str) -> None:
    colour = _COLOURS.get(name.split("-")[0], "white")
    console.print(f"[{colour}]{name:>10} |[/{colour}] ", end="")
    console.print(line, markup=False)


def _print_table(console: Console, plan: DeploymentPlan, supervisor: Supervisor) -> None:
    table = Table(title="Baton is up")
    for column in ("process", "pid", "listens"):
        table.add_column(column)
    for name, process in sorted(supervisor.processes.items()):
        where = "  ".join(f"{kind} {address}" for kind, address in process.spec.listens)
        table.add_row(name, str(process.pid), where)
    console.print(table)
    console.print(
        f"OpenAI API: {plan.scheme}://{plan.http_address}/v1   gRPC: {plan.grpc_address}   Ctrl-C ends everything"
    )
