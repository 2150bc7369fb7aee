"""``baton up``: a whole deployment on this machine with one command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import re
import secrets
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.cli.supervisor import DeploymentPlan, ProcessSpec, Supervisor
from baton.config import EngineConfig, add_flags, from_flags
from baton.config.demo_model import default_model
from baton.config.flags import (
    CLEAR_KV_HELP,
    ENV_PREFIX,
    TLS_CA_HELP,
    TLS_CERT_HELP,
    TLS_KEY_HELP,
    TLS_NAME_HELP,
    TOKEN_FILE_HELP,
)
from baton.config.pipes import AUTO, PIPES_HELP
from baton.config.secrets import flags_with_passwords
from baton.config.worker import WorkerConfig
from baton.errors import ConfigError
from baton.rpc.server import free_ports
from baton.rpc.service_token import read_token
from baton.rpc.tls import read_tls
from baton.tokenizer.model_files import check_model_path

HOST = "127.0.0.1"
MAX_INSTANCES = 64

_TLS = {"tls_cert": TLS_CERT_HELP, "tls_key": TLS_KEY_HELP, "tls_ca": TLS_CA_HELP, "tls_name": TLS_NAME_HELP}
_ACCESS = ("token-file", "tls-cert", "tls-key", "tls-ca", "tls-name", "clear-kv")
_OWNED = {
    "router": ("host", "port", "grpc-port", *_ACCESS),
    **dict.fromkeys(("prefill", "decode"), ("host", "port", "metrics-port", "instance-id", "routers", *_ACCESS)),
}
"""Flags that are given to services here, so that they find each other."""
_URLS = frozenset({"--redis", "--kvstore"})
"""Flags of services that may have passwords in their values."""
_COLOURS = {"router": "cyan", "prefill": "yellow", "decode": "green", "kvstore": "magenta"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("up", help="run router, prefill and decode instances and a KV store here")
    parser.add_argument("--ratio", default="1P1D", metavar="xPyD", help="instances, e.g. 2P3D (default: 1P1D)")
    parser.add_argument("--port", type=int, default=8000, help="HTTP port (default: 8000; 0: a free one)")
    parser.add_argument("--grpc-port", type=int, default=8001, help="gRPC port (default: 8001; 0: a free one)")
    parser.add_argument("--pipe", default=AUTO, help=f"{PIPES_HELP} (default: {AUTO})")
    text = "run a KV store too, which instances load from and save to and the router follows"
    parser.add_argument("--kvstore", action=argparse.BooleanOptionalAction, default=False, help=text)
    parser.add_argument(
        "--token-file",
        default=None,
        help=f"{TOKEN_FILE_HELP}; default: none, or a new one for --api-keys",
    )
    parser.add_argument("--no-restart", action="store_true", help="end the whole when one process dies")
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run until interrupted; returns the exit status.

    Raises:
        ConfigError: A flag cannot work, or a port is in use.
        UnavailableError: A process ended or was not ready in time.
    """
    with own_token(args):
        return asyncio.run(_up(args))


async def _up(args: argparse.Namespace) -> int:
    console = Console(stderr=False, highlight=False, soft_wrap=True)
    plan = plan_from(args)
    for flag in flags_with_passwords(sys.argv[1:]):
        console.print(
            f"[yellow]everybody on this host can read the password in {flag} (ps): write @FILE there[/yellow]"
        )
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


