"""Who owns which field of an object, and what patches make of it: server-side apply, merge and strategic merge.

A path is a tuple of parts as ``managedFields`` has them: ``f:NAME`` for a key, ``k:{...}`` for an item of a list whose
items have keys, ``.`` for the item itself. Lists without keys are one value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.support.kube.kinds import Json

Path = tuple[str, ...]
_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
    "conditions": ("type",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "ownerReferences": ("uid",),
}
_PORTS = (("containerPort", "protocol"), ("port", "protocol"))
_SYSTEM = ("managedFields", "resourceVersion", "uid", "generation", "creationTimestamp", "name", "namespace")


def keys_of(name: str, items: list[Any]) -> tuple[str, ...]:
    """Return the keys by which the items of a list are told apart; empty: the list is one value."""
    if not items or not all(isinstance(each, dict) for each in items):
        return ()
    wanted = _PORTS if name == "ports" else ((_KEYS[name],) if name in _KEYS else ())
    return next((keys for keys in wanted if all(key in each for key in keys for each in items)), ())


def _part(item: Json, keys: tuple[str, ...]) -> str:
    return "k:" + json.dumps({key: item[key] for key in keys}, sort_keys=True, separators=(",", ":"))


def leaves(node: Json, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of every field that somebody can own."""
    for name, value in node.items():
        if (not path and name in ("apiVersion", "kind", "status")) or (path == ("f:metadata",) and name in _SYSTEM):
            continue
        here = (*path, f"f:{name}")
        if isinstance(value, dict) and value:
            yield from leaves(value, here)
        elif isinstance(value, list) and (keys := keys_of(name, value)):
            for item in value:
                there = (*here, _part(item, keys))
                yield (*there, "."), None
                yield from leaves(item, there)
        else:
            yield here, value


def managed(owners: dict[str, tuple[str, set[Path]]], time: str) -> list[Json]:
    """Return ``managedFields``: by manager, its operation and paths."""
    entries = []
    for manager, (operation, paths) in owners.items():
        tree: Json = {}
        for path in sorted(paths):
            node = tree
            for part in path:
                node = node.setdefault(part, {})
        if tree:
            entry = {"manager": manager, "operation": operation, "time": time}
            entries.append(entry | {"fieldsType": "FieldsV1", "fieldsV1": tree})
    return entries


def _children(node: Any, part: str) -> Any:
    """Return what a part leads to in an object or list; ``None``: nothing."""
    if part.startswith("f:"):
        return node.get(part[2:]) if isinstance(node, dict) else None
    wanted = json.loads(part[2:])
    found = [each for each in node or () if all(each.get(key) == value for key, value in wanted.items())]
    return found[0] if found else None


def value_at(node: Any, path: Path) -> Any:
    """Return the value at a path; ``None``: nothing."""
    for part in path:
        if node is None or part == ".":
            break
        node = _children(node, part)
    return node


def put(node: Json, path: Path, value: Any) -> None:
    """Set the value at a path, with all that leads there."""
    at: Any = node
    for part, following in zip(path, (*path[1:], None), strict=True):
        if part == ".":
            return
        if following is None:
            at[part[2:]] = value
            return
        child = _children(at, part)
        if child is None:
            child = [] if following.startswith("k:") else {}
            if part.startswith("f:"):
                at[part[2:]] = child
            else:
                child = json.loads(part[2:])
                at.append(child)
        at = child


def drop(node: Json, path: Path) -> None:
    """Remove the field at a path, and what is empty then on the way to it."""
    way: list[tuple[Any, str]] = []
    at: Any = node
    for part in path:
        if part == ".":
            break
        if at is None:
            return
        way.append((at, part))
        at = _children(at, part)
    for index, (parent, part) in enumerate(reversed(way)):
        child = _children(parent, part)
        if child is None or (index and child):
            return
        if part.startswith("f:"):
            del parent[part[2:]]
        else:
            parent.remove(child)


class ConflictError(Exception):
    """Fields that others own have other values: by manager, the paths."""

    def __init__(self, owned: dict[str, list[Path]]) -> None:
        """Name them."""
        self.owned = owned
        super().__init__(f"conflicts with {', '.join(owned)}")


def apply(live: Json, wanted: Json, manager: str, owners: dict[str, tuple[str, set[Path]]], *, force: bool) -> None:
    """Do a server-side apply to an object and its owners, in place.

    Raises:
        ConflictError: Others own fields that this would change, and it is not forced.
    """
    mine = dict(leaves(wanted))
    taken: dict[str, list[Path]] = {}
    for other, (_, paths) in owners.items():
        if other != manager:
            found = [path for path in paths & mine.keys() if path[-1] != "." and value_at(live, path) != mine[path]]
            if found:
                taken[other] = found
    if taken and not force:
        raise ConflictError(taken)
    for other, paths_taken in taken.items():
        owners[other][1].difference_update(paths_taken)
    _, before = owners.get(manager, ("Apply", set()))
    kept = set().union(*(paths for name, (_, paths) in owners.items() if name != manager))
    for path in sorted(before - mine.keys() - kept, key=len):
        drop(live, path)
    for path, value in mine.items():
        if value != {} or not isinstance(value_at(live, path), dict):  # an empty map takes nothing away
            put(live, path, value)
    owners[manager] = ("Apply", set(mine))


def own(before: Json, after: Json, manager: str, owners: dict[str, tuple[str, set[Path]]]) -> None:
    """Give a manager the fields that its update changed, and take from all what is gone."""
    old, new = dict(leaves(before)), dict(leaves(after))
    changed = {path for path, value in new.items() if path not in old or old[path] != value}
    for _, paths in owners.values():
        paths.difference_update(changed)
        paths.intersection_update(new)
    if changed:
        owners.setdefault(manager, ("Update", set()))[1].update(changed)


def merge(node: Any, patch: Any, *, strategic: bool = False, name: str = "") -> Any:
    """Return what a merge patch makes of a value (RFC 7386); ``strategic``: lists with keys item by item."""
    if strategic and isinstance(patch, list) and (keys := keys_of(name, patch)):
        items = list(node or ())
        for change in patch:
            at = next((i for i, each in enumerate(items) if all(each.get(k) == change[k] for k in keys)), None)
            if change.get("$patch") == "delete":
                items = [each for i, each in enumerate(items) if i != at]
            elif at is None:
                items.append(change)
            else:
                items[at] = merge(items[at], change, strategic=True)
        return items
    if not isinstance(patch, dict):
        return patch
    made = dict(node) if isinstance(node, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):  # directives about order
            continue
        if value is None:
            made.pop(key, None)
        else:
            made[key] = merge(made.get(key), value, strategic=strategic, name=key)
    return made
