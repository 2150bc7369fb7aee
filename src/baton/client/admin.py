"""What is asked of instances themselves: to take no more requests, to become another role's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from baton.api.v1 import worker_pb2, worker_pb2_grpc
from baton.client.types import Instance
from baton.errors import InvalidRequestError, NotFoundError
from baton.rpc.convert import role_to_pb
from baton.rpc.errors import from_rpc_error, readable
from baton.types import Role

_ANSWER_S = 10.0
_LONGEST_WAIT_S = 86400.0


def find(instances: list[Instance], instance_id: str) -> Instance:
    """Return an instance by its id.

    Raises:
        NotFoundError: There is none; names those that there are.
    """
    for each in instances:
        if each.instance_id == instance_id:
            return each
    known = ", ".join(sorted(each.instance_id for each in instances)) or "none"
    raise NotFoundError(f"the router knows no instance {instance_id!r}; there are {known}", field="instance")


async def drain(open_channel: Callable[[str], grpc.aio.Channel], address: str, wait: float, *, migrate: bool) -> int:
    """Have an instance take no new requests, and wait for those that run.

    Args:
        open_channel: Opens a channel to an instance.
        address: The instance's.
        wait: Seconds.
        migrate: Whether routers go on elsewhere with what still runs then.

    Returns:
        Requests that still run.

    Raises:
        BatonError: It does not answer, or refuses.
    """
    if not 0.0 <= wait <= _LONGEST_WAIT_S:
        raise InvalidRequestError(f"wait must be between 0 and {_LONGEST_WAIT_S:g} s, got {wait}", field="wait")
    request = worker_pb2.DrainRequest(timeout_ms=round(1000 * wait), migrate=migrate)
    answer = await _ask(open_channel, address, "Drain", request, wait + _ANSWER_S)
    return int(answer.num_unfinished)


async def set_role(open_channel: Callable[[str], grpc.aio.Channel], address: str, role: Role) -> None:
    """Make an idle instance one of another role; one that was drained takes requests again.

    Raises:
        BusyError: It is not idle.
        BatonError: It does not answer, or refuses.
    """
    await _ask(open_channel, address, "SetRole", worker_pb2.SetRoleRequest(role=role_to_pb(role)), _ANSWER_S)


async def _ask(
    open_channel: Callable[[str], grpc.aio.Channel], address: str, method: str, request: Any, timeout_s: float
) -> Any:
    channel = open_channel(address)
    try:
        return readable(await getattr(worker_pb2_grpc.WorkerServiceStub(channel), method)(request, timeout=timeout_s))
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    finally:
        await channel.close(None)
