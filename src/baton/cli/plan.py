"""The processes of a deployment on this machine, planned from the flags and the file of ``baton up``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import re
import secrets
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

from baton.cli.model_check import check_engine
from baton.cli.parser import RoleArgsParser
from baton.cli.supervisor import DeploymentPlan, ProcessSpec
from baton.config import EngineConfig, add_flags, from_flags
from baton.config.autoscale import AutoscaleConfig
from baton.config.cluster_file import NO_FILE, ROLES, ClusterFile, Pool
from baton.config.demo_model import default_model
from baton.config.deployment import LOOPBACK, ListenConfig
from baton.config.flags import ENV_PREFIX, Placed, resolve
from baton.config.kvstore import KVStoreConfig
from baton.config.router import RouterConfig
from baton.config.secrets import flags_with_passwords
from baton.config.worker import WorkerConfig
from baton.errors import ConfigError
from baton.rpc.addresses import is_loopback, join_address
from baton.rpc.server import free_ports
from baton.tokenizer.model_files import check_model_path
from baton.worker.process import add_config_flags

_ACCESS = ("token-file", "tls-cert", "tls-key", "tls-ca", "tls-name", "clear-kv")
_LOG = ("log-format", "log-level")
_OWNED = {
    "router": ("host", "port", "grpc-port", *_ACCESS),
    **dict.fromkeys(("prefill", "decode"), ("host", "port", "metrics-port", "instance-id", "routers", *_ACCESS)),
}
"""Flags that ``baton up`` sets, so that the services find each other."""
_INSTEAD = {
    "router": {name: f"--{name}" for name in ("host", "port", "grpc-port")},
    **{role: {"host": "--instance-host", "metrics-port": "--metrics-port"} for role in ("prefill", "decode")},
}
"""Flags of ``baton up`` in place of those."""
T = TypeVar("T")
_LOCAL_ADDRESSES = {"0.0.0.0": LOOPBACK, "::": "[::1]", "[::]": "[::1]"}
"""Addresses under which processes of this host call one that listens on all of its addresses."""
MAX_INSTANCES = 64
FREE_PORTS = ListenConfig(port=0, grpc_port=0)

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
    listen: ListenConfig = FREE_PORTS,
    router_metrics_port: int = 0,
    pipes: str = "",
    kvstore: bool = False,
    access: Sequence[str] = (),
    extra: ExtraArgs | None = None,
) -> DeploymentPlan:
    """Plan a deployment on this machine.

    Args:
        ratio: Number of prefill and decode instances.
        listen: Addresses and ports; default: free ones of loopback.
        router_metrics_port: Port of the router's /metrics, to be shown; 0: its HTTP port.
        pipes: Comma-separated kinds of pipe, in order of preference; empty: the services' default.
        kvstore: Whether a KV store runs too, used by all instances.
        access: Flags of all services, such as those for token and certificates.
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
    free = iter(free_ports(2 * num_workers + 5))
    metrics = itertools.count(listen.metrics_port + 1) if listen.metrics_port else free
    store_metrics, scaling_metrics = next(metrics), next(metrics)
    http_port, router_port = listen.port or next(free), listen.grpc_port or next(free)
    local = _LOCAL_ADDRESSES.get(listen.host, listen.host)
    http, grpc = f"{local}:{http_port}", f"{local}:{router_port}"
    config = ("--config", more.config) if more.config else ()
    both = (*config, *(("--pipes", pipes) if pipes else ()), *access)
    store = _spec("kvstore", "kvstore", listen.instance_host, (next(free), store_metrics), both) if kvstore else None
    knows = () if store is None else ("--kvstore", store.health_address)
    shared = ("--routers", grpc, *both, *knows, *more.worker)
    own = {"prefill": more.prefill, "decode": more.decode}
    further: dict[str, tuple[int, int]] = {}  # ports by name: one that comes again has those that it had
    workers = []
    for pool in pools:
        args = [*shared, *own[pool.role]]
        if config and pool.name != pool.role:
            args = [*shared, "--pool", pool.name, *own[pool.role]]
        for index in range(pool.replicas or 0):
            ports = next(free), next(metrics)
            workers.append(_spec(pool.role, f"{pool.name}-{index}", listen.instance_host, ports, args))

    def one_more(role: str, name: str, instead: ProcessSpec | None) -> ProcessSpec:
        ports = further.get(name) if instead is None else _ports(instead)
        if ports is None:
            port, free_metrics = free_ports(2)
            ports = further[name] = port, next(metrics) if listen.metrics_port else free_metrics
        return _spec(role, name, listen.instance_host, ports, [*shared, *own[role]])

    words, env = _without_passwords([*config, *access, *knows, *more.router])
    router = ProcessSpec(
        name="router",
        module="baton_router.main",
        args=("--host", listen.host, "--port", str(http_port), "--grpc-port", str(router_port), *words),
        env=env,
        health_address=grpc,
        role="router",
        listens=(
            ("http", f"{listen.host}:{http_port}"),
            ("grpc", f"{listen.host}:{router_port}"),
            ("metrics", f"{listen.host}:{router_metrics_port or http_port}/metrics"),
        ),
    )
    secure = "--tls-cert" in access and "--no-http-tls" not in more.router
    scheme = "https" if secure else "http"
    return DeploymentPlan(store, router, tuple(workers), http, grpc, scheme, scaling_metrics, worker=one_more)


