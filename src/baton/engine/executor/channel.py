"""Between the leader and its followers: messages with file descriptors to each, and the memory that steps come in.

A channel is a Unix socket pair. ``SOCK_SEQPACKET`` keeps messages (JSON objects) apart, blocks without using the
processor, and tells at once when the other process is gone. The socket has no name: no other process can connect.

A step's arrays are written once, into memory that all ranks map, and read in place by every rank. One slot is enough:
the leader writes the next step only after all followers have answered for the last one. A message on the channel of
each follower says that a step is there.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.config import EngineConfig
from baton.engine.runner.input_batch import ForwardBatch
from baton.errors import ConfigError, InternalError
from baton_kernels.paged_attention import MAX_TREE_TOKENS, TokenTrees

MAX_MESSAGE_BYTES = 64 << 10
MAX_DESCRIPTORS = 1
_COUNTS = 6
_Counts = tuple[int, int, int, int, int, int]
"""int64 at the beginning: tokens T, sequences S, width W of the block tables, rows R of the logits, layer groups, and
whether there are trees."""
_LEAST_TOKENS = 64
_LEAST_SEQUENCES = 8
"""Room for the steps of the self-check, whatever the configuration."""

Message = dict[str, Any]


class ChannelClosedError(Exception):
    """The other process is gone."""


def open_channel() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a channel; neither is inherited by child processes unless passed on."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_message(channel: socket.socket, message: Message, *, deadline: float, descriptors: Sequence[int] = ()) -> None:
    """Send a message and copies of file descriptors.

    Args:
        channel: One end of the channel.
        message: JSON values; at most ``MAX_MESSAGE_BYTES`` when encoded.
        deadline: ``time.monotonic()`` seconds.
        descriptors: File descriptors to pass; at most ``MAX_DESCRIPTORS``.

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
        channel: One end of the channel.
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


class StepBuffer:
    """Memory for one step.

    Args:
        fd: A memfd of its size, which this object then owns.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=np.uint8)

    @classmethod
    def create(cls, config: EngineConfig, max_model_len: int, groups: int = 1) -> StepBuffer:
        """Make a buffer for the largest step that a configuration allows; pages are taken as they are used.

        Args:
            config: Bounds tokens and sequences.
            max_model_len: Tokens of the longest sequence.
            groups: Block tables per sequence.
        """
        tokens = max(config.max_num_batched_tokens, _LEAST_TOKENS)
        sequences = max(config.max_num_seqs, _LEAST_SEQUENCES)
        trees = int(config.speculative_width > 1)
        # Of a tree's slots some may lie behind the longest sequence.
        longest = max(max_model_len, _LEAST_TOKENS) + trees * MAX_TREE_TOKENS
        width = (-(-longest // config.block_size) + 1) * groups
        fd = os.memfd_create("baton-step", os.MFD_CLOEXEC)
        os.ftruncate(fd, _num_bytes((tokens, sequences, width, tokens, groups, trees)))
        return cls(fd)

    def write(self, batch: ForwardBatch) -> None:
        """Put a step in.

        Raises:
            InternalError: It is larger than the configuration allows.
        """
        width = batch.block_tables.shape[1]
        tokens = len(batch.token_ids)
        sequences = len(batch.context_lens)
        trees = int(batch.trees is not None)
        counts = (tokens, sequences, width, len(batch.logit_rows), batch.groups, trees)
        if _num_bytes(counts) > len(self._memory):
            raise InternalError(f"a step of {counts[0]} tokens and {counts[1]} sequences is larger than was planned")
        self._memory[: 8 * _COUNTS].view(np.int64)[:] = counts
        for target, source in zip(_fields(self._at(counts)), _fields(batch), strict=True):
            target[...] = source

    def read(self) -> ForwardBatch:
        """Return the step as views into the memory.

        Raises:
            InternalError: The counts are none of a step.
        """
        tokens, sequences, width, rows, groups, trees = self._memory[: 8 * _COUNTS].view(np.int64).tolist()
        counts = (tokens, sequences, width, rows, groups, trees)
        if min(counts) < 0 or _num_bytes(counts) > len(self._memory):
            raise InternalError("the step buffer does not hold a step")
        return self._at(counts)

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last array that refers to it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _at(self, counts: _Counts) -> ForwardBatch:
        tokens, sequences, width, rows, groups, trees = counts
        middle = 8 * (_COUNTS + (2 + trees) * tokens + rows)
        long = self._memory[8 * _COUNTS : middle].view(np.int64)
        short = self._memory[middle : _num_bytes(counts)].view(np.int32)
        return ForwardBatch(
            token_ids=long[:tokens],
            positions=long[tokens : 2 * tokens],
            logit_rows=long[2 * tokens : 2 * tokens + rows],
            query_starts=short[: sequences + 1],
            context_lens=short[sequences + 1 : 2 * sequences + 1],
            block_tables=short[2 * sequences + 1 : (2 + width) * sequences + 1].reshape(sequences, width),
            groups=groups,
            trees=TokenTrees(long[2 * tokens + rows :].view(np.uint64), short[-sequences:]) if trees else None,
        )


def _fields(batch: ForwardBatch) -> tuple[npt.NDArray[np.int64 | np.uint64 | np.int32], ...]:
    return (
        *(() if batch.trees is None else (batch.trees.ancestors, batch.trees.starts)),
        batch.token_ids,
        batch.positions,
        batch.logit_rows,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
    )


def _num_bytes(counts: _Counts) -> int:
    tokens, sequences, width, rows, _, trees = counts
    return 8 * (_COUNTS + (2 + trees) * tokens + rows) + 4 * (1 + sequences * (2 + trees + width))
