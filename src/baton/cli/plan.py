"""The processes of a deployment on this machine, planned from the flags and the file of ``baton up``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import secrets
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from baton.cli.supervisor import DeploymentPlan, ProcessSpec
from baton.config import EngineConfig, from_flags
from baton.config.autoscale import AutoscaleConfig
from baton.config.cluster_file import NO_FILE, ROLES, ClusterFile, Pool
from baton.config.demo_model import default_model
from baton.config.flags import ENV_PREFIX, Placed
from baton.config.kvstore import KVStoreConfig
from baton.config.router import RouterConfig
from baton.config.secrets import flags_with_passwords
from baton.config.worker import WorkerConfig
from baton.errors import ConfigError
from baton.rpc.server import free_ports
from baton.tokenizer.model_files import check_model_path

_ACCESS = ("token-file", "tls-cert", "tls-key", "tls-ca", "tls-name", "clear-kv")
_OWNED = {
    "router": ("host", "port", "grpc-port", *_ACCESS),
    **dict.fromkeys(("prefill", "decode"), ("host", "port", "metrics-port", "instance-id", "routers", *_ACCESS)),
}
"""Flags that ``baton up`` sets, so that the services find each other."""
T = TypeVar("T")
DEFAULT_PORT = 8000
DEFAULT_GRPC_PORT = 8001
HOST = "127.0.0.1"
MAX_INSTANCES = 64

_URLS = frozenset({"--redis", "--kvstore"})
"""Flags whose values may contain passwords."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """x prefill and y decode instances, written ``xPyD``."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> Ratio:
        """Parse a ratio such as ``2P3D``.

        Raises:
            ConfigError: The text is malformed, or has no decode instance or too many instances.
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
    """Additional flags of some processes."""

    worker: tuple[str, ...] = ()
    """For every instance."""
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    router: tuple[str, ...] = ()
    config: str = ""
    """Configuration file of all processes."""
    pools: tuple[Pool, ...] = ()
    """Instances beside those of the ratio."""


def make_plan(
    *,
    ratio: Ratio,
    port: int,
    grpc_port: int = 0,
    pipes: str = "",
    kvstore: bool = False,
    access: Sequence[str] = (),
    extra: ExtraArgs | None = None,
) -> DeploymentPlan:
    """Plan a deployment on loopback.

    Args:
        ratio: Number of prefill and decode instances.
        port: HTTP port of the router; 0 takes a free one.
        grpc_port: gRPC port of the router; 0 takes a free one.
        pipes: Comma-separated kinds of pipe, in order of preference; empty: the services' default.
        kvstore: Whether a KV store runs too, used by all instances.
        access: Flags for token and certificates of all services.
        extra: Additional flags.

    Raises:
        ConfigError: torch is not installed, or there are too many instances.
    """
    if find_spec("torch") is None:
        raise ConfigError("prefill and decode instances need torch: pip install 'baton-serve[engine]'", field="ratio")
    more = extra or ExtraArgs()
    pools = (Pool("prefill", "prefill", ratio.prefill), Pool("decode", "decode", ratio.decode), *more.pools)
    num_workers = sum(pool.replicas or 0 for pool in pools)
    if num_workers > MAX_INSTANCES:
        raise ConfigError(f"{num_workers} instances are more than {MAX_INSTANCES}", field="ratio")
    free = iter(free_ports(2 * num_workers + 4))
    http = f"{HOST}:{port or next(free)}"
    grpc = f"{HOST}:{grpc_port or next(free)}"
    config = ("--config", more.config) if more.config else ()
    both = (*config, *(("--pipes", pipes) if pipes else ()), *access)
    store = _spec("kvstore", "kvstore", (next(free), next(free)), both) if kvstore else None
    knows = () if store is None else ("--kvstore", store.health_address)
    shared = ("--routers", grpc, *both, *knows, *more.worker)
    own = {"prefill": more.prefill, "decode": more.decode}
    workers = []
    for pool in pools:
        args = [*shared, *own[pool.role]]
        if config and pool.name != pool.role:
            args = [*shared, "--pool", pool.name, *own[pool.role]]
        for index in range(pool.replicas or 0):
            workers.append(_spec(pool.role, f"{pool.name}-{index}", (next(free), next(free)), args))

    def one_more(role: str, name: str, instead: ProcessSpec | None) -> ProcessSpec:
        port, metrics_port = free_ports(2) if instead is None else _ports(instead)
        return _spec(role, name, (port, metrics_port), [*shared, *own[role]])

    host, http_port = http.rsplit(":", 1)
    words, env = _without_passwords([*config, *access, *knows, *more.router])
    router = ProcessSpec(
        name="router",
        module="baton_router.main",
        args=("--host", host, "--port", http_port, "--grpc-port", grpc.rsplit(":", 1)[1], *words),
        env=env,
        health_address=grpc,
        role="router",
        listens=(("http", http), ("grpc", grpc), ("metrics", f"{http}/metrics")),
    )
    secure = "--tls-cert" in access and "--no-http-tls" not in more.router
    scheme = "https" if secure else "http"
    return DeploymentPlan(store, router, tuple(workers), http, grpc, scheme, worker=one_more)


def _spec(role: str, name: str, ports: tuple[int, int], args: Sequence[str]) -> ProcessSpec:
    """Return the specification of a service with a gRPC port and a metrics port."""
    port, metrics_port = ports
    own = ("--host", HOST, "--port", str(port), "--metrics-port", str(metrics_port), "--instance-id", name)
    address = f"{HOST}:{port}"
    listens = (("grpc", address), ("metrics", f"{HOST}:{metrics_port}/metrics"))
    more, env = _without_passwords(args)
    return ProcessSpec(name, f"baton_{role}.main", (*own, *more), address, role, listens, env)


def _ports(spec: ProcessSpec) -> tuple[int, int]:
    port, metrics_port = (address.partition("/")[0].rpartition(":")[2] for _, address in spec.listens)
    return int(port), int(metrics_port)


def _without_passwords(args: Sequence[str]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Move URLs with passwords from a command line, which all users of the host can read, to the environment.

    Returns:
        The remaining words, and the variables with the URLs.
    """
    words = list(args)
    env: dict[str, str] = {}
    hidden = set(flags_with_passwords(args)) & _URLS
    for at in reversed(range(len(words))):
        flag, equals, value = words[at].partition("=")
        if flag in hidden and (equals or words[at + 1 :]):
            name = ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper()
            env.setdefault(name, value if equals else words[at + 1])
            del words[at : at + (1 if equals else 2)]
    return tuple(words), tuple(env.items())


