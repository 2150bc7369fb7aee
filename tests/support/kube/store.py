"""What the API server of the tests holds: objects with versions, and the history that watches follow."""

from __future__ import annotations

import asyncio
import base64
import copy
import datetime
import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.kube import fields
from tests.support.kube.kinds import VERSION, Json, Kind

Name = tuple[str, str]
Selector = Callable[[Json], bool]


class ApiError(Exception):
    """An answer that is a ``Status``.

    Attributes:
        code: HTTP status.
        status: What is answered.
    """

    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        """Say what is wrong."""
        self.code = code
        self.status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        self.status |= {"message": message, "reason": reason, "details": details, "code": code}
        super().__init__(message)


@dataclass(frozen=True)
class Event:
    """A change of an object; ``before`` or ``after`` is ``None`` where it came or went."""

    version: int
    kind: Kind
    before: Json | None
    after: Json | None

    def seen(self, namespace: str, selects: Selector) -> Json | None:
        """Return how a watch tells of it; ``None``: not at all."""
        subject: Json = self.after or self.before or {}
        if namespace and subject["metadata"].get("namespace") != namespace:
            return None
        was = self.before is not None and selects(self.before)
        now = self.after is not None and selects(self.after)
        if not (was or now):
            return None
        body = subject if now else copy.deepcopy(self.before or {})
        if not now:
            body["metadata"]["resourceVersion"] = str(self.version)
        return {"type": "MODIFIED" if was and now else "ADDED" if now else "DELETED", "object": body}


@dataclass
class _Held:
    body: Json
    owners: dict[str, tuple[str, set[fields.Path]]] = field(default_factory=dict)


