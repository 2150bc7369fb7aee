"""What every request passes: options, metrics and access log, its id, the API key, CORS, and unexpected errors."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import INTERNAL_TEXT, InternalError, PermissionDeniedError, UnauthenticatedError
from baton.rpc.audit import Event, audit
from baton.rpc.auth import HostRule
from baton_router.accounts import Accounts
from baton_router.frontend.http.errors import answer_to
from baton_router.metrics import Counter, Gauge, Histogram, LabelNames
from baton_router.processor.turns import TenantTurns
from baton_router.types import Account

log = logging.getLogger(__name__)
_access_lines = logging.getLogger("baton.access")
_access_lines.setLevel(logging.INFO)  # whatever --log-level is

Headers: TypeAlias = list[tuple[bytes, bytes]]
_ACCOUNT = "baton_account"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_MAX_ID_CHARS = 128
_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_MAX_FIELD_LABELS = 100
_OPEN_ENDPOINTS = frozenset(
    {"/", "/health", "/readyz", "/version", "/console", "/console/{file}", "/docs", "/openapi.json"}
)
"""Endpoints without API key: for probes, and for browsers that open the console or the documentation."""
_PROBES = frozenset({"/health", "/readyz"})
ENDPOINTS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/metrics", *_OPEN_ENDPOINTS}
    | {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/files", "/v1/batches"}
    | {"/debug/decisions", "/debug/index", "/debug/console", "/debug/replicas"}
    | {"/reset_prefix_cache", "/flush_cache", "/tokenizer_info"}
)
_WITH_NAME = (
    ("/v1/models/", "/v1/models/{id}"),
    ("/v1/responses/", "/v1/responses/{id}"),
    ("/v1/files/", "/v1/files/{id}"),
    ("/v1/batches/", "/v1/batches/{id}"),
    ("/debug/decisions/", "/debug/decisions/{id}"),
    ("/console/", "/console/{file}"),
)


NO_ENDPOINT = "other"
"""Label of requests to unknown endpoints in the metrics."""


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Options of the HTTP front.

    Attributes:
        accounts: Accounts whose API keys clients must send as ``Authorization: Bearer``; ``None``: no key is needed.
        strict_fields: Refuse requests with fields that have no effect, instead of listing them in a header.
        max_body_bytes: Longest request body, in bytes; ``None``: as the served model's context needs.
        max_prompts: Most prompts of a completion request.
        max_sequences: Most sequences of a completion request, over all prompts.
        body_timeout_s: Seconds that a client has to send its request.
        send_timeout_s: Seconds without reading after which a client is cut off.
        stream_timeout_s: The same while a generation writes to it: its sequences would keep others waiting.
        request_timeout_s: Deadline of a generation, in seconds.
        cors_origins: Origins of web pages that may call.
        hosts: Hosts that requests may name; ``None``: any.
        metrics_port: Second port that serves ``/metrics``; 0: none.
        max_connections: Most concurrent connections.
        access_log: Write a line per request.
    """

    accounts: Accounts | None = None
    strict_fields: bool = False
    max_body_bytes: int | None = None
    max_prompts: int = 128
    max_sequences: int = 1024
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    stream_timeout_s: float = 10.0
    request_timeout_s: float = 600.0
    cors_origins: tuple[str, ...] = ()
    hosts: HostRule | None = None
    metrics_port: int = 0
    max_connections: int = 1 << 20
    access_log: bool = False