@dataclass(frozen=True, slots=True)
class Ratio:
    """x prefill and y decode instances, written ``xPyD``."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> Ratio:
        """Read ``2P3D``.

        Raises:
            ConfigError: Not of that form, or no decode instance.
        """
        match = re.fullmatch(r"(\d+)[pP](\d+)[dD]", text)
        if match is None:
            raise ConfigError(f"--ratio must look like 2P3D, got {text!r}", field="ratio")
        ratio = cls(int(match[1]), int(match[2]))
        if ratio.decode < 1:
            raise ConfigError(f"--ratio {text} has no decode instance", field="ratio")
        if ratio.prefill + ratio.decode > MAX_INSTANCES:
            raise ConfigError(f"--ratio {text} has more than {MAX_INSTANCES} instances", field="ratio")
        return ratio

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D"


@dataclass(frozen=True, slots=True)
class ExtraArgs:
    """More command line for some of the processes."""

    worker: tuple[str, ...] = ()
    """For every instance."""
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    router: tuple[str, ...] = ()


def make_plan(
    *,
    ratio: Ratio,
    port: int,
    grpc_port: int = 0,
    pipes: str = AUTO,
    kvstore: bool = False,
    access: Sequence[str] = (),
    extra: ExtraArgs | None = None,
) -> DeploymentPlan:
    """Lay out a deployment on loopback.

    Args:
        ratio: How many instances.
        port: HTTP port of the router; 0 takes a free one.
        grpc_port: gRPC port of the router; 0 takes a free one.
        pipes: Comma-separated kinds, in order of preference.
        kvstore: Whether a KV store runs too, used by all instances.
        access: Flags of token and certificates, the same for all services.
        extra: More flags.

    Raises:
        ConfigError: What engines need is not installed.
    """
    if find_spec("torch") is None:
        raise ConfigError("prefill and decode instances need torch: pip install 'baton-serve[engine]'", field="ratio")
    more = extra or ExtraArgs()
    num_workers = ratio.prefill + ratio.decode
    free = iter(free_ports(2 * num_workers + 4))
    http = f"{HOST}:{port or next(free)}"
    grpc = f"{HOST}:{grpc_port or next(free)}"
    store = _spec("kvstore", "kvstore", (next(free), next(free)), ["--pipes", pipes, *access]) if kvstore else None
    knows = () if store is None else ("--kvstore", store.health_address)
    shared = ["--routers", grpc, "--pipes", pipes, *access, *knows, *more.worker]
    workers = []
    for role, count, own in (("prefill", ratio.prefill, more.prefill), ("decode", ratio.decode, more.decode)):
        for index in range(count):
            workers.append(_spec(role, f"{role}-{index}", (next(free), next(free)), [*shared, *own]))
    host, http_port = http.rsplit(":", 1)
    args, env = _without_passwords([*access, *knows, *more.router])
    router = ProcessSpec(
        name="router",
        module="baton_router.main",
        args=("--host", host, "--port", http_port, "--grpc-port", grpc.rsplit(":", 1)[1], *args),
        env=env,
        health_address=grpc,
        role="router",
        listens=(("http", http), ("grpc", grpc), ("metrics", f"{http}/metrics")),
    )
    secure = "--tls-cert" in access and "--no-http-tls" not in more.router
    return DeploymentPlan(store, router, tuple(workers), http, grpc, "https" if secure else "http")


def _spec(role: str, name: str, ports: tuple[int, int], args: Sequence[str]) -> ProcessSpec:
    """Return a service that takes requests on the first port and shows its metrics on the second."""
    port, metrics_port = ports
    own = ("--host", HOST, "--port", str(port), "--metrics-port", str(metrics_port), "--instance-id", name)
    address = f"{HOST}:{port}"
    listens = (("grpc", address), ("metrics", f"{HOST}:{metrics_port}/metrics"))
    more, env = _without_passwords(args)
    return ProcessSpec(name, f"baton_{role}.main", (*own, *more), address, role, listens, env)


def _without_passwords(args: Sequence[str]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Take URLs with passwords out of a command line, which everybody on the host can read.

    Returns:
        What is left of it, and the variables that say the same.
    """
    words, env = list(args), dict[str, str]()
    hidden = set(flags_with_passwords(args)) & _URLS
    for at in reversed(range(len(words))):
        flag, equals, value = words[at].partition("=")
        if flag in hidden and (equals or words[at + 1 :]):
            name = ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper()
            env.setdefault(name, value if equals else words[at + 1])
            del words[at : at + (1 if equals else 2)]
    return tuple(words), tuple(env.items())


def plan_from(args: argparse.Namespace) -> DeploymentPlan:
    """Make the plan that the flags describe.

    Raises:
        ConfigError: A flag cannot work.
    """
    for field in ("port", "grpc_port"):
        if not 0 <= getattr(args, field) < 65536:
            flag = f"--{field.replace('_', '-')}"
            raise ConfigError(f"{flag} must be between 0 and 65535, got {getattr(args, field)}", field=field)
    workers = worker_config(args)
    engine = from_flags(EngineConfig, args)
    model = engine.model if engine.model != EngineConfig.model else default_model()
    check_model_path(model)
    return make_plan(
        ratio=Ratio.parse(args.ratio),
        port=args.port,
        grpc_port=args.grpc_port,
        pipes=args.pipe,
        kvstore=args.kvstore,
        access=_access_flags(workers),
        extra=ExtraArgs(
            worker=("--model", model, *engine_flags(args)),
            prefill=(*rank_flags(args, engine, "prefill"), *_role_args(args, "prefill")),
            decode=(*rank_flags(args, engine, "decode"), *_role_args(args, "decode")),
            router=_role_args(args, "router"),
        ),
    )


@contextlib.contextmanager
def own_token(args: argparse.Namespace) -> Iterator[None]:
    """Give services a token of their own while the router wants API keys and nobody named a token file.

    Without one, keys would protect the router's calls alone: others on this machine could read tenants' KV and register
    instances. The file is for this user alone, and goes at the end.
    """
    keys = any(word.partition("=")[0] == "--api-keys" for word in _role_args(args, "router"))
    if worker_config(args).token_file or not (keys or os.environ.get("BATON_API_KEYS")):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="baton-up-") as folder:
        path = Path(folder, "token")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        args.token_file = str(path)
        yield


def _role_args(args: argparse.Namespace, role: str) -> tuple[str, ...]:
    field = f"{role}_args"
    try:
        words = tuple(shlex.split(getattr(args, field)))
    except ValueError as error:
        raise ConfigError(f"--{role}-args: {error}", field=field) from None
    parser = argparse.ArgumentParser(add_help=False)
    for flag in _OWNED[role]:
        parser.add_argument(f"--{flag}", nargs="?", const="", default=argparse.SUPPRESS)
    for name in vars(parser.parse_known_args(words)[0]):
        flag = f"--{name.replace('_', '-')}"
        instead = "; give it to baton up" if hasattr(args, name) else ""
        raise ConfigError(f"--{role}-args: {flag} is set by baton up itself{instead}", field=field)
    return words


def worker_config(args: argparse.Namespace) -> WorkerConfig:
    """Check, before anything starts, what every service will be told.

    Raises:
        ConfigError: A flag or variable cannot work.
    """
    known = argparse.Namespace(pipes=tuple(args.pipe.split(",")))
    for name in (flag.replace("-", "_") for flag in _ACCESS):
        if getattr(args, name) is not None:
            setattr(known, name, getattr(args, name))
    return from_flags(WorkerConfig, known)


def _access_flags(config: WorkerConfig) -> list[str]:
    flags: list[str] = []
    for flag in _ACCESS:
        value = getattr(config, flag.replace("-", "_"))
        if value:
            flags += [f"--{flag}"] if value is True else [f"--{flag}", value]
    return flags


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
