"""Where blocks live, on the wire of the gRPC services and back."""

from __future__ import annotations

from baton.api.v1 import common_pb2
from baton.errors import InvalidRequestError
from baton.kv_transfer.types import BlockSource, Endpoint
from baton.rpc.convert import fingerprint_from_pb, fingerprint_to_pb
from baton.types import Epoch, InstanceId

EPOCH_BYTES = 16
MAX_ENDPOINTS = 16


def source_from_pb(message: common_pb2.KvSource, *, field: str = "source") -> BlockSource:
    """Read a source.

    Raises:
        InvalidRequestError: Epoch or endpoints are malformed; names the field.
    """
    if len(message.epoch) != EPOCH_BYTES:
        raise InvalidRequestError(f"an epoch has {EPOCH_BYTES} bytes, got {len(message.epoch)}", field=f"{field}.epoch")
    if not 1 <= len(message.endpoints) <= MAX_ENDPOINTS:
        raise InvalidRequestError(
            f"a source has 1 to {MAX_ENDPOINTS} endpoints, got {len(message.endpoints)}", field=f"{field}.endpoints"
        )
    return BlockSource(
        instance_id=InstanceId(message.instance_id),
        epoch=Epoch(message.epoch),
        endpoints=tuple(Endpoint(item.kind, item.address) for item in message.endpoints),
        fingerprint=fingerprint_from_pb(message.fingerprint),
        num_blocks=message.num_blocks,
    )


def source_to_pb(source: BlockSource) -> common_pb2.KvSource:
    """Write a source."""
    return common_pb2.KvSource(
        instance_id=source.instance_id,
        epoch=source.epoch,
        endpoints=[common_pb2.KvEndpoint(kind=item.kind, address=item.address) for item in source.endpoints],
        fingerprint=fingerprint_to_pb(source.fingerprint),
        num_blocks=source.num_blocks,
    )
