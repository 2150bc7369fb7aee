"""What typed clients send in Kubernetes' protobuf form: Helm its releases (Secrets), kubectl namespaces."""

from __future__ import annotations

import base64
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tests.support.kube.kinds import Json

_MAGIC = b"k8s\0"
_STRING, _BYTES, _MESSAGE = (
    descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE,
)
# (name, number, type; "map:" for maps to it); numbers: generated.proto of k8s.io/api/core/v1 and k8s.io/apimachinery.
_MESSAGES: dict[str, list[tuple[str, int, str]]] = {
    "TypeMeta": [("apiVersion", 1, "string"), ("kind", 2, "string")],
    "Unknown": [("typeMeta", 1, "TypeMeta"), ("raw", 2, "bytes")],
    "ObjectMeta": [
        ("name", 1, "string"),
        ("namespace", 3, "string"),
        ("resourceVersion", 6, "string"),
        ("labels", 11, "map:string"),
        ("annotations", 12, "map:string"),
    ],
    "Namespace": [("metadata", 1, "ObjectMeta")],
    "Secret": [("metadata", 1, "ObjectMeta"), ("data", 2, "map:bytes"), ("type", 3, "string")],
}


def _build() -> dict[str, type[Any]]:
    file = descriptor_pb2.FileDescriptorProto(name="tests/kube.proto", package="kube", syntax="proto3")
    plain = {"string": _STRING, "bytes": _BYTES}

    def add(message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: str) -> None:
        repeated = kind.startswith("map:")
        made = message.field.add(name=name, number=number, label=3 if repeated else 1)
        if repeated:
            entry = message.nested_type.add(name=f"{name[0].upper()}{name[1:]}Entry")
            entry.options.map_entry = True
            add(entry, "key", 1, "string")
            add(entry, "value", 2, kind.removeprefix("map:"))
            made.type, made.type_name = _MESSAGE, f".kube.{message.name}.{entry.name}"
        elif kind in plain:
            made.type = plain[kind]
        else:
            made.type, made.type_name = _MESSAGE, f".kube.{kind}"

    for name, described in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in described:
            add(message, *field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"kube.{name}")) for name in _MESSAGES}


def decoded(raw: bytes) -> Json | None:
    """Return the object in a request's body; ``None``: it is of a kind that is not known here."""
    classes = _build()
    if not raw.startswith(_MAGIC):
        return None
    unknown = classes["Unknown"].FromString(raw[len(_MAGIC) :])
    kind = unknown.typeMeta.kind
    if kind not in ("Secret", "Namespace"):
        return None
    found = classes[kind].FromString(unknown.raw)
    metadata = {name: getattr(found.metadata, name) for name in ("name", "namespace", "resourceVersion")}
    metadata |= {name: dict(getattr(found.metadata, name)) for name in ("labels", "annotations")}
    body = {"apiVersion": "v1", "kind": kind, "metadata": {k: v for k, v in metadata.items() if v}}
    if kind == "Secret":
        body["data"] = {key: base64.b64encode(value).decode() for key, value in found.data.items()}
        body |= {"type": found.type} if found.type else {}
    return body
