"""Writes the chart's ``values.schema.json`` and the table of its README; ``--check`` fails if they are out of date.

Both come from ``helm/values.schema.yaml``, the defaults in ``values.yaml`` and, for the values under ``flags``, the
services' configuration classes: what the chart takes is what the services take.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from baton.config import EngineConfig
from baton.config.autoscale import AutoscaleConfig
from baton.config.cluster_file import flag_schema
from baton.config.kvstore import KVStoreConfig
from baton.config.router import RouterConfig
from baton.config.worker import WorkerConfig

HELM = Path(__file__).resolve().parents[1] / "helm"
CHART = HELM / "baton"
TABLE = re.compile(r"(?<=<!-- values -->\n).*?(?=<!-- end values -->)", re.DOTALL)
CONFIGS: dict[str, tuple[type, ...]] = {
    "router": (RouterConfig,),
    "worker": (WorkerConfig, EngineConfig),
    "kvstore": (KVStoreConfig,),
    "autoscale": (AutoscaleConfig,),
}
_ACCESS = {"host", "port", "metrics_port", "token_file", "tls_cert", "tls_key", "tls_ca", "tls_name", "tls_roles"}
SET_BY_CHART: dict[str, set[str]] = {
    "router": _ACCESS
    | {"grpc_port", "prefill", "decode", "kvstore", "model", "api_keys", "tenant_secret_file", "open_http", "http_tls"}
    | {"ticket_key_file", "discover", "kubernetes_selector", "kubernetes_port", "kubernetes_namespace", "redis"}
    | {"kubernetes_api", "kubernetes_account", "replica_name"},
    "worker": _ACCESS
    | {"kv_port", "instance_id", "advertise", "routers", "redis", "redis_prefix", "pipes", "clear_kv", "model"}
    | {"ticket_key_file", "kvstore", "kvstore_replication", "served_model_name"},
    "kvstore": _ACCESS
    | {"kv_port", "instance_id", "advertise_host", "register_redis", "register_prefix", "pipes", "clear_kv"}
    | {"max_fingerprints", "disk_path"},
    "autoscale": set(),
}
"""Flags that are no values: the chart gives them, or others take their part."""


def schema() -> dict[str, Any]:
    """Return the whole schema, closed."""
    source = yaml.safe_load((HELM / "values.schema.yaml").read_text(encoding="utf-8"))
    pod = source["$defs"].pop("pod")["properties"]
    source["$defs"] |= {f"{service}Flags": {"flags": service} for service in CONFIGS}
    whole: dict[str, Any] = _closed(source, pod)
    return whole


def _flags(service: str) -> dict[str, Any]:
    return flag_schema(CONFIGS[service], SET_BY_CHART[service])


def _closed(node: Any, pod: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_closed(each, pod) for each in node]
    if not isinstance(node, dict):
        return node
    if "flags" in node and isinstance(node["flags"], str):
        if "description" not in node:
            return {**_flags(node["flags"]), "additionalProperties": False}
        return {"$ref": f"#/$defs/{node['flags']}Flags", "description": node["description"]}
    made = {key: _closed(value, pod) for key, value in node.items()}
    properties = made.get("properties")
    if isinstance(properties, dict):
        if properties.pop("pod", None) is not None:
            properties |= _closed(pod, pod)
        made.setdefault("additionalProperties", False)
    return made


def rows(node: dict[str, Any], defaults: Any, defs: dict[str, Any], path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield value, default and meaning, in the schema's order."""
    for name, child in node["properties"].items():
        where = f"{path}.{name}" if path else name
        default = defaults.get(name) if isinstance(defaults, dict) else None
        target = defs[child["$ref"].rpartition("/")[2]] if "$ref" in child else child
        if "properties" in target and name not in ("flags", "prefill", "decode"):
            yield from rows(target, default, defs, where)
        elif name != "global":
            yield where, "" if default in (None, "") else json.dumps(default), child["description"]


def readme(text: str) -> str:
    """Return the README with a fresh table.

    Raises:
        ValueError: It has no place for one.
    """
    if not TABLE.search(text):
        raise ValueError("README.md has no place for the table of values")
    whole = schema()
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    lines = ["", "| value | default | meaning |", "| --- | --- | --- |"]
    for name, default, text_of in rows(whole, defaults, whole["$defs"]):
        shown = f"`{default}`" if default else ""
        lines.append(f"| `{name}` | {shown} | {text_of.replace('|', chr(92) + '|')} |")
    table = "\n".join(lines) + "\n\n"
    return TABLE.sub(lambda _: table, text)


def main() -> int:
    """Write or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if something is out of date")
    args = parser.parse_args()
    document = CHART / "README.md"
    fresh = {
        CHART / "values.schema.json": json.dumps(schema(), indent=2, ensure_ascii=False) + "\n",
        document: readme(document.read_text(encoding="utf-8")),
    }
    stale = [path for path, text in fresh.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if args.check:
            print(f"{path.name} is out of date: run scripts/gen_helm.py", file=sys.stderr)
        else:
            path.write_text(fresh[path], encoding="utf-8")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
