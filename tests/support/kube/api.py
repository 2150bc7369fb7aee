"""A Kubernetes API server for tests: the protocol as Helm's engine, kubectl and Baton's router speak it.

It lists in pages, watches (bookmarks, initial events, 410 for what is forgotten), creates, updates, deletes, patches
(server-side apply, merge, strategic merge), and holds every object to Kubernetes' own schemas. It runs in the event
loop of the test. It has no access control and no admission, knows protobuf for two kinds alone, and makes nothing
happen: see ``controllers.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.support.kube import fields, kinds
from tests.support.kube.kinds import Json, Kind
from tests.support.kube.protobuf import decoded
from tests.support.kube.selectors import selector
from tests.support.kube.store import ApiError, Store

_BOOKMARK_S = 1.0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are the test's


class KubeApi:
    """The server; an asynchronous context manager.

    Attributes:
        store: What it holds.
        url: Where it listens.
        log_of: Returns what a pod has printed, by namespace and name.
        requests: ``METHOD PATH`` of all requests, in order; ``WATCH`` is one.
        bookmarks, gone: How many bookmarks, and how many 410, watches of a path were told.
    """

    def __init__(self) -> None:
        """Hold the namespaces that each cluster has."""
        self.store = Store()
        self.log_of: Callable[[str, str], str] = lambda namespace, name: ""
        self.requests: list[str] = []
        self.bookmarks, self.gone = Counter[str](), Counter[str]()
        for name in ("default", "kube-system"):
            self.create_namespace(name)

    async def __aenter__(self) -> Self:
        """Listen on a free port."""
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])])
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off", ws="none")
        self._server = _Server(config)
        self._running = asyncio.create_task(self._server.serve(), name="API server")
        while not self._server.started:
            await asyncio.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop."""
        self.store.drop_watches()
        self._server.should_exit = True
        self._server.force_exit = True
        await self._running

    @property
    def kubeconfig(self) -> str:
        """A kubeconfig that leads here."""
        cluster = {"name": "test", "cluster": {"server": self.url}}
        context = {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "default"}}
        config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context]}
        return json.dumps(config | {"current-context": "test", "users": [{"name": "test", "user": {"token": "t"}}]})

    def create_namespace(self, name: str) -> None:
        """Add a namespace."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        self.store.create(kinds.BY_NAME["v1", "Namespace"], body, "cluster")

    async def _answer(self, request: Request) -> Response:
        method = "WATCH" if _true(request.query_params.get("watch")) else request.method
        self.requests.append(f"{method} {request.url.path}")
        try:
            found = self._about(request.url.path)
            if found is not None:
                return JSONResponse(found)
            return await self._resource(request)
        except ApiError as error:
            return JSONResponse(error.status, error.code)

    def _about(self, path: str) -> Json | None:
        if path == "/version":
            return kinds.versions()
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return kinds.groups()
        if path == "/openapi/v3":
            return kinds.openapi_index()
        roots = {kind.root: kind.api for kind in kinds.KINDS}
        if path in roots:
            return kinds.resources(roots[path])
        root = path.removeprefix("/openapi/v3")
        return kinds.openapi(root) if path != root and root in roots else None

    async def _resource(self, request: Request) -> Response:
        kind, namespace, name, part = _target(request.url.path)
        method, query = request.method, request.query_params
        if method == "GET" and not name:
            return (
                self._watch(kind, namespace, request)
                if _true(query.get("watch"))
                else self._list(kind, namespace, request)
            )
        if part == "scale":
            return JSONResponse(
                self._scale(kind, namespace, name, await _body(request) if method != "GET" else None, request)
            )
        if method == "GET":
            body = self.store.get(kind, namespace, name)
            return PlainTextResponse(self.log_of(namespace, name)) if part == "log" else JSONResponse(body)
        dry = "dryRun" in query
        if method == "DELETE":
            return self._delete(kind, namespace, name, request)
        manager = query.get("fieldManager") or request.headers.get("user-agent", "unknown").partition("/")[0]
        body = await _body(request)
        if method == "PATCH":
            return self._patch((kind, namespace, name, part), body, manager, request)
        body.setdefault("metadata", {})
        if kind.namespaced:
            body["metadata"].setdefault("namespace", namespace)
        if method == "POST":
            if kind.namespaced:
                self.store.get(kinds.BY_NAME["v1", "Namespace"], "", namespace)
            return JSONResponse(self.store.create(kind, body, manager, dry_run=dry), 201)
        return JSONResponse(self.store.replace(kind, body, manager, part, dry_run=dry))

    def _list(self, kind: Kind, namespace: str, request: Request) -> Response:
        query = request.query_params
        start, version = 0, self.store.version
        if "continue" in query:
            start, version = map(int, query["continue"].split("-"))
            if version < self.store.oldest:
                raise ApiError(410, "Expired", "The provided continue parameter is too old")
        found = self.store.find(kind, namespace, selector(query))
        end = start + int(query.get("limit") or 0) if query.get("limit") not in (None, "0") else len(found)
        metadata = {"resourceVersion": str(version)}
        if end < len(found):
            metadata["continue"] = f"{end}-{version}"
        items = found[start:end]
        return JSONResponse({"kind": f"{kind.name}List", "apiVersion": kind.api, "metadata": metadata, "items": items})

    def _watch(self, kind: Kind, namespace: str, request: Request) -> Response:
        query = request.query_params
        selects = selector(query)
        since = query.get("resourceVersion", "")
        initial = _true(query.get("sendInitialEvents")) or since in ("", "0")
        bookmarks = _true(query.get("allowWatchBookmarks"))
        first: list[Json] = []
        try:
            queue = self.store.watch(self.store.version if initial else int(since))
        except ApiError as error:
            self.gone[request.url.path] += 1
            return StreamingResponse(_lines([{"type": "ERROR", "object": error.status}]), media_type="application/json")
        if initial:
            first = [{"type": "ADDED", "object": each} for each in self.store.find(kind, namespace, selects)]
        if _true(query.get("sendInitialEvents")):
            first.append(self._bookmark(kind, request, {"k8s.io/initial-events-end": "true"}))

        async def stream() -> AsyncIterator[bytes]:
            ends = asyncio.get_running_loop().time() + float(query.get("timeoutSeconds") or 3600)
            try:
                async for line in _lines(first):
                    yield line
                while (left := ends - asyncio.get_running_loop().time()) > 0:
                    try:
                        event = await asyncio.wait_for(queue.get(), min(left, _BOOKMARK_S))
                    except TimeoutError:
                        if bookmarks:
                            yield _line(self._bookmark(kind, request, {}))
                        continue
                    if event is None:
                        return
                    if event.kind == kind and (seen := event.seen(namespace, selects)) is not None:
                        yield _line(seen)
            finally:
                self.store.unwatch(queue)

        return StreamingResponse(stream(), media_type="application/json")

    def _bookmark(self, kind: Kind, request: Request, annotations: dict[str, str]) -> Json:
        self.bookmarks[request.url.path] += 1
        metadata: Json = {"resourceVersion": str(self.store.version)}
        if annotations:
            metadata["annotations"] = annotations
        return {"type": "BOOKMARK", "object": {"kind": kind.name, "apiVersion": kind.api, "metadata": metadata}}

    def _delete(self, kind: Kind, namespace: str, name: str, request: Request) -> Response:
        names = (
            [name]
            if name
            else [each["metadata"]["name"] for each in self.store.find(kind, namespace, selector(request.query_params))]
        )
        gone = [self.store.delete(kind, namespace, each) for each in names]
        details = {"name": name, "kind": kind.plural} | ({"uid": gone[0]["metadata"]["uid"]} if name else {})
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        return JSONResponse(status)

    def _patch(self, target: tuple[Kind, str, str, str], patch: Any, manager: str, request: Request) -> Response:
        kind, namespace, name, part = target
        query, dry = request.query_params, "dryRun" in request.query_params
        how = request.headers["content-type"].partition(";")[0]
        if how == "application/apply-patch+yaml":
            if "fieldManager" not in query:
                raise ApiError(400, "BadRequest", "fieldManager is required for apply patch")
            patch.setdefault("metadata", {})["name"] = name
            if kind.namespaced:
                self.store.get(kinds.BY_NAME["v1", "Namespace"], "", namespace)
                patch["metadata"]["namespace"] = namespace
            body, new = self.store.apply(kind, patch, manager, force=_true(query.get("force")), dry_run=dry)
            return JSONResponse(body, 201 if new else 200)
        strategic = {"application/merge-patch+json": False, "application/strategic-merge-patch+json": True}
        if how not in strategic:
            raise ApiError(415, "UnsupportedMediaType", f"{how} is not known here")
        body = fields.merge(self.store.get(kind, namespace, name), patch, strategic=strategic[how])
        return JSONResponse(self.store.replace(kind, body, manager, part, dry_run=dry))

    def _scale(self, kind: Kind, namespace: str, name: str, change: Json | None, request: Request) -> Json:
        body = self.store.get(kind, namespace, name)
        if change is not None:
            body["spec"]["replicas"] = change["spec"]["replicas"]
            manager = request.query_params.get("fieldManager") or request.headers["user-agent"].partition("/")[0]
            body = self.store.replace(kind, body, manager)
        metadata = {key: body["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
        status = {"replicas": body.get("status", {}).get("replicas", 0)}
        spec = {"replicas": body["spec"].get("replicas", 1)}
        return {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status}


def _target(path: str) -> tuple[Kind, str, str, str]:
    """Return kind, namespace, name and subresource of a URL.

    Raises:
        ApiError: It leads nowhere (404).
    """
    words = path.strip("/").split("/")
    length = 2 if words[0] == "api" else 3
    root, rest = "/" + "/".join(words[:length]), words[length:]
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces" and (root, rest[2]) in kinds.BY_URL:
        namespace, rest = rest[1], rest[2:]
    kind = kinds.BY_URL.get((root, rest[0])) if rest else None
    if kind is None or len(rest) > 3:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    name, part = (*rest[1:], "", "")[:2]
    if part and part not in kind.subresources:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    return kind, namespace, name, part


async def _body(request: Request) -> Any:
    raw = await request.body()
    form = request.headers.get("content-type", "").partition(";")[0]
    if form.endswith("protobuf"):
        found = decoded(raw)
        if found is None:
            raise ApiError(415, "UnsupportedMediaType", "protobuf for Secrets and Namespaces alone")
        return found
    return yaml.safe_load(raw) if form.endswith("yaml") else json.loads(raw)


def _true(word: str | None) -> bool:
    return word in ("true", "1")


def _line(event: Json) -> bytes:
    return json.dumps(event).encode() + b"\n"


async def _lines(events: list[Json]) -> AsyncIterator[bytes]:
    for event in events:
        yield _line(event)
