"""``/console``: a page that watches the deployment, and the data that it shows.

The page is static files, open like ``/health``: a browser cannot send an API key when it opens a page. It holds nothing
worth a key, and asks for one if its data (``/debug/console``) want one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from baton.version import __version__
from baton_router.frontend.console.explanation import summary
from baton_router.frontend.console.flows import Flows
from baton_router.frontend.console.window_stats import WindowStats
from baton_router.registry.instance import Instance
from baton_router.scheduler.decision import DecisionLog

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE = "console.html"
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
    """Serves the page and what belongs to it, from memory."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        for item in resources.files("baton_router.frontend.console").joinpath("static").iterdir():
            media_type = _TYPES.get(item.name[item.name.rfind(".") :])
            if media_type is not None:
                content = item.read_bytes()
                etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
                self._files[item.name] = _File(content, media_type, etag)

    async def page(self, request: Request) -> Response:
        """Serve ``GET /console``."""
        return self._serve(request, _PAGE)

    async def file(self, request: Request) -> Response:
        """Serve ``GET /console/{name}``."""
        return self._serve(request, request.path_params["name"])

    def _serve(self, request: Request, name: str) -> Response:
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404, "the console has no such file")
        headers = {**_HEADERS, "etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)


_LEAST_AGE_S = 0.5
_DECISIONS = 40


class ConsoleData:
    """Makes snapshots, at most two a second however many watch.

    Args:
        instances: Returns the instances.
        decisions: What is remembered of requests.
        stats: Rates and percentiles.
        flows: Which ways prompts took in the last seconds.
        policy: Name of the placement policy.
        now: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        instances: Callable[[], list[Instance]],
        decisions: DecisionLog,
        stats: WindowStats,
        flows: Flows,
        *,
        policy: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instances = instances
        self._decisions = decisions
        self._stats = stats
        self._flows = flows
        self._policy = policy
        self._now = now
        self._started = now()
        self._made_at = float("-inf")
        self._made = b""

    def snapshot(self) -> bytes:
        """Return the latest snapshot as JSON, made anew if it is older than half a second."""
        if self._now() - self._made_at >= _LEAST_AGE_S:
            self._made = orjson.dumps(self._make())
            self._made_at = self._now()
        return self._made

    def _make(self) -> dict[str, Any]:
        instances = self._instances()
        infos = [x.info for x in instances if x.info is not None]
        return {
            "version": __version__,
            "time": time.time(),
            "uptime_s": round(self._now() - self._started, 1),
            "model": infos[0].model_name if infos else None,
            "policy": self._policy,
            "running": self._decisions.num_running,
            "seen": self._decisions.num_begun,
            "now": self._stats.window(),
            "history": self._stats.history(),
            "instances": [describe(x) for x in instances],
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


def describe(x: Instance) -> dict[str, Any]:
    """Return one instance as the console shows it."""
    report, events, info = x.load.report, x.events, x.info
    return {
        "id": x.instance_id,
        "address": x.address,
        "role": x.role.value,
        "status": x.status.value,
        "reason": x.reason or None,
        "draining": x.load.draining,
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
