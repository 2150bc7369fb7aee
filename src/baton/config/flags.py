"""Command-line flags from a configuration dataclass, with the environment as their default.

A field ``kv_blocks: int | None`` described by ``metadata={"help": ...}`` becomes ``--kv-blocks`` and
``BATON_KV_BLOCKS``, and ``kv-blocks`` in a configuration file. Order of precedence: flag, environment, file, the
dataclass's default. Here is also what all services and
tools are told alike: token and certificates.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from baton.config.secrets import read_secret_file
from baton.errors import ConfigError

T = TypeVar("T")
ENV_PREFIX = "BATON_"
SECRET_HELP = "@FILE: as the file says, which only its owner may read"


def option(default: Any, help: str, *, choices: tuple[str, ...] | None = None, secret: bool = False) -> Any:
    """Declare a configuration field with its help text; a secret one may also be given as ``@FILE``, which has it."""
    metadata = {"help": help + (f"; {SECRET_HELP}" if secret else ""), "choices": choices, "secret": secret}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def add_flags(parser: argparse.ArgumentParser, cls: type, *, skip: frozenset[str] = frozenset()) -> None:
    """Add one flag per field of ``cls`` that has a help text; absent flags parse to ``argparse.SUPPRESS``."""
    hints = typing.get_type_hints(cls)
    group = parser.add_argument_group(cls.__name__)
    for item in dataclasses.fields(cls):
        text = item.metadata.get("help")
        if text is None or item.name in skip:
            continue
        kind = base_type(hints[item.name])
        default = None if item.default is dataclasses.MISSING else item.default
        suffix = "" if default in (None, "", ()) else f" (default: {default})"
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
    """A value of a configuration file, and where it stands: ``cluster.yaml:12``."""

    value: Any
    where: str


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """The value that a field gets, and who says so.

    Attributes:
        value: As it goes into the dataclass, but a secret that names a file.
        source: ``flag``, the environment's variable, the place in a file, or ``default``.
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
    """Decide what each field gets: a flag goes before the environment, that before a file, that before the default.

    Raises:
        ConfigError: A value in the environment or the file cannot be read; names the variable or the place.
    """
    source = os.environ if env is None else env
    hints = typing.get_type_hints(cls)
    found: dict[str, Resolved] = {}
    for item in dataclasses.fields(cls):
        variable = ENV_PREFIX + item.name.upper()
        if hasattr(args, item.name):
            found[item.name] = Resolved(getattr(args, item.name), "flag")
        elif item.metadata.get("help") is not None and variable in source:
            value = _parse(source[variable], base_type(hints[item.name]), variable)
            choices = item.metadata.get("choices")
            if choices and value not in choices:
                raise ConfigError(f"{variable} must be one of {', '.join(choices)}, got {value!r}", field=variable)
            found[item.name] = Resolved(value, variable)
        elif file is not None and item.name in file and file[item.name].value is not None:
            placed = file[item.name]
            found[item.name] = Resolved(_from_file(placed, base_type(hints[item.name]), item.name), placed.where)
        elif item.default is not dataclasses.MISSING:
            found[item.name] = Resolved(item.default, "default")
        elif item.default_factory is not dataclasses.MISSING:
            found[item.name] = Resolved(item.default_factory(), "default")
    return found


def from_flags(
    cls: type[T],
    args: argparse.Namespace,
    *,
    env: Mapping[str, str] | None = None,
    file: Mapping[str, Placed] | None = None,
) -> T:
    """Build ``cls`` from parsed flags, the environment and what a configuration file says, in this order.

    Raises:
        ConfigError: A value cannot be read, is none of the choices, or does not go with others; names the variable, or
            the place in the file.
    """
    found = resolve(cls, args, env=env, file=file)
    items = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values = {name: _opened(items[name], each.value) for name, each in found.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        named = found.get(error.field or "")
        if file is None or named is None or (error.field or "") not in file or named.source in ("flag", "default"):
            raise
        if named.source.startswith(ENV_PREFIX):
            raise
        raise ConfigError(f"{named.source}: {error.message}", field=error.field) from None


def _from_file(placed: Placed, kind: Any, name: str) -> Any:
    """Return a file's value, whose type was checked against the schema, as the field has it."""
    try:
        return tuple(placed.value) if kind is tuple else kind(placed.value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{placed.where}: {name}: {error}", field=name) from error


def _opened(item: dataclasses.Field[Any], value: Any) -> Any:
    """Return what the file has that a secret value names."""
    if not (item.metadata.get("secret") and value.startswith("@")):
        return value
    flag = f"--{item.name.replace('_', '-')}"
    try:
        return read_secret_file(value[1:], f"the file of {flag}", item.name).decode().strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file of {flag} is no text", field=item.name) from error


def options_by_name(names: Sequence[str], options: Sequence[str], *, field: str) -> dict[str, dict[str, str]]:
    """Sort ``name.key=value`` by name.

    Args:
        names: Those that may have options.
        options: Of all of them.
        field: The configuration field, for errors.

    Raises:
        ConfigError: One is malformed, or of a name that is not asked for.
    """
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for item in options:
        left, equals, value = item.partition("=")
        name, dot, key = left.partition(".")
        if not (equals and dot and key) or name not in found:
            raise ConfigError(f"{item!r} is not name.key=value for one of {', '.join(names) or 'none'}", field=field)
        found[name][key] = value
    return found


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


TOKEN_FILE_HELP = (
    "file with the token that services prove to each other; of several lines the first is proved and each is accepted; "
    "read again when it changes"
)
TLS_CERT_HELP = "file with this service's certificate (PEM), shown to all others; default: no TLS"
TLS_KEY_HELP = "file with the key of --tls-cert"
TLS_CA_HELP = "file with the authority whose certificates are believed"
TLS_NAME_HELP = "name that others' certificates must have; default: the host under which they are reached"
TLS_ROLES_HELP = (
    "URI in certificates that says what holders may call, as spiffe://example.org/{role}; default: everything"
)
AUDIT_LOG_HELP = "file for the audit log, a JSON line per event; default: the standard log"
CORE_DUMPS_HELP = "let a crash write memory to disk, keys, prompts and KV with it"
CLEAR_KV_HELP = "with --tls-cert, KV may travel in the clear: auto means tcp or nixl, not tls; they may leave loopback"


@dataclasses.dataclass(frozen=True)
class AccessConfig:
    """What a client of services shows."""

    token_file: str = option("", TOKEN_FILE_HELP)
    tls_cert: str = option("", TLS_CERT_HELP)
    tls_key: str = option("", TLS_KEY_HELP)
    tls_ca: str = option("", TLS_CA_HELP)
    tls_name: str = option("", TLS_NAME_HELP)
    tls_roles = ""  # a client does not look at the roles of services
