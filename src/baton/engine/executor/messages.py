"""The channel between the leader and one follower: JSON objects and file descriptors over a Unix socket pair.

``SOCK_SEQPACKET`` keeps messages apart, blocks without using the processor, and tells at once when the other process
is gone. The socket has no name: no other process can connect.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from baton.errors import ConfigError, InternalError

MAX_MESSAGE_BYTES = 64 << 10
MAX_DESCRIPTORS = 1

Message = dict[str, Any]


class ChannelClosedError(Exception):
    """The other process is gone."""


def open_channel() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a channel; neither is inherited by child processes unless passed on."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_message(channel: socket.socket, message: Message, *, deadline: float, descriptors: Sequence[int] = ()) -> None:
    """Send a message and copies of file descriptors.

    Args:
        channel: One end.
        message: Of what JSON knows; at most ``MAX_MESSAGE_BYTES``.
        deadline: ``time.monotonic()`` seconds.
        descriptors: At most ``MAX_DESCRIPTORS``.

    Raises:
        ChannelClosedError: The other process is gone.
        InternalError: The message is too long, or the deadline passed.
    """
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE_BYTES or len(descriptors) > MAX_DESCRIPTORS:
        raise InternalError(f"a message of {len(body)} bytes is too long for the channel between ranks")
    channel.settimeout(_remaining(deadline))
    try:
        socket.send_fds(channel, [body], descriptors)
    except TimeoutError:
        raise InternalError("a rank does not listen any more") from None
    except OSError as error:
        raise ChannelClosedError(str(error)) from error


def recv_message(channel: socket.socket, *, deadline: float | None) -> tuple[Message, list[int]]:
    """Receive a message and file descriptors, which the caller owns.

    Args:
        channel: One end.
        deadline: ``time.monotonic()`` seconds; ``None``: as long as the other process lives.

    Raises:
        ChannelClosedError: The other process is gone.
        InternalError: The deadline passed, or what came is no message.
    """
    channel.settimeout(None if deadline is None else _remaining(deadline))
    try:
        body, descriptors, flags, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
    except TimeoutError:
        raise InternalError("a rank does not answer") from None
    except OSError as error:
        raise ChannelClosedError(str(error)) from error
    if not body:
        raise ChannelClosedError("the channel was closed")
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("longer than allowed")
        message = json.loads(body)
        if not isinstance(message, dict):
            raise TypeError("not an object")
    except (ValueError, TypeError) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise InternalError(f"a rank sent something that is no message: {error}") from error
    return message, descriptors


def error_to_message(error: BaseException) -> Message:
    """Describe an error, for :func:`error_from_message`."""
    return {
        "error": type(error).__name__,
        "message": str(error)[:4000],
        "field": getattr(error, "field", None),
        "config": isinstance(error, ConfigError),
    }


def error_from_message(message: Message, rank: int) -> ConfigError | InternalError:
    """Return the error that a follower reported: a wrong configuration stays one, anything else is internal."""
    text = str(message.get("message", ""))
    if message.get("config"):
        return ConfigError(text, field=message.get("field"))
    return InternalError(f"rank {rank}: {message.get('error')}: {text}")


def _remaining(deadline: float) -> float:
    """Seconds to a deadline; never 0, which would mean not to wait at all."""
    return max(1e-3, deadline - time.monotonic())