# --- the flags and the file of baton up ---


def service_configs() -> dict[str, tuple[type, ...]]:
    """Return the dataclasses that define each service's flags, by the service's name in a cluster file."""
    return {
        "router": (RouterConfig,),
        "worker": (WorkerConfig, EngineConfig),
        "kvstore": (KVStoreConfig,),
        "autoscale": (AutoscaleConfig,),
    }


def read_file(args: argparse.Namespace) -> ClusterFile:
    """Read the file that ``--config`` names, if the flag is given.

    Raises:
        ConfigError: The file cannot be read or is invalid; says path and line.
    """
    file = ClusterFile(args.config, service_configs())
    file.refuse("router", _reasons("router"))
    file.refuse("kvstore", _reasons("prefill"))
    for section in ("worker", *(pool.name for pool in file.pools)):
        file.refuse(section, _reasons("prefill"))
    return file


def own_flags(role: str) -> frozenset[str]:
    """Return the names of the fields that ``baton up`` sets for a service."""
    names = (*_OWNED["decode" if role == "kvstore" else role], "model", "kvstore")
    return frozenset(name.replace("-", "_") for name in names if name not in _ACCESS)


def _reasons(role: str) -> dict[str, str]:
    instead = {"port": "port", "grpc_port": "grpc-port"} if role == "router" else {}
    text = "is set by baton up itself"
    names = [flag.replace("-", "_") for flag in _OWNED[role]]
    return {name: f"{text}; give {instead[name]} at the top of the file" if name in instead else text for name in names}


def plan_from(args: argparse.Namespace, file: ClusterFile = NO_FILE) -> DeploymentPlan:
    """Return the plan that flags and file describe.

    Raises:
        ConfigError: A value is invalid.
    """
    port = _port(args, file, "port", DEFAULT_PORT)
    grpc_port = _port(args, file, "grpc_port", DEFAULT_GRPC_PORT)
    workers = worker_config(args, file)
    engines = {role: _engine(args, file, role) for role in ROLES}
    model = engines["decode"].model if engines["decode"].model != EngineConfig.model else default_model()
    if not model:
        raise ConfigError("--model must not be empty", field="model")
    check_model_path(model)
    further = tuple(pool for pool in file.pools if pool.name not in ROLES)
    for pool in further:
        _engine(args, file, pool.name)
    return make_plan(
        ratio=_ratio(args, file),
        port=port,
        grpc_port=grpc_port,
        pipes=args.pipe or "",
        kvstore=bool(_setting(args.kvstore, file, "kvstore.enabled", default=False)),
        access=_access_flags(workers),
        extra=ExtraArgs(
            worker=("--model", model, *engine_flags(args)),
            prefill=(*rank_flags(args, engines["prefill"], "prefill"), *_role_args(args, "prefill")),
            decode=(*rank_flags(args, engines["decode"], "decode"), *_role_args(args, "decode")),
            router=_role_args(args, "router"),
            config=args.config,
            pools=further,
        ),
    )