class Store:
    """Objects by kind and name.

    Attributes:
        version: ``resourceVersion`` of the last change.
        oldest: Changes up to this version are forgotten.
        on_change: Called after each change, in the event loop.
    """

    def __init__(self) -> None:
        """Begin with the namespace ``default``."""
        self.version, self.oldest = 1, 1
        self.on_change: list[Callable[[Event], None]] = []
        self._objects: dict[Kind, dict[Name, _Held]] = {}
        self._history: list[Event] = []
        self._watches: set[asyncio.Queue[Event | None]] = set()
        self._addresses = itertools.count(1)

    def get(self, kind: Kind, namespace: str, name: str) -> Json:
        """Return a copy of an object.

        Raises:
            ApiError: There is none (404).
        """
        return copy.deepcopy(self._held(kind, namespace, name).body)

    def find(self, kind: Kind, namespace: str = "", selects: Selector = bool) -> list[Json]:
        """Return copies of the objects of a kind, in one namespace or all, in order of their names."""
        found = sorted(self._objects.get(kind, {}).items())
        bodies = [held.body for (where, _), held in found if namespace in ("", where)]
        return [copy.deepcopy(each) for each in bodies if selects(each)]

    def create(self, kind: Kind, body: Json, manager: str, *, dry_run: bool = False) -> Json:
        """Add an object.

        Raises:
            ApiError: There is one with its name (409), or it is not valid (422).
        """
        metadata = body["metadata"]
        if "generateName" in metadata:
            metadata.setdefault("name", metadata["generateName"] + uuid.uuid4().hex[:5])
        name = (metadata.get("namespace", ""), metadata["name"])
        if name in self._objects.get(kind, {}):
            raise ApiError(409, "AlreadyExists", f'{kind.plural} "{name[1]}" already exists', name=name[1])
        held = _Held({})
        fields.own({}, _stored(body), manager, held.owners)
        return self._write(kind, held, None, body, dry_run=dry_run)

    def replace(self, kind: Kind, body: Json, manager: str, part: str = "", *, dry_run: bool = False) -> Json:
        """Put an object in place of the one with its name, or only its ``status``.

        Raises:
            ApiError: There is none (404), it has changed since ``resourceVersion`` (409), or it is not valid (422).
        """
        metadata = body["metadata"]
        held = self._held(kind, metadata.get("namespace", ""), metadata["name"])
        version = metadata.get("resourceVersion")
        if version and version != held.body["metadata"]["resourceVersion"]:
            message = "the object has been modified; please apply your changes to the latest version and try again"
            raise ApiError(409, "Conflict", message, name=metadata["name"])
        if part == "status":
            made = {**held.body, "status": body.get("status", {})}
        else:
            kept = {"status": held.body["status"]} if "status" in held.body else {}
            made = {k: v for k, v in _stored(body).items() if k != "status"} | kept
        owners = copy.deepcopy(held.owners)
        fields.own(held.body, made, manager, owners)
        return self._write(kind, _Held({}, owners), held, made, dry_run=dry_run)

    def apply(self, kind: Kind, wanted: Json, manager: str, *, force: bool, dry_run: bool = False) -> tuple[Json, bool]:
        """Do a server-side apply; returns the object, and whether it is new.

        Raises:
            ApiError: Others own what would change (409), or the outcome is not valid (422).
        """
        name = (wanted["metadata"].get("namespace", ""), wanted["metadata"]["name"])
        held = self._objects.get(kind, {}).get(name)
        wanted = _stored(wanted)
        body = copy.deepcopy(held.body) if held else {"apiVersion": kind.api, "kind": kind.name}
        body.setdefault("metadata", {}).update(dict(zip(("namespace", "name"), name, strict=True)))
        owners = copy.deepcopy(held.owners) if held else {}
        try:
            fields.apply(body, wanted, manager, owners, force=force)
        except fields.ConflictError as error:
            causes = [
                {"reason": "FieldManagerConflict", "message": f'conflict with "{other}"', "field": _dotted(path)}
                for other, paths in error.owned.items()
                for path in paths
            ]
            message = "; ".join(f"{each['message']}: {each['field']}" for each in causes)
            raise ApiError(409, "Conflict", f"Apply failed: {message}", causes=causes) from error
        return self._write(kind, _Held({}, owners), held, body, dry_run=dry_run), held is None

    def delete(self, kind: Kind, namespace: str, name: str) -> Json:
        """Remove an object; returns it as it was.

        Raises:
            ApiError: There is none (404).
        """
        held = self._held(kind, namespace, name)
        del self._objects[kind][namespace, name]
        self._record(kind, held.body, None)
        return held.body

    def watch(self, since: int) -> asyncio.Queue[Event | None]:
        """Return a queue that gets all changes after a version, ``None`` at the end.

        Raises:
            ApiError: They are forgotten in part (410).
        """
        if since < self.oldest:
            raise ApiError(410, "Expired", f"too old resource version: {since} ({self.oldest})")
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        for event in self._history:
            if event.version > since:
                queue.put_nowait(event)
        self._watches.add(queue)
        return queue

    def unwatch(self, queue: asyncio.Queue[Event | None]) -> None:
        """Tell a queue no more."""
        self._watches.discard(queue)

    def drop_watches(self) -> None:
        """End all watches, as a server does that ends."""
        for queue in self._watches:
            queue.put_nowait(None)

    def forget(self) -> None:
        """Forget the history: who continues from an older version is told 410."""
        self.version += 1
        self.oldest = self.version
        self._history.clear()

    def _held(self, kind: Kind, namespace: str, name: str) -> _Held:
        held = self._objects.get(kind, {}).get((namespace if kind.namespaced else "", name))
        if held is None:
            raise ApiError(404, "NotFound", f'{kind.plural} "{name}" not found', name=name, kind=kind.plural)
        return held

    def _write(self, kind: Kind, new: _Held, old: _Held | None, body: Json, *, dry_run: bool) -> Json:
        body = _stored(body)
        before = old.body if old else None
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata: Json = {**body["metadata"]}
        kept = before["metadata"] if before else {"uid": str(uuid.uuid4()), "creationTimestamp": now}
        metadata |= {name: kept[name] for name in ("uid", "creationTimestamp", "generation") if name in kept}
        body |= {"apiVersion": kind.api, "kind": kind.name, "metadata": metadata}
        if kind.name == "Service" and body["spec"].get("type") != "ExternalName" and "clusterIP" not in body["spec"]:
            body["spec"]["clusterIP"] = f"10.96.0.{next(self._addresses)}"
        _validate(kind, body)
        if before is None or before.get("spec") != body.get("spec"):
            metadata["generation"] = metadata.get("generation", 0) + 1
        metadata["managedFields"] = fields.managed(new.owners, now)
        if before is not None and _content(before) == _content(body):
            return copy.deepcopy(before)  # nothing changed, so no version either
        metadata["resourceVersion"] = str(self.version + 1)
        if dry_run:
            return body
        new.body = body
        self._objects.setdefault(kind, {})[metadata.get("namespace", ""), metadata["name"]] = new
        self._record(kind, before, body)
        return copy.deepcopy(body)

    def _record(self, kind: Kind, before: Json | None, after: Json | None) -> None:
        self.version += 1
        event = Event(self.version, kind, before, after)
        self._history.append(event)
        for queue in self._watches:
            queue.put_nowait(event)
        for listener in self.on_change:
            listener(event)


def _stored(body: Json) -> Json:
    """Return an object as it is kept: a Secret's texts in base64."""
    body = copy.deepcopy(body)
    texts = body.pop("stringData", None) if body.get("kind") == "Secret" else None
    if texts:
        body.setdefault("data", {}).update({k: base64.b64encode(v.encode()).decode() for k, v in texts.items()})
    return body


def _content(body: Json) -> Json:
    metadata = {k: v for k, v in body["metadata"].items() if k not in ("resourceVersion", "managedFields")}
    paths = [(each["manager"], each["fieldsV1"]) for each in body["metadata"]["managedFields"]]
    return {**body, "metadata": metadata, "paths": paths}


def _dotted(path: fields.Path) -> str:
    return "".join(f"[{part[2:]}]" if part.startswith("k:") else f".{part[2:]}" for part in path if part != ".")


def _validate(kind: Kind, body: Json) -> None:
    """Hold an object to Kubernetes' own schema, strictly.

    Raises:
        ApiError: It does not fit (422).
    """
    import kubernetes_validate

    try:
        kubernetes_validate.validate(body, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        where = ".".join(map(str, error.path))
        message = f'{kind.name} "{body["metadata"].get("name")}" is invalid: {where}: {error.message}'
        raise ApiError(422, "Invalid", message, causes=[{"field": where, "message": error.message}]) from error
