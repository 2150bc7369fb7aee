"""``/debug/*``: decisions and their reasons, the index per instance, the console's data. Wants an API key, if any do.

An administrator's key shows everything, others' keys their own requests alone. Nothing here has prompts, token ids,
cache salts or the secrets that a process was started with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import orjson
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import InvalidRequestError, NotFoundError, PermissionDeniedError, shown
from baton_router.frontend.console.console import ConsoleData, ConsoleFiles
from baton_router.frontend.console.explanation import explanation, summary
from baton_router.frontend.console.flows import Flows
from baton_router.frontend.console.window_stats import WindowStats
from baton_router.frontend.http.middleware import account_of
from baton_router.indexer.stores import Store, Stores
from baton_router.registry.instance import Instance
from baton_router.scheduler.decision import DecisionLog

DEFAULT_LIMIT = 50
MAX_LIMIT = 500
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class Instances(Protocol):
    """Where instances come from; ``baton_router.registry.registry.Registry`` is it."""

    stores: Stores

    def instances(self) -> list[Instance]:
        """Return all instances."""


class DebugEndpoints:
    """Serves ``/debug``.

    Args:
        decisions: What is remembered of requests.
        instances: Who is there.
        console: The console's data.
    """

    def __init__(self, decisions: DecisionLog, instances: Instances, console: ConsoleData) -> None:
        self._decisions = decisions
        self._instances = instances
        self._console = console

    async def decisions(self, request: Request) -> Response:
        """Serve ``GET /debug/decisions``: the latest, newest first; ``limit`` and ``id`` (a part of it) narrow it."""
        limit = _limit(request.query_params.get("limit", ""))
        tenant = _only(request)
        found = self._decisions.recent(limit, containing=request.query_params.get("id", ""), tenant=tenant)
        seen = self._decisions.num_begun if tenant is None else len(found)  # how many others sent is theirs to know
        return _json({"decisions": [summary(record) for record in found], "seen": seen})

    async def decision(self, request: Request) -> Response:
        """Serve ``GET /debug/decisions/{id}``: by whole id, the answer's ``id``, or ``x-request-id``."""
        name = request.path_params["request_id"]
        found = self._decisions.find(name, tenant=_only(request))
        if not found:
            raise NotFoundError(f"no decision of {shown(name)} is remembered; only the latest are", field="request_id")
        return _json({**explanation(found[0]), "others": [record.request_id for record in found[1:]]})

    async def index(self, request: Request) -> Response:
        """Serve ``GET /debug/index``: how far each instance's part of the index can be trusted."""
        require_admin(request)
        return _json(index_state(self._instances.instances(), self._instances.stores))

    async def console(self, request: Request) -> Response:
        """Serve ``GET /debug/console``: what the console shows, made at most twice a second for all who watch."""
        require_admin(request)
        return Response(self._console.snapshot(), media_type="application/json", headers=_HEADERS)


def watch(
    app: FastAPI, *, decisions: DecisionLog, instances: Instances, registry: CollectorRegistry, policy: str
) -> FastAPI:
    """Add ``/debug`` and the console to an app, and return it.

    Args:
        app: The app.
        decisions: What is remembered of requests.
        instances: Who is there.
        registry: Has the router's metrics.
        policy: Name of the placement policy.
    """
    stats = WindowStats(registry)
    flows = Flows()
    decisions.on_end, decisions.on_trace = stats.sample, flows.add
    console = ConsoleData(instances.instances, decisions, stats, flows, policy=policy)
    endpoints = DebugEndpoints(decisions, instances, console)
    for path, endpoint in (
        ("/debug/decisions", endpoints.decisions),
        ("/debug/decisions/{request_id:path}", endpoints.decision),
        ("/debug/index", endpoints.index),
        ("/debug/console", endpoints.console),
    ):
        app.add_api_route(path, endpoint, methods=["GET"], response_class=Response)
    files = ConsoleFiles()
    app.add_api_route("/console", files.page, methods=["GET", "HEAD"], response_class=Response, include_in_schema=False)
    app.add_api_route(
        "/console/{name}", files.file, methods=["GET", "HEAD"], response_class=Response, include_in_schema=False
    )
    return app


def add_replicas(app: FastAPI, describe: Callable[[], dict[str, Any]] | None) -> None:
    """Add ``GET /debug/replicas``: how this router stands with others; ``{}`` where it is alone by configuration."""

    async def replicas(request: Request) -> Response:
        require_admin(request)
        return _json(describe() if describe is not None else {})

    app.add_api_route("/debug/replicas", replicas, methods=["GET"], response_class=Response)


def index_state(instances: Iterable[Instance], stores: Iterable[Store] = ()) -> dict[str, Any]:
    """Return the state of the index, per instance, per group of instances that share their hashes, and per KV store."""
    rows, groups = [], dict[str, dict[str, Any]]()
    for x in instances:
        info, events = x.info, x.events
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


def require_admin(request: Request) -> None:
    """Check that a request may see what all tenants do.

    Raises:
        PermissionDeniedError: It showed an API key that is not an administrator's.
    """
    if _only(request) is not None:
        raise PermissionDeniedError("this shows what all tenants do: it wants an administrator's API key")


def _only(request: Request) -> str | None:
    """Return whose requests alone may be shown; ``None``: all."""
    account = account_of(request)
    return None if account is None or account.admin else account.name


def _limit(text: str) -> int:
    if not text:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidRequestError(f"limit must be between 1 and {MAX_LIMIT}, got {shown(text)}", field="limit")
    return int(text)


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json", headers=_HEADERS)
