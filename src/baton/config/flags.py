"""Command-line flags from a configuration dataclass, with the environment as their default.

A field ``kv_blocks: int | None = option(None, "...")`` becomes ``--kv-blocks``, ``BATON_KV_BLOCKS``, and ``kv-blocks``
in a configuration file. Order of precedence: flag, environment, file, the dataclass's default.

The flags that all services share are those of :class:`ServiceConfig`, the base of the services' configurations; tools
that call services share :class:`AccessConfig`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from baton.config.secrets import read_secret_file
from baton.errors import ConfigError

T = TypeVar("T")
ENV_PREFIX = "BATON_"
SECRET_HELP = "@FILE: as that file says, its owner's alone"
CLEAR_KV_HELP = "with --tls-cert, KV may travel in the clear: auto means tcp or nixl, not tls; they may leave loopback"
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


def option(
    default: Any, help: str, *, choices: tuple[str, ...] | None = None, secret: bool = False, after: str = ""
) -> Any:
    """Declare a configuration field.

    Args:
        default: Default value.
        help: Help text of the flag.
        choices: Allowed values; ``None``: any.
        secret: The value may also be given as ``@FILE``, a file that contains it.
        after: Name of the shared field (of :class:`ServiceConfig`) that this flag, and those declared after it, follow;
            by default a service's own flags come before the shared ones.
    """
    metadata = {
        "help": help + (f"; {SECRET_HELP}" if secret else ""),
        "choices": choices,
        "secret": secret,
        "after": after,
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class AccessConfig:
    """Credentials with which a client calls the services."""

    token_file: str = option(
        "",
        "file with the services' common token; of several lines the first is proved, each is accepted; read again when "
        "it changes",
    )
    tls_cert: str = option("", "file with this service's certificate (PEM), shown to all others; default: no TLS")
    tls_key: str = option("", "file with the key of --tls-cert")
    tls_ca: str = option("", "file with the authority whose certificates are believed")
    tls_name: str = option(
        "", "name that others' certificates must have; default: the host under which they are reached"
    )
    tls_roles = ""  # a client does not check the roles of services


@dataclasses.dataclass(frozen=True)
class ServiceConfig(AccessConfig):
    """Flags that router, instances and KV store share: credentials, audit log, traces and log."""

    tls_roles: str = option(
        "", "URI in certificates that says what holders may call, as spiffe://example.org/{role}; default: everything"
    )
    audit_log: str = option("", "file for the audit log, a JSON line per event; default: the standard log")
    core_dumps: bool = option(False, "let a crash write memory to disk, keys, prompts and KV with it")
    otlp_traces_endpoint: str = option(
        "",
        "OTLP collector (gRPC) that gets the spans of sampled requests, as http://collector:4317; OpenTelemetry's own "
        "variables (OTEL_EXPORTER_OTLP_ENDPOINT, ..._HEADERS, OTEL_RESOURCE_ATTRIBUTES) hold too; default: none",
    )
    log_format: str = option(
        "text",
        "lines of the log: text, or json, an object per line with request ids as a field",
        choices=LOG_FORMATS,
    )
    log_level: str = option("info", "least important messages to log", choices=LOG_LEVELS)


def flag_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of a configuration in the order of its flags; see ``after`` of :func:`option`."""
    fields = list(dataclasses.fields(cls))
    shared = [item.name for item in dataclasses.fields(ServiceConfig)] if issubclass(cls, ServiceConfig) else []
    following: dict[str, list[dataclasses.Field[Any]]] = {name: [] for name in ("", *shared)}
    after = ""
    for item in fields:
        if item.name not in shared:
            after = item.metadata.get("after") or after
            following[after].append(item)
    by_name = {item.name: item for item in fields}
    ordered = following[""]
    for name in shared:
        ordered += [by_name[name], *following[name]]
    return ordered