def restarts(args: argparse.Namespace, file: ClusterFile) -> bool:
    """Whether processes that die are restarted."""
    return bool(_setting(None if args.no_restart is None else not args.no_restart, file, "restart", default=True))


def autoscale_config(args: argparse.Namespace, file: ClusterFile) -> AutoscaleConfig | None:
    """Return the configuration of the autoscaler; ``None``: it is disabled.

    Raises:
        ConfigError: A value is invalid.
    """
    if not _setting(args.autoscale, file, "autoscale.enabled", default=False):
        return None
    return from_flags(AutoscaleConfig, args, file=file.values("autoscale"))


def _setting(given: Any, file: ClusterFile, name: str, *, default: Any) -> Any:
    placed = file.setting(name)
    return given if given is not None else default if placed is None else placed.value


def _port(args: argparse.Namespace, file: ClusterFile, field: str, default: int) -> int:
    port: int = _setting(getattr(args, field), file, field.replace("_", "-"), default=default)
    if not 0 <= port < 65536:
        raise ConfigError(f"--{field.replace('_', '-')} must be between 0 and 65535, got {port}", field=field)
    return port


def _ratio(args: argparse.Namespace, file: ClusterFile) -> Ratio:
    if args.ratio is not None:
        return Ratio.parse(args.ratio)
    if (ratio := file.setting("ratio")) is not None:
        return _placed(ratio, lambda: Ratio.parse(ratio.value))
    counts = {pool.role: pool.replicas for pool in file.pools if pool.name in ROLES}
    x, y = (1 if count is None else count for count in (counts["prefill"], counts["decode"]))
    if y < 1 and not any(pool.role == "decode" and pool.name != "decode" for pool in file.pools):
        raise ConfigError(f"{file.path} has no decode instance", field="ratio")
    return Ratio(x, y)


def _placed(placed: Placed, make: Callable[[], T]) -> T:
    """Call ``make``; its errors get the value's place in the file."""
    try:
        return make()
    except ConfigError as error:
        raise ConfigError(f"{placed.where}: {error.message}", field=error.field) from None


def _engine(args: argparse.Namespace, file: ClusterFile, pool: str) -> EngineConfig:
    return from_flags(EngineConfig, args, file=file.values(pool))


@contextlib.contextmanager
def own_token(args: argparse.Namespace, file: ClusterFile = NO_FILE) -> Iterator[None]:
    """Give the services a new token if the router requires API keys and no token file is set.

    Without a token, API keys would protect only the router's calls: other users of this machine could read tenants' KV
    and register instances. The file is readable by this user only, and is removed at the end.
    """
    keys = any(word.partition("=")[0] == "--api-keys" for word in _role_args(args, "router"))
    keys = keys or bool(os.environ.get("BATON_API_KEYS")) or "api_keys" in file.values("router")
    if worker_config(args, file).token_file or not keys:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="baton-up-") as folder:
        path = Path(folder, "token")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as token:
            token.write(secrets.token_hex(32))
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


def worker_config(args: argparse.Namespace, file: ClusterFile = NO_FILE) -> WorkerConfig:
    """Check the configuration of every instance before anything starts; returns that of the first pool.

    Raises:
        ConfigError: A flag, a variable or a value of the file is invalid.
    """
    known = argparse.Namespace()
    if args.pipe is not None:
        known.pipes = tuple(args.pipe.split(","))
    for name in (flag.replace("-", "_") for flag in _ACCESS):
        if getattr(args, name) is not None:
            setattr(known, name, getattr(args, name))
    configs = [from_flags(WorkerConfig, known, file=file.values(pool.name)) for pool in file.pools]
    return configs[0]


def _access_flags(config: WorkerConfig) -> list[str]:
    flags: list[str] = []
    for flag in _ACCESS:
        value = getattr(config, flag.replace("-", "_"))
        if value:
            flags += [f"--{flag}"] if value is True else [f"--{flag}", value]
    return flags


def rank_flags(args: argparse.Namespace, engine: EngineConfig, role: str) -> list[str]:
    """Return the parallelism flags of a role's instances, if they are given for this role.

    Raises:
        ConfigError: A size is invalid.
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
        flag = item.name.replace("_", "-")
        value = getattr(args, item.name)
        value = ",".join(value) if isinstance(value, tuple) else value
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags
