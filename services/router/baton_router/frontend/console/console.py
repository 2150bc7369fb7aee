"""``/console``, a page that watches the deployment, and ``/debug/*``: its data, decisions and their reasons, the index.

The page is static files, open like ``/health``: a browser cannot send an API key when it opens a page. It holds nothing
worth a key, and asks for one if its data (``/debug/console``) want one. An administrator's key shows everything,
others' keys their own requests alone. Nothing here has prompts, token ids, cache salts or the secrets that a process
was started with.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import orjson
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from baton.errors import InvalidRequestError, NotFoundError, shown
from baton.version import __version__
from baton_router.admission.queue import FairQueue
from baton_router.frontend.console.explanation import explanation, summary
from baton_router.frontend.console.window_stats import Flows, WindowStats
from baton_router.frontend.http.errors import json_response
from baton_router.frontend.http.middleware import audit_admin, require_admin, tenant_alone
from baton_router.indexer.stores import Store
from baton_router.registry.instance import Instance
from baton_router.registry.lost_instances import LostInstance
from baton_router.registry.registry import Registry
from baton_router.scheduler.decision import DecisionLog

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


class ConsoleFiles:
    """Serves the page and its files, from memory."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        for item in resources.files("baton_router.frontend.console").joinpath("static").iterdir():
            media_type = _TYPES.get(item.name[item.name.rfind(".") :])
            if media_type is not None:
                content = item.read_bytes()
                etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
                self._files[item.name] = _File(content, media_type, etag)

    async def root(self, request: Request) -> Response:
        """Lead browsers to the console; API clients, which do not ask for HTML, get JSON."""
        if "text/html" not in request.headers.get("accept", ""):
            raise NotFoundError("the API is under /v1, its description is /openapi.json, the console is /console")
        return RedirectResponse("console", 307, headers={"vary": "accept", "cache-control": "no-cache"})

    async def console(self, request: Request) -> Response:
        return self._serve(request, "console.html")

    async def docs(self, request: Request) -> Response:
        """Serve ``GET /docs``: a page that shows ``/openapi.json``."""
        return self._serve(request, "docs.html")

    async def file(self, request: Request) -> Response:
        return self._serve(request, request.path_params["name"])

    def _serve(self, request: Request, name: str) -> Response:
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404, "the console has no such file")
        headers = {**_HEADERS, "etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)


def describe(x: Instance) -> dict[str, Any]:
    """Return the console's data of one instance."""
    report = x.load.report
    events = x.events
    info = x.info
    return {
        "id": x.instance_id,
        "address": x.address,
        "role": x.role.value,
        "status": x.status.value,
        "reason": x.reason or None,
        "draining": x.load.draining,
        "silent": x.silent,
        "lost_s": None,
        "in_flight": x.load.requests,
        "work": round(x.load.work),
        "running": report.num_running,
        "waiting": report.num_waiting,
        "loading": report.num_loading,
        "blocks_total": report.blocks_total or (info.num_blocks if info is not None else 0),
        "blocks_active": report.blocks_active,
        "blocks_cached": report.blocks_cached,
        "index": {
            "state": events.state.value,
            "age_s": round(events.age_s, 1),
            "blocks": events.num_blocks,
            "decided": events.num_decided,
            "sequence": events.resume_from(info.epoch) if info is not None else 0,
            "epoch": info.epoch.hex()[:8] if info is not None else None,
            "group": info.content_key.hex()[:12] if info is not None else None,
            "block_size": info.fingerprint.block_size if info is not None else None,
            "gaps": events.num_gaps,
        },
    }


def describe_lost(x: LostInstance, age_s: float) -> dict[str, Any]:
    """Return the console's data of an instance that was lost, with the fields of :func:`describe`."""
    counts = ("in_flight", "work", "running", "waiting", "loading", "blocks_total", "blocks_active", "blocks_cached")
    index = dict.fromkeys(("age_s", "blocks", "decided", "sequence", "gaps"), 0)
    return {
        "id": x.instance_id,
        "address": x.address,
        "role": x.role.value,
        "status": "lost",
        "reason": x.reason,
        "draining": False,
        "silent": False,
        "lost_s": round(age_s, 1),
        **dict.fromkeys(counts, 0),
        "index": {**index, "state": "off", "epoch": None, "group": None, "block_size": None},
    }


DEFAULT_LIMIT = 50
MAX_LIMIT = 500
_LEAST_AGE_S = 0.5
_DECISIONS = 40
_DEBUG_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class DebugEndpoints:
    """Serves ``/debug`` and the console.

    Args:
        app: App that the endpoints are added to.
        decisions: Log of requests.
        registry: Registry of the instances.
        metrics: Registry of the router's metrics.
        policy: Name of the placement policy.
        replicas: Returns the state of the other router replicas; ``None`` without replicas.
        queue: Queue of waiting requests.
        background: Returns the number of requests that run in idle capacity.
    """

    def __init__(
        self,
        app: FastAPI,
        decisions: DecisionLog,
        registry: Registry,
        metrics: CollectorRegistry,
        *,
        policy: str,
        replicas: Callable[[], dict[str, Any]] | None,
        queue: FairQueue,
        background: Callable[[], int],
    ) -> None:
        self._background = background
        self._decisions = decisions
        self._registry = registry
        self._stats = WindowStats(metrics)
        self._flows = Flows()
        self._policy = policy
        self._replicas = replicas
        self._queue = queue
        decisions.on_end = self._stats.sample
        decisions.on_begin = self._stats.follow
        self._stats.is_busy = lambda: decisions.num_running > 0
        decisions.on_trace = self._flows.add
        self._started = time.monotonic()
        self._made_at = float("-inf")
        self._made = b""
        files = ConsoleFiles()
        for path, endpoint in (
            ("/debug/decisions", self.decisions),
            ("/debug/decisions/{request_id:path}", self.decision),
            ("/debug/index", self.index),
            ("/debug/console", self.console),
            ("/debug/replicas", self.replicas),
            ("/", files.root),
            ("/console", files.console),
            ("/docs", files.docs),
            ("/console/{name}", files.file),
        ):
            app.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_class=Response)

    async def decisions(self, request: Request) -> Response:
        """Serve ``GET /debug/decisions``: the latest, newest first; ``limit`` and ``id`` (a part of it) narrow it."""
        limit = _limit(request.query_params.get("limit", ""))
        tenant = _whose(request)
        records = self._decisions.recent(limit, containing=request.query_params.get("id", ""), tenant=tenant)
        seen = self._decisions.num_begun if tenant is None else len(records)  # other tenants' counts are private
        answer = {"decisions": [summary(record) for record in records], "seen": seen}
        return json_response(answer, headers=_DEBUG_HEADERS)

    async def decision(self, request: Request) -> Response:
        """Serve ``GET /debug/decisions/{id}``: by whole id, the answer's ``id``, or ``x-request-id``."""
        return json_response(self.explain(request.path_params["request_id"], _whose(request)), headers=_DEBUG_HEADERS)

    def explain(self, name: str, tenant: str | None) -> dict[str, Any]:
        """Return everything that is known of a request.

        Args:
            name: Identifier of the request or of its answer, or its ``x-request-id``.
            tenant: Tenant whose requests may be shown; ``None``: all tenants.

        Raises:
            NotFoundError: The request is not remembered.
        """
        records = self._decisions.find(name, tenant=tenant)
        if not records:
            raise NotFoundError(f"no decision of {shown(name)} is remembered; only the latest are", field="request_id")
        return {**explanation(records[0]), "others": [record.request_id for record in records[1:]]}

    def stats(self, window_s: float) -> dict[str, Any]:
        """Return rates and latencies of recent requests (see :meth:`WindowStats.window`), and the queue."""
        return {**self._stats.window(window_s), "queued": len(self._queue), "queued_tokens": self._queue.tokens}

    async def index(self, request: Request) -> Response:
        """Serve ``GET /debug/index``: the state of each instance's part of the prefix index."""
        require_admin(request)
        return json_response(index_state(self._registry.instances(), self._registry.stores), headers=_DEBUG_HEADERS)

    async def replicas(self, request: Request) -> Response:
        """Serve ``GET /debug/replicas``: the state of the other router replicas; ``{}`` without replicas."""
        require_admin(request)
        return json_response(self._replicas() if self._replicas is not None else {}, headers=_DEBUG_HEADERS)

    async def console(self, request: Request) -> Response:
        """Serve ``GET /debug/console``: the data of the console, made at most twice a second."""
        require_admin(request)
        if time.monotonic() - self._made_at >= _LEAST_AGE_S:
            self._made = orjson.dumps(self._make())
            self._made_at = time.monotonic()
        return Response(self._made, media_type="application/json", headers=_DEBUG_HEADERS)

    def _make(self) -> dict[str, Any]:
        instances = self._registry.instances()
        infos = [x.info for x in instances if x.info is not None]
        return {
            "version": __version__,
            "time": time.time(),
            "uptime_s": round(time.monotonic() - self._started, 1),
            "model": infos[0].model_names[0] if infos else None,
            "policy": self._policy,
            "running": self._decisions.num_running,
            "seen": self._decisions.num_begun,
            "background": self._background(),
            "queued": len(self._queue),
            "now": self._stats.window(),
            "stalled_s": self._stats.stalled_s() if self._decisions.num_running else None,
            "history": self._stats.history(),
            "instances": [
                *(describe(x) for x in instances),
                *(describe_lost(x, age_s) for x, age_s in self._registry.lost.ages()),
            ],
            "flows": self._recent_flows(),
            "decisions": [summary(record) for record in self._decisions.recent(_DECISIONS)],
        }

    def _recent_flows(self) -> dict[str, Any]:
        flows = self._flows
        rows = [
            {
                "path": flow.path,
                "source": flow.source or None,
                "target": flow.target,
                "pipe": flow.pipe or None,
                "requests": requests,
                "bytes": num_bytes,
            }
            for flow, (requests, num_bytes) in flows.recent().items()
        ]
        return {"window_s": flows.window_s, "items": rows}


def index_state(instances: Iterable[Instance], stores: Iterable[Store] = ()) -> dict[str, Any]:
    """Return the state of the index, per instance, per group of instances that share their hashes, and per KV store."""
    rows = []
    groups = dict[str, dict[str, Any]]()
    for x in instances:
        info = x.info
        events = x.events
        group = info.content_key.hex()[:12] if info is not None else None
        rows.append(
            {
                "instance": x.instance_id,
                "address": x.address,
                "role": x.role.value,
                "status": x.status.value,
                "state": events.state.value,
                "usable": events.usable,
                "age_s": round(events.age_s, 3),
                "blocks": events.num_blocks,
                "tiers": [tier for tier, _ in events.tiers],
                "decided_prompts": events.num_decided,
                "sequence": events.resume_from(info.epoch) if info is not None else 0,
                "epoch": info.epoch.hex() if info is not None else None,
                "events": events.num_events,
                "gaps": events.num_gaps,
                "group": group,
            }
        )
        if info is not None and group is not None:
            known = groups.setdefault(group, {"block_size": info.fingerprint.block_size, "instances": []})
            known["instances"].append(x.instance_id)
    held = [
        {
            "store": x.name,
            "address": x.address,
            "state": x.events.state.value,
            "age_s": round(x.events.age_s, 3),
            "blocks": x.tiers,
            "events": x.events.num_events,
            "gaps": x.events.num_gaps,
        }
        for x in stores
    ]
    return {"instances": rows, "groups": groups, "stores": held}


def _whose(request: Request) -> str | None:
    """Return the only tenant whose requests may be shown; audits administrators, who see all."""
    tenant = tenant_alone(request)
    if tenant is None:
        audit_admin(request)
    return tenant


def _limit(text: str) -> int:
    if not text:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidRequestError(f"limit must be between 1 and {MAX_LIMIT}, got {shown(text)}", field="limit")
    return int(text)
