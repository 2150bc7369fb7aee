"""``baton up``: a whole deployment on this machine with one command."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import shlex
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.cli.plan import DeploymentPlan, ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import Supervisor
from baton.config import EngineConfig, add_flags, from_flags
from baton.config.pipes import AUTO, PIPES_HELP
from baton.config.worker import WorkerConfig
from baton.errors import BatonError, ConfigError
from baton.rpc.auth import read_token
from baton.rpc.tls import read_tls

_COLOURS = {"router": "cyan", "prefill": "yellow", "decode": "green", "kvstore": "magenta"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("up", help="run router, prefill and decode instances and a KV store here")
    parser.add_argument("--ratio", default="1P1D", metavar="xPyD", help="instances, e.g. 2P3D (default: 1P1D)")
    parser.add_argument("--port", type=int, default=8000, help="HTTP port (default: 8000; 0: a free one)")
    parser.add_argument("--grpc-port", type=int, default=8001, help="gRPC port (default: 8001; 0: a free one)")
    parser.add_argument("--pipe", default=AUTO, help=f"{PIPES_HELP} (default: {AUTO})")
    parser.add_argument("--kvstore", action=argparse.BooleanOptionalAction, default=True, help="run a KV store too")
    parser.add_argument("--use-kvstore", action="store_true", help="instances load from and save to the KV store")
    parser.add_argument("--token-file", default=None, help="file with the token that the services show each other")
    parser.add_argument("--no-restart", action="store_true", help="end the whole when one process dies")
    parser.add_argument("--router-args", default="", help="more flags for the router, quoted")
    parser.add_argument("--prefill-args", default="", help="more flags for prefill instances, quoted")
    parser.add_argument("--decode-args", default="", help="more flags for decode instances, quoted")
    for role in ("prefill", "decode"):
        for size, what in (("tp", "tensor parallelism"), ("pp", "pipeline stages")):
            text = f"{what} of {role} instances (default: --{size})"
            parser.add_argument(f"--{role}-{size}", type=int, default=None, metavar="N", help=text)
    add_flags(parser, EngineConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run until interrupted; returns the exit status."""
    try:
        return asyncio.run(_up(args))
    except ConfigError as error:
        print(f"baton up: error: {error.message}", file=sys.stderr)
        return 2
    except BatonError as error:
        print(f"baton up: {error.message}", file=sys.stderr)
        return 1


async def _up(args: argparse.Namespace) -> int:
    console = Console(stderr=False, highlight=False, soft_wrap=True)
    plan = plan_from(args)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    supervisor = Supervisor(
        plan,
        lambda name, line: _emit(console, name, line),
        restart=not args.no_restart,
        token=read_token(worker_config(args).token_file),
        tls=read_tls(worker_config(args)),
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


def plan_from(args: argparse.Namespace) -> DeploymentPlan:
    """Make the plan that the flags describe.

    Raises:
        ConfigError: A flag cannot work.
    """
    workers = worker_config(args)
    engine = from_flags(EngineConfig, args)
    model = engine.model if engine.model != EngineConfig.model else default_model()
    return make_plan(
        ratio=Ratio.parse(args.ratio),
        port=args.port,
        grpc_port=args.grpc_port,
        pipes=args.pipe,
        kvstore=args.kvstore,
        token_file=workers.token_file,
        load_from_store=args.use_kvstore,
        extra=ExtraArgs(
            worker=("--model", model, *engine_flags(args)),
            prefill=(*rank_flags(args, engine, "prefill"), *shlex.split(args.prefill_args)),
            decode=(*rank_flags(args, engine, "decode"), *shlex.split(args.decode_args)),
            router=tuple(shlex.split(args.router_args)),
        ),
    )


def worker_config(args: argparse.Namespace) -> WorkerConfig:
    """Check, before anything starts, what every service will be told.

    Raises:
        ConfigError: A flag or variable cannot work.
    """
    known = argparse.Namespace(pipes=tuple(args.pipe.split(",")))
    if args.token_file is not None:
        known.token_file = args.token_file
    return from_flags(WorkerConfig, known)


def rank_flags(args: argparse.Namespace, engine: EngineConfig, role: str) -> list[str]:
    """Return the flags for the ranks of a role's instances, where they differ from the other's.

    Raises:
        ConfigError: They cannot work.
    """
    given = {size: getattr(args, f"{role}_{size}") for size in ("tp", "pp")}
    sizes = {size: count for size, count in given.items() if count is not None}
    try:
        dataclasses.replace(engine, **sizes)
    except ConfigError as error:
        raise ConfigError(f"{role} instances: {error.message}", field=f"{role}_{error.field}") from None
    return [word for size, count in sizes.items() for word in (f"--{size}", str(count))]


def engine_flags(args: argparse.Namespace) -> list[str]:
    """Turn parsed engine flags back into a command line; ``--model`` is left out."""
    flags: list[str] = []
    for item in dataclasses.fields(EngineConfig):
        if item.name == "model" or not hasattr(args, item.name):
            continue
        value, flag = getattr(args, item.name), item.name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def default_model() -> str:
    """The demo model: the source tree's where this is one, else the one in the wheel.

    Raises:
        ConfigError: Neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    for path in (package.parents[1] / "models" / "baton-tiny", package / "_models" / "baton-tiny"):
        if (path / "config.json").is_file():
            return str(path)
    raise ConfigError("the demo model is not installed: give --model", field="model")


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
    console.print(f"OpenAI API: http://{plan.http_address}/v1   gRPC: {plan.grpc_address}   Ctrl-C ends everything")