def _spec(role: str, name: str, host: str, ports: tuple[int, int], args: Sequence[str]) -> ProcessSpec:
    """Return the specification of a service with a gRPC port and a metrics port."""
    port, metrics_port = ports
    own = ("--host", host, "--port", str(port), "--metrics-port", str(metrics_port), "--instance-id", name)
    address = join_address(host, port)
    listens = (("grpc", address), ("metrics", f"{join_address(host, metrics_port)}/metrics"))
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
    reasons = {}
    for flag in _OWNED[role]:
        instead = _INSTEAD[role].get(flag, "").removeprefix("--")
        told = f"; give {instead} at the top of the file" if instead else ""
        reasons[flag.replace("-", "_")] = f"is set by baton up itself{told}"
    return reasons


def plan_from(args: argparse.Namespace, file: ClusterFile = NO_FILE, *, will_run: bool = True) -> DeploymentPlan:
    """Return the plan that flags and file describe.

    Args:
        args: Flags of ``baton up``.
        file: The deployment's file.
        will_run: Whether this machine must be able to run the model, see :func:`check_engine`.

    Raises:
        ConfigError: A value is invalid.
    """
    listen = listen_config(args, file)
    workers = worker_config(args, file)
    router = _router_config(args, file, listen)
    model = _model(from_flags(EngineConfig, args, file=file.values("decode")))
    for pool in file.pools:
        config = _engine(args, file, pool)
        if will_run:
            with _naming_flags(args, pool.role):
                check_engine(config)
    further = tuple(pool for pool in file.pools if pool.name not in ROLES)
    return make_plan(
        ratio=_ratio(args, file),
        listen=listen,
        router_metrics_port=router.metrics_port,
        pipes=args.pipe or "",
        kvstore=bool(_setting(args.kvstore, file, "kvstore.enabled", default=False)),
        access=(*_access_flags(workers), *_log_flags(args)),
        extra=ExtraArgs(
            worker=("--model", model, *engine_flags(args)),
            prefill=(*rank_flags(args, "prefill"), *_role_args(args, "prefill")),
            decode=(*rank_flags(args, "decode"), *_role_args(args, "decode")),
            router=(*_router_flags(args, listen), *_role_args(args, "router")),
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


def listen_config(args: argparse.Namespace, file: ClusterFile = NO_FILE) -> ListenConfig:
    """Return the addresses and ports of the deployment.

    Raises:
        ConfigError: A flag, a variable or a value of the file is invalid.
    """
    return from_flags(ListenConfig, args, file=file.listen_values())


def _router_config(args: argparse.Namespace, file: ClusterFile, listen: ListenConfig) -> RouterConfig:
    """Check the router's configuration before anything starts.

    Raises:
        ConfigError: A flag, a variable or a value of the file is invalid, or other machines could use the router
            without an API key.
    """
    known = _router_namespace(args)
    for name in ("host", "port", "grpc_port"):
        setattr(known, name, getattr(listen, name))
    if listen.metrics_port and not hasattr(known, "metrics_port"):
        known.metrics_port = listen.metrics_port
    access = worker_config(args, file)
    for flag in _ACCESS:
        setattr(known, flag.replace("-", "_"), getattr(access, flag.replace("-", "_")))
    config = from_flags(RouterConfig, known, file=file.values("router"))
    if not (config.api_keys or config.open_http or is_loopback(listen.host)):
        raise ConfigError(
            f"others can reach {listen.host}: give --api-keys FILE, or --open-http to serve without keys", field="host"
        )
    return config


def _router_namespace(args: argparse.Namespace) -> argparse.Namespace:
    """Return the router's flags as parsed: those of ``--router-args``, then ``--api-keys`` and ``--open-http``."""
    known = _parse_role_args(args, "router")
    for name in ("api_keys", "open_http"):
        if getattr(args, name) is not None and not hasattr(known, name):
            setattr(known, name, getattr(args, name))
    return known


def _router_flags(args: argparse.Namespace, listen: ListenConfig) -> list[str]:
    """Return the router's command line as far as flags of ``baton up`` ask for it."""
    flags = ["--metrics-port", str(listen.metrics_port)] if listen.metrics_port else []
    flags += ["--api-keys", args.api_keys] if args.api_keys is not None else []
    if args.open_http is not None:
        flags += ["--open-http" if args.open_http else "--no-open-http"]
    return flags


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


def _engine(args: argparse.Namespace, file: ClusterFile, pool: Pool) -> EngineConfig:
    """Return the engine's configuration of a pool's instances, as those will read it."""
    known = argparse.Namespace(**vars(args))
    for size in ("tp", "pp"):
        if (count := getattr(args, f"{pool.role}_{size}")) is not None:
            setattr(known, size, count)
    own = _parse_role_args(args, pool.role)
    values = file.values(pool.name)
    with _naming_flags(args, pool.role):
        from_flags(WorkerConfig, _joined(_worker_namespace(args, file), own), file=values)
        config = from_flags(EngineConfig, _joined(known, own), file=values)
        return dataclasses.replace(config, model=_model(config))


@contextlib.contextmanager
def _naming_flags(args: argparse.Namespace, role: str) -> Iterator[None]:
    """Have a ``ConfigError`` name the flag of this role alone that set the field, if one did."""
    try:
        yield
    except ConfigError as error:
        field = error.field or ""
        if hasattr(_parse_role_args(args, role), field):
            raise ConfigError(f"--{role}-args: {error.message}", field=f"{role}_args") from None
        if getattr(args, f"{role}_{field}", None) is not None:
            raise ConfigError(f"{role} instances: {error.message}", field=f"{role}_{field}") from None
        raise


def _model(config: EngineConfig) -> str:
    """Return the model of an engine's configuration, which is the demo model if none is given."""
    model = config.model if config.model != EngineConfig.model else default_model()
    if not model:
        raise ConfigError("--model must not be empty", field="model")
    check_model_path(model)
    return model


def _joined(first: argparse.Namespace, second: argparse.Namespace) -> argparse.Namespace:
    """Return the flags of both; of one that both have the second's value."""
    return argparse.Namespace(**vars(first) | vars(second))


@contextlib.contextmanager
def own_token(args: argparse.Namespace, file: ClusterFile = NO_FILE) -> Iterator[str]:
    """Give the services a new token if they need one and no token file is set.

    They need one off loopback, unless certificates protect them, and where the router requires API keys: without it,
    keys would protect only the router's calls, and other users of this machine could read tenants' KV and register
    instances. The file is readable by this user only, and is removed at the end.

    Yields:
        Path of the new token file; empty: there is none.
    """
    listen = listen_config(args, file)
    workers = worker_config(args, file)
    keys = resolve(RouterConfig, _router_namespace(args), file=file.values("router"))["api_keys"].value
    reachable = not (is_loopback(listen.host) and is_loopback(listen.instance_host))
    if workers.token_file or not (keys or (reachable and not workers.tls_cert)):
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="baton-up-") as folder:
        path = Path(folder, "token")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as token:
            token.write(secrets.token_hex(32))
        args.token_file = str(path)
        yield args.token_file


def _role_args(args: argparse.Namespace, role: str) -> tuple[str, ...]:
    """Return the words of ``--router-args``, ``--prefill-args`` or ``--decode-args``."""
    try:
        return tuple(shlex.split(getattr(args, f"{role}_args")))
    except ValueError as error:
        raise ConfigError(f"--{role}-args: {error}", field=f"{role}_args") from None


def _parse_role_args(args: argparse.Namespace, role: str) -> argparse.Namespace:
    """Parse the flags of ``--router-args``, ``--prefill-args`` or ``--decode-args`` as the service will.

    Raises:
        ConfigError: A flag is unknown, has no usable value, or is one that ``baton up`` sets.
    """
    field = f"{role}_args"
    words = _role_args(args, role)
    owned = argparse.ArgumentParser(add_help=False)
    for flag in _OWNED[role]:
        owned.add_argument(f"--{flag}", nargs="?", const="", default=argparse.SUPPRESS)
    for name in vars(owned.parse_known_args(words)[0]):
        flag = name.replace("_", "-")
        instead = _INSTEAD[role].get(flag, f"--{flag}" if flag in _ACCESS else "")
        told = f"; give {instead} to baton up" if instead else ""
        raise ConfigError(f"--{role}-args: --{flag} is set by baton up itself{told}", field=field)
    parser = RoleArgsParser(prog=f"--{role}-args", add_help=False, allow_abbrev=True)
    add_config_flags(parser, role)
    for config in service_configs()["router" if role == "router" else "worker"]:
        add_flags(parser, config)
    return cast(argparse.Namespace, parser.parse_args(words))


def worker_config(args: argparse.Namespace, file: ClusterFile = NO_FILE) -> WorkerConfig:
    """Check the configuration of every instance before anything starts; returns that of the first pool.

    Raises:
        ConfigError: A flag, a variable or a value of the file is invalid.
    """
    known = _worker_namespace(args, file)
    configs = [from_flags(WorkerConfig, known, file=file.values(pool.name)) for pool in file.pools]
    return configs[0]


def _worker_namespace(args: argparse.Namespace, file: ClusterFile) -> argparse.Namespace:
    """Return the flags of all instances that ``baton up`` gives them."""
    known = argparse.Namespace(host=listen_config(args, file).instance_host)
    if args.pipe is not None:
        known.pipes = tuple(args.pipe.split(","))
    for name in (flag.replace("-", "_") for flag in (*_ACCESS, *_LOG)):
        if getattr(args, name) is not None:
            setattr(known, name, getattr(args, name))
    return known


def _log_flags(args: argparse.Namespace) -> list[str]:
    given = {flag: getattr(args, flag.replace("-", "_")) for flag in _LOG}
    return [word for flag, value in given.items() if value is not None for word in (f"--{flag}", value)]


def _access_flags(config: WorkerConfig) -> list[str]:
    flags: list[str] = []
    for flag in _ACCESS:
        value = getattr(config, flag.replace("-", "_"))
        if value:
            flags += [f"--{flag}"] if value is True else [f"--{flag}", value]
    return flags


def rank_flags(args: argparse.Namespace, role: str) -> list[str]:
    """Return the parallelism flags of a role's instances, if they are given for this role."""
    given = {size: getattr(args, f"{role}_{size}") for size in ("tp", "pp")}
    return [word for size, count in given.items() if count is not None for word in (f"--{size}", str(count))]


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