class HttpMetrics:
    """Metrics of the HTTP front.

    Args:
        registry: Registry for the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "baton_http_"
        self._requests = Counter(
            name + "requests", "Requests, by endpoint and status", ["endpoint", "status"], registry
        )
        self._in_flight = Gauge(name + "in_flight", "Requests that are being served", ["endpoint"], registry)
        self._seconds = Histogram(
            name + "request_seconds", "First byte in to last byte out", ["endpoint"], registry, buckets=_SECONDS
        )
        self._ignored = Counter(name + "ignored_fields", "Request fields that had no effect", ["field"], registry)
        self._turned_away = Counter(
            name + "turned_away_connections", "Connections that were refused or gave way", ["reason"], registry
        )
        self._kept = Gauge(
            name + "kept_responses", "Responses that are stored for requests that continue from them", [], registry
        )
        self._kept_bytes = Gauge(name + "kept_response_bytes", "Memory that these take", [], registry)
        self._field_labels = LabelNames(_MAX_FIELD_LABELS)

    def count_kept(self, responses: int, size: int) -> None:
        """Set the number of stored responses, and their size in bytes."""
        self._kept.labels().value = responses
        self._kept_bytes.labels().value = size

    def begin(self, endpoint: str) -> None:
        self._in_flight.labels(endpoint).inc()

    def end(self, endpoint: str, status: int, seconds: float) -> None:
        self._requests.labels(endpoint, str(status)).inc()
        self._in_flight.labels(endpoint).dec()
        self._seconds.labels(endpoint).observe(seconds)

    def count_turned_away(self, reason: str) -> None:
        """Count a connection that was refused (``full``), or closed for another (``slow``, ``idle``)."""
        self._turned_away.labels(reason).inc()

    def count_ignored(self, fields: Iterable[str]) -> None:
        """Count ignored fields. Clients choose the names, so only the first hundred have series of their own."""
        for field in fields:
            self._ignored.labels(self._field_labels.label(plain_name(field))).inc()


def plain_name(field: str) -> str:
    """Return a client's name in a form for headers and metrics: short, and without unusual characters."""
    return "".join(char if char.isascii() and (char.isalnum() or char in "_.-[]") else "?" for char in field[:64])


def request_id(headers: Headers) -> str:
    """Return the id of a request: the client's if logs and headers can have it, else a new one."""
    given = _header(headers, b"x-request-id")
    if given and len(given) <= _MAX_ID_CHARS and given.isascii() and given.isprintable() and " " not in given:
        return given
    return secrets.token_hex(16)


def account_of(request: Request) -> Account | None:
    """Return the account of a request of the ASGI app; ``None`` without API keys."""
    account: Account | None = request.scope.get("state", {}).get(_ACCOUNT)
    return account


def tenant_alone(request: Request) -> str | None:
    """Return the only tenant whose data a request may see; ``None``: it may see all tenants' data."""
    account = account_of(request)
    return None if account is None or account.admin else account.name


def require_admin(request: Request) -> None:
    """Check that a request may see all tenants' data, and write it to the audit log.

    Raises:
        PermissionDeniedError: Its API key is not an administrator's.
    """
    audit_admin(request)
    if tenant_alone(request) is not None:
        raise PermissionDeniedError("this shows what all tenants do: it wants an administrator's API key")


def audit_admin(request: Request) -> None:
    """Write to the audit log that a request with an API key asks for all tenants' data."""
    account = account_of(request)
    if account is not None:
        peer = request.client.host if request.client is not None else ""
        event: Event = "admin_read" if account.admin else "denied"
        audit(event, over="http", account=account.name, endpoint=_endpoint(request.url.path), peer=peer)


