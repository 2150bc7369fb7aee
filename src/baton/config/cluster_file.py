"""A deployment in one file: ``baton up -f cluster.yaml``, and ``--config cluster.yaml`` of each service.

The values under ``flags`` are those of the Helm chart: the services' own flags, without the leading dashes. Values
under ``worker`` apply to all instances, unless ``prefill``, ``decode`` or one of ``pools`` overrides them.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.config.deployment import ListenConfig
from baton.config.document import Node, check, read_document
from baton.config.flags import Placed, base_type, flag_fields
from baton.errors import ConfigError

ROLES = ("prefill", "decode")
SLO_METRICS = ("ttft", "tpot", "itl", "e2e")
_SECURITY = {
    "token-file": ({"type": "string"}, "file with the token that services prove to each other"),
    "tls-cert": ({"type": "string"}, "file with the services' certificate (PEM)"),
    "tls-key": ({"type": "string"}, "file with its key"),
    "tls-ca": ({"type": "string"}, "file with the authority whose certificates are believed"),
    "tls-name": ({"type": "string"}, "name that others' certificates must have"),
    "clear-kv": ({"type": "boolean"}, "with certificates, KV may travel in the clear"),
}
_ELSEWHERE = frozenset({name.replace("-", "_") for name in _SECURITY} | {"model"})
"""Fields with their own place in the file; they are not accepted under ``flags``."""
_COMMANDS = {"worker": "baton-prefill and baton-decode", "autoscale": "baton autoscale"}
_POOL_NAME = r"^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$"


_TYPES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    # Helm's --set makes text of 0.5.
    float: {"type": ["number", "string"], "pattern": r"^-?[0-9]+(\.[0-9]+)?$"},
    bool: {"type": "boolean"},
    str: {"type": "string"},
    tuple: {"type": "array", "items": {"type": "string"}},
}


@dataclass(frozen=True, slots=True)
class Pool:
    """A group of instances with the same role and flags.

    Attributes:
        name: ``prefill``, ``decode``, or a name under ``pools``.
        role: ``prefill`` or ``decode``.
        replicas: Number of instances; ``None``: not given in the file.
        line: Line number in the file, from 1.
    """

    name: str
    role: str
    replicas: int | None
    line: int = 0


def flag_schema(configs: Sequence[type], skip: Iterable[str] = ()) -> dict[str, Any]:
    """Return the JSON Schema of a service's flags, by their names without the leading dashes.

    Configuration files and the Helm chart's values use it for ``flags``.

    Args:
        configs: Dataclasses that define the flags.
        skip: Fields to leave out.
    """
    skipped = frozenset(skip)
    properties: dict[str, Any] = {}
    for config in configs:
        hints = typing.get_type_hints(config)
        for item in flag_fields(config):
            text = item.metadata.get("help")
            if text is None or item.name in skipped:
                continue
            choices = item.metadata.get("choices")
            kind = {"enum": list(choices)} if choices else _TYPES[base_type(hints[item.name])]
            properties[item.name.replace("_", "-")] = {**kind, "description": text}
    return {"type": "object", "properties": properties}


def cluster_schema(configs: Mapping[str, Sequence[type]]) -> dict[str, Any]:
    """Return the JSON Schema of a cluster file.

    Args:
        configs: Dataclasses that define the flags of ``router``, ``worker``, ``kvstore`` and ``autoscale``; the flags
            of a missing service are not checked.
    """

    def flags(service: str) -> dict[str, Any]:
        text = f"flags of {_COMMANDS.get(service, 'baton-' + service)}"
        if service not in configs:
            return {"type": "object", "description": text}
        return {**flag_schema(configs[service], _ELSEWHERE), "additionalProperties": False, "description": text}

    def mapping(text: str, **properties: Any) -> dict[str, Any]:
        return {"type": "object", "properties": properties, "additionalProperties": False, "description": text}

    replicas = {"type": "integer", "minimum": 0, "maximum": 64, "description": "instances"}
    roles = {"enum": list(ROLES), "description": "what its instances do"}
    port = {"type": "integer", "minimum": 0, "maximum": 65535}
    listen = flag_schema((ListenConfig,))["properties"]
    milliseconds = {"type": "number", "minimum": 0, "description": "milliseconds"}
    pool = mapping("instances with flags of their own", role=roles, replicas=replicas, flags=flags("worker"))
    properties = {
        "model": {"type": "string", "description": "a directory, or a name on the Hugging Face hub"},
        "ratio": {"type": "string", "pattern": r"^\d+[pP]\d+[dD]$", "example": "2P3D", "description": "xPyD"},
        **{name: {**kind, **(port if name.endswith("port") else {})} for name, kind in listen.items()},
        "restart": {"type": "boolean", "description": "start again what dies"},
        "security": mapping(
            "token and certificates, of all services",
            **{name: {**kind, "description": text} for name, (kind, text) in _SECURITY.items()},
        ),
        "slo": mapping(
            "latency targets: decode instances keep itl-ms; baton bench serve --config compares with all of them",
            **{f"{metric}-ms": milliseconds for metric in SLO_METRICS},
        ),
        "router": mapping("the router", flags=flags("router")),
        "worker": mapping("what all instances have", flags=flags("worker")),
        "prefill": mapping("prefill instances", replicas=replicas, flags=flags("worker")),
        "decode": mapping("decode instances", replicas=replicas, flags=flags("worker")),
        "pools": {"type": "object", "additionalProperties": pool, "description": "further instances, by name"},
        "kvstore": mapping(
            "a KV store for all instances",
            enabled={"type": "boolean", "description": "run one"},
            flags=flags("kvstore"),
        ),
        "autoscale": mapping(
            "the controller of the ratio; its targets for latency are those of slo",
            enabled={"type": "boolean", "description": "run it"},
            flags=flags("autoscale"),
        ),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A Baton deployment",
        **mapping("what baton up -f and the services' --config read", **properties),
    }


class ClusterFile:
    """A cluster file, read and checked.

    Args:
        path: Path of the file; empty: there is none, so no value is given.
        configs: See :func:`cluster_schema`.

    Raises:
        ConfigError: The file cannot be read or does not match the schema; says path and line.
    """

    def __init__(self, path: str, configs: Mapping[str, Sequence[type]]) -> None:
        self.path = path
        self._root = read_document(Path(path)) if path else Node({}, 1)
        check(self._root, cluster_schema(configs), path)
        self.pools = self._read_pools()

    def setting(self, name: str) -> Placed | None:
        """Return a value by its path, such as ``model`` or ``kvstore.enabled``; ``None``: not given."""
        node = self._node(*name.split("."))
        return None if node is None or node.value is None else Placed(node.plain(), self._where(node))

    def values(self, service: str) -> dict[str, Placed]:
        """Return a service's values, by field name.

        Args:
            service: ``router``, ``kvstore``, ``autoscale``, ``prefill``, ``decode``, or a name of ``pools``.

        Raises:
            ConfigError: There is no such pool.
        """
        if service == "autoscale":
            targets = {f"scale_{metric}_ms": self.setting(f"slo.{metric}-ms") for metric in ("ttft", "itl")}
            return {name: each for name, each in targets.items() if each is not None} | self._flags(service)
        values = self._placed(self._node("security"))
        if service == "router":
            listen = self.listen_values()
            listen.pop("instance_host", None)
            return listen | values | self._flags(service)
        if service == "kvstore":
            return values | self._flags(service)
        if (model := self.setting("model")) is not None:
            values["model"] = model
        pool = self.pool(service)
        if pool.role == "decode" and (itl := self.setting("slo.itl-ms")) is not None:
            values["itl_slo_ms"] = itl
        own = (pool.name,) if pool.name in ROLES else ("pools", pool.name)
        return values | self._flags("worker") | self._flags(*own)

    def listen_values(self) -> dict[str, Placed]:
        """Return the addresses and ports at the top of the file, by field of :class:`ListenConfig`."""
        placed = {item.name: self.setting(item.name.replace("_", "-")) for item in flag_fields(ListenConfig)}
        return {name: each for name, each in placed.items() if each is not None}

    def pool(self, name: str) -> Pool:
        """Return a pool by its name.

        Raises:
            ConfigError: There is no such pool.
        """
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise ConfigError(
            f"{self.path} has no pool {name!r}: there are {', '.join(p.name for p in self.pools)}", field="pool"
        )

    def slos(self) -> dict[str, float]:
        """Return latency targets in milliseconds, by metric."""
        placed = {metric: self.setting(f"slo.{metric}-ms") for metric in SLO_METRICS}
        return {metric: float(each.value) for metric, each in placed.items() if each is not None and each.value > 0}

    def refuse(self, service: str, fields: Mapping[str, str]) -> None:
        """Refuse flags that the reader of the file sets itself.

        Args:
            service: See :meth:`values`.
            fields: Reasons of the refusal, by field name.

        Raises:
            ConfigError: The file sets such a flag; says where.
        """
        own = ("pools", service) if service not in ("router", "kvstore", "autoscale", "worker", *ROLES) else (service,)
        for name, placed in self._flags(*own).items():
            if name in fields:
                place = ".".join((*own, "flags", name.replace("_", "-")))
                raise ConfigError(f"{placed.where}: {place} {fields[name]}", field=name)

    def _read_pools(self) -> list[Pool]:
        ratio = self.setting("ratio")
        pools = []
        for role in ROLES:
            replicas = self.setting(f"{role}.replicas")
            if ratio is not None and replicas is not None:
                raise ConfigError(
                    f"{replicas.where}: {role}.replicas and ratio ({ratio.where}) say the same: give one of them",
                    field=f"{role}.replicas",
                )
            pools.append(Pool(role, role, None if replicas is None else replicas.value))
        further = self._node("pools")
        for name, node in (further.value or {}).items() if further is not None else ():
            where = self._where(node)
            if not re.search(_POOL_NAME, name) or name in (*ROLES, "router", "kvstore", "worker", "autoscale"):
                raise ConfigError(f"{where}: pools.{name} cannot be a pool's name", field="pools")
            role_node = (node.value or {}).get("role")
            if role_node is None or role_node.value is None:
                raise ConfigError(f"{where}: pools.{name} needs a role: prefill or decode", field=f"pools.{name}.role")
            count = node.value.get("replicas")
            replicas_given = 1 if count is None or count.value is None else count.value
            pools.append(Pool(name, role_node.value, replicas_given, node.line))
        return pools

    def _flags(self, *path: str) -> dict[str, Placed]:
        return self._placed(self._node(*path, "flags"))

    def _placed(self, node: Node | None) -> dict[str, Placed]:
        items = (node.value or {}) if node is not None else {}
        return {
            name.replace("-", "_"): Placed(child.plain(), self._where(child))
            for name, child in items.items()
            if child.value is not None
        }

    def _node(self, *path: str) -> Node | None:
        node: Node | None = self._root
        for name in path:
            node = (node.value or {}).get(name) if node is not None else None
        return node

    def _where(self, node: Node) -> str:
        return f"{self.path}:{node.line}"


NO_FILE = ClusterFile("", {})