def add_flags(parser: argparse.ArgumentParser, cls: type, *, skip: frozenset[str] = frozenset()) -> None:
    """Add one flag per field of ``cls`` that has a help text; absent flags parse to ``argparse.SUPPRESS``."""
    hints = typing.get_type_hints(cls)
    group = parser.add_argument_group(cls.__name__)
    for item in flag_fields(cls):
        text = item.metadata.get("help")
        if text is None or item.name in skip:
            continue
        kind = base_type(hints[item.name])
        default = None if item.default is dataclasses.MISSING else item.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        suffix = "" if default in (None, "", ()) else f" (default: {shown})"
        flag = "--" + item.name.replace("_", "-")
        options: dict[str, Any] = {
            "dest": item.name,
            "default": argparse.SUPPRESS,
            "help": (text + suffix).replace("%", "%%"),
        }
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        else:
            choices = item.metadata.get("choices")
            parse = (lambda s: tuple(p for p in s.split(",") if p)) if kind is tuple else kind
            group.add_argument(
                flag, type=parse, choices=choices, metavar=None if choices else _metavar(kind), **options
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A value of a configuration file and its place there, such as ``cluster.yaml:12``."""

    value: Any
    where: str


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """The value of a field and its source.

    Attributes:
        value: Value for the dataclass; a secret given as ``@FILE`` is not read yet.
        source: ``flag``, the environment variable, the place in a file, or ``default``.
    """

    value: Any
    source: str


def resolve(
    cls: type,
    args: argparse.Namespace,
    *,
    env: Mapping[str, str] | None = None,
    file: Mapping[str, Placed] | None = None,
) -> dict[str, Resolved]:
    """Resolve each field: a flag goes before the environment, that before a file, that before the default.

    Raises:
        ConfigError: A value in the environment or the file cannot be read; names the variable or the place.
    """
    source = os.environ if env is None else env
    hints = typing.get_type_hints(cls)
    resolved: dict[str, Resolved] = {}
    for item in flag_fields(cls):
        variable = ENV_PREFIX + item.name.upper()
        if hasattr(args, item.name):
            resolved[item.name] = Resolved(getattr(args, item.name), "flag")
        elif item.metadata.get("help") is not None and variable in source:
            value = _parse(source[variable], base_type(hints[item.name]), variable)
            choices = item.metadata.get("choices")
            if choices and value not in choices:
                raise ConfigError(f"{variable} must be one of {', '.join(choices)}, got {value!r}", field=variable)
            resolved[item.name] = Resolved(value, variable)
        elif file is not None and item.name in file and file[item.name].value is not None:
            placed = file[item.name]
            resolved[item.name] = Resolved(_from_file(placed, base_type(hints[item.name]), item.name), placed.where)
        elif item.default is not dataclasses.MISSING:
            resolved[item.name] = Resolved(item.default, "default")
        elif item.default_factory is not dataclasses.MISSING:
            resolved[item.name] = Resolved(item.default_factory(), "default")
    return resolved


def from_flags(
    cls: type[T],
    args: argparse.Namespace,
    *,
    env: Mapping[str, str] | None = None,
    file: Mapping[str, Placed] | None = None,
) -> T:
    """Build ``cls`` from parsed flags, the environment and what a configuration file says, in this order.

    Raises:
        ConfigError: A value cannot be read, is none of the choices, or contradicts others; names the variable or the
            place in the file.
    """
    resolved = resolve(cls, args, env=env, file=file)
    items = {item.name: item for item in flag_fields(cls)}
    values = {name: _read_secret(items[name], each.value) for name, each in resolved.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        culprit = resolved.get(error.field or "")
        if file is None or culprit is None or (error.field or "") not in file or culprit.source in ("flag", "default"):
            raise
        if culprit.source.startswith(ENV_PREFIX):
            raise
        raise ConfigError(f"{culprit.source}: {error.message}", field=error.field) from None


def _from_file(placed: Placed, kind: Any, name: str) -> Any:
    """Convert a file's value, whose type was checked against the schema, to the field's type."""
    try:
        return tuple(placed.value) if kind is tuple else kind(placed.value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{placed.where}: {name}: {error}", field=name) from error


def _read_secret(item: dataclasses.Field[Any], value: Any) -> Any:
    """Return a field's value; for a secret given as ``@FILE``, the content of the file."""
    if not (item.metadata.get("secret") and value.startswith("@")):
        return value
    flag = f"--{item.name.replace('_', '-')}"
    try:
        content = read_secret_file(value[1:], f"the file of {flag}", item.name).decode().strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file of {flag} is no text", field=item.name) from error
    if not content:
        raise ConfigError(f"the file of {flag} {value[1:]} is empty", field=item.name)
    return content


def options_by_name(names: Sequence[str], options: Sequence[str], *, field: str) -> dict[str, dict[str, str]]:
    """Sort ``name.key=value`` by name.

    Args:
        names: Names that may have options.
        options: Options of all names, ``name.key=value`` each.
        field: Name of the configuration field, for errors.

    Raises:
        ConfigError: An option is malformed, or its name is not among ``names``.
    """
    by_name: dict[str, dict[str, str]] = {name: {} for name in names}
    for item in options:
        left, equals, value = item.partition("=")
        name, dot, key = left.partition(".")
        if not (equals and dot and key) or name not in by_name:
            raise ConfigError(f"{item!r} is not name.key=value for one of {', '.join(names) or 'none'}", field=field)
        by_name[name][key] = value
    return by_name


def require(config: object, names: Sequence[str], fits: Callable[[Any], bool], what: str) -> None:
    """Check the values of fields; ``None`` is not a value and always fits.

    Args:
        config: The configuration.
        names: Names of the fields.
        fits: Returns whether a value is allowed.
        what: What a value must do, such as "be above 0", for errors.

    Raises:
        ConfigError: A value is not allowed; names the field.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not fits(value):
            raise ConfigError(f"{name} must {what}, got {value}", field=name)


def require_at_least(config: object, least: int, *names: str) -> None:
    """Check that no field is below a bound; raises as :func:`require` does."""
    require(config, names, lambda value: value >= least, f"be at least {least}")


def require_ports(config: object, *names: str) -> None:
    """Check that fields are numbers of ports, or 0; raises as :func:`require` does."""
    require(config, names, lambda port: 0 <= port <= 65535, "be between 0 and 65535")


def _parse(text: str, kind: type, variable: str) -> Any:
    if kind is tuple:
        return tuple(part for part in text.split(",") if part)
    if kind is bool:
        if text.lower() in {"1", "true", "yes", "on"}:
            return True
        if text.lower() in {"0", "false", "no", "off", ""}:
            return False
        raise ConfigError(f"{variable} must be a boolean, got {text!r}", field=variable)
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{variable} must be {kind.__name__}, got {text!r}", field=variable) from error


def base_type(hint: Any) -> Any:
    """``int | None`` -> ``int``; ``tuple[str, ...]`` -> ``tuple``."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    return typing.get_origin(hint) or hint


def _metavar(kind: type) -> str:
    return {int: "N", float: "X", str: "TEXT", tuple: "A,B,..."}.get(kind, kind.__name__.upper())