def identify(accounts: Accounts, headers: Headers, *, endpoint: str, peer: str) -> Account:
    """Return the account of a request's API key.

    Args:
        accounts: The accounts.
        headers: Headers of the request.
        endpoint: Endpoint of the request, for the audit log.
        peer: Address of the client, for the audit log.

    Raises:
        UnauthenticatedError: The request has no valid API key.
    """
    shown = _header(headers, b"authorization")
    key = _header(headers, b"x-api-key")  # from Anthropic's clients
    account = accounts.identify(shown or (f"Bearer {key}" if key else ""))
    if account is None:
        audit("authentication_failed", over="http", endpoint=endpoint, peer=peer)
        raise UnauthenticatedError("no valid API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
    return account


def cors_lines(headers: Headers, origins: Collection[str]) -> bytes:
    """Return the CORS header lines for a request's origin.

    Starlette's ``CORSMiddleware`` adds the same to answers of the other endpoints, and answers all preflight requests.
    """
    if not origins:
        return b""
    origin = _header(headers, b"origin")
    vary = b"" if "*" in origins else b"vary: Origin\r\n"
    if not origin or not _may_read(origin, origins):
        return vary
    allowed = "*" if "*" in origins else origin
    lines = f"access-control-allow-origin: {allowed}\r\naccess-control-expose-headers: *\r\n"
    return lines.encode("latin-1") + vary


def require_own_page(headers: Headers, origins: Collection[str]) -> None:
    """Refuse changes that a web page of a foreign origin has a browser make; such requests may have no body to check.

    Raises:
        PermissionDeniedError: The page's origin is foreign, and CORS does not allow it.
    """
    origin = _header(headers, b"origin")
    if origin and not _may_read(origin, origins) and origin.partition("://")[2] != _header(headers, b"host"):
        raise PermissionDeniedError(f"pages of {origin!r:.120} may not do this: --cors-origins", field="origin")


def _may_read(origin: str, origins: Collection[str]) -> bool:
    return "*" in origins or origin in origins


def log_access(
    *, peer: str, method: str, path: str, status: int | str, seconds: float, request_id: str, account: Account | None
) -> None:
    """Write a request's line of the access log, when its answer is complete or its client has gone.

    Args:
        peer: Address of the client.
        method: HTTP method, or ``grpc``.
        path: Endpoint, with placeholders for names that clients choose; or name of the gRPC method.
        status: HTTP status, or outcome of the call.
        seconds: Time from the first byte in to the last byte out, in seconds.
        request_id: Identifier of the request, which is part of the identifier that instances get.
        account: Account of the request; ``None`` without API key.
    """
    name = "" if account is None else account.name
    fields = {
        "peer": peer,
        "method": method,
        "path": path,
        "status": status,
        "seconds": round(seconds, 6),
        "request_id": request_id,
        "account": name,
    }
    text = '%(peer)s "%(method)s %(path)s" %(status)s %(seconds).3f s request %(request_id)s account %(account)s'
    _access_lines.info(text, fields | {"account": name or "-"}, extra={"fields": fields})


class HttpMiddleware:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, *, options: HttpOptions, metrics: HttpMetrics, turns: TenantTurns) -> None:
        """Wrap an app.

        Args:
            app: The app.
            turns: Turns of the tenants for work on the event loop.
            options: Options, with accounts and hosts.
            metrics: Metrics of the HTTP front.
        """
        self._app = app
        self._turns = turns
        self._accounts = options.accounts
        self._hosts = options.hosts
        self._metrics = metrics
        self._origins = options.cors_origins
        self._access_log = options.access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        endpoint = _endpoint(scope["path"])
        ident = request_id(scope["headers"])
        status = 499  # a client that left before the answer
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status = message["status"]
                started = True
                message["headers"].append((b"x-request-id", ident.encode()))
            await send(message)

        self._metrics.begin(endpoint)
        try:
            if self._hosts is not None:
                self._hosts.check(scope["headers"])
            if scope["method"] not in _SAFE:
                require_own_page(scope["headers"], self._origins)
            tenant = ""
            if self._accounts is not None and endpoint not in _OPEN_ENDPOINTS:
                peer = (scope.get("client") or ("",))[0]
                account = identify(self._accounts, scope["headers"], endpoint=endpoint, peer=peer)
                scope.setdefault("state", {})[_ACCOUNT] = account
                tenant = account.name
            if endpoint not in _PROBES:
                async with self._turns.turn(tenant):
                    pass  # lists take milliseconds: one begins per turn of the event loop
            await self._app(scope, receive, send_with_id)
        except (UnauthenticatedError, PermissionDeniedError) as error:
            await answer_to(error)(scope, receive, send_with_id)
        except Exception:
            # Not raised: the server would close the connection, possibly under the next request of a client that has
            # a whole answer and expects the connection to stay. (After an incomplete answer it closes it anyway.)
            log.exception("request %s to %s failed", ident, endpoint, extra={"request_id": ident})
            if not started:
                failure = InternalError(INTERNAL_TEXT)
                await answer_to(failure)(scope, receive, send_with_id)
            status = 500
        finally:
            seconds = time.perf_counter() - begun
            self._metrics.end(endpoint, status, seconds)
            if self._access_log:
                log_access(
                    peer=(scope.get("client") or ("",))[0],
                    method=scope["method"],
                    path=endpoint,
                    status=status,
                    seconds=seconds,
                    request_id=ident,
                    account=scope.get("state", {}).get(_ACCOUNT),
                )


def _header(headers: Headers, name: bytes) -> str:
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return ""


def _endpoint(path: str) -> str:
    """Return a path's label in the metrics; unknown paths share one, because clients choose them."""
    if path in ENDPOINTS:
        return path
    return next((name for prefix, name in _WITH_NAME if path.startswith(prefix)), NO_ENDPOINT)
