"""What every medium offers: a FIFO of tensor messages, and one-sided reads of a peer's blocks.

The two are apart because they are used apart: a message needs its receiver's attention, a read needs only the memory
that its owner registered with a server. A medium without one-sided reads has no :class:`ReadPipe`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Self

from baton.errors import InvalidRequestError
from baton.kv_transfer.copy.dtype_cast import BlockCaster, Cast
from baton.kv_transfer.protocol.deadline import Flag, Wait
from baton.kv_transfer.types import BlockReads, Bytes, Valid

MAX_TENSORS = 4096
MAX_DIMS = 16
MAX_MESSAGE_BYTES = 4 << 30
"""Default bound on one message's tensors together."""

DTYPE_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of what may travel; the order is the code on the wire, so new ones go to the end."""


@dataclass(frozen=True, slots=True, eq=False)
class WireTensor:
    """A dense, C-ordered tensor as bytes: what pipes move without knowing a tensor library.

    ``baton.kv_transfer.pipes.tensors`` turns torch tensors into these and back.

    Raises:
        InvalidRequestError: dtype unknown, too many dimensions, or the bytes don't fit the shape.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        if self.data.nbytes != tensor_bytes(self.dtype, self.shape):
            raise InvalidRequestError(
                f"a {self.dtype} tensor of shape {self.shape} does not have {self.data.nbytes} bytes", field="tensors"
            )


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor.

    Raises:
        InvalidRequestError: The dtype is unknown, a dimension is negative, or there are too many.
    """
    if dtype not in DTYPE_SIZES:
        raise InvalidRequestError(f"pipes don't carry {dtype} tensors", field="tensors")
    if len(shape) > MAX_DIMS or any(size < 0 for size in shape):
        raise InvalidRequestError(f"a tensor of shape {tuple(shape)[:20]} cannot be sent", field="tensors")
    count = DTYPE_SIZES[dtype]
    for size in shape:
        count *= size
    return count


def check_message(tensors: Sequence[WireTensor] | None, max_bytes: int) -> int:
    """Return a message's bytes.

    Raises:
        InvalidRequestError: Too many tensors or bytes.
    """
    if tensors is None:
        return 0
    size = sum(tensor.data.nbytes for tensor in tensors)
    if len(tensors) > MAX_TENSORS or size > max_bytes:
        raise InvalidRequestError(
            f"{len(tensors)} tensors of {size} bytes are over the pipe's bounds of {MAX_TENSORS} and {max_bytes}",
            field="tensors",
        )
    return size


class Pipe(ABC):
    """A FIFO of messages between two endpoints. Any thread may send, any may receive, at the same time.

    A deadline or cancellation that strikes before the first byte of a message leaves the pipe usable; in the middle of
    one the order of bytes is lost, and the pipe closes.
    """

    kind: ClassVar[str]

    @abstractmethod
    def send(
        self,
        tensors: Sequence[WireTensor] | None,
        *,
        deadline: float,
        cancelled: Flag | None = None,
    ) -> None:
        """Send one message; on return the caller may reuse the memory.

        Args:
            tensors: At most ``MAX_TENSORS``; ``None`` ("nothing for you") is a message of its own, unlike ``[]``.
            deadline: ``time.monotonic()`` seconds.
            cancelled: Set by another thread to give up.

        Raises:
            InvalidRequestError: The message is over the pipe's bounds.
            DeadlineError, CancelledError, PipeClosedError: As their names say.
        """

    @abstractmethod
    def recv(self, *, deadline: float, cancelled: Flag | None = None) -> list[WireTensor] | None:
        """Receive the next message into fresh memory.

        Raises:
            DeadlineError, CancelledError, PipeClosedError: As their names say.
            TransferError: The peer broke the protocol; the pipe is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Close and wake whoever is blocked; harmless if repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class PipeListener(ABC):
    """Waits for pipes to be connected."""

    kind: ClassVar[str]
    address: str

    @abstractmethod
    def accept(self, *, deadline: float, cancelled: Flag | None = None) -> Pipe:
        """Return the next pipe that a peer connected; peers that fail the handshake are sent away.

        Raises:
            DeadlineError, CancelledError, PipeClosedError: As their names say.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop listening; accepted pipes live on."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class ReadPipe(ABC):
    """One-sided reads of one peer's blocks. Thread safe; several reads may go on at once.

    Attributes:
        group_bytes: Least bytes that are worth a read of their own while the source computes: what a read costs beside
            its bytes should be small against them.
    """

    kind: ClassVar[str]
    group_bytes: ClassVar[int] = 8 << 20

    @abstractmethod
    def read(self, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        """Copy blocks; on return nothing writes into ``local`` any more, whatever happened.

        Args:
            reads: In range on both sides; the caller has checked.
            local: uint8 [blocks, block_bytes], the blocks of the target's rank.
            wait: Deadline and cancel flag.

        Returns:
            bool [n]: which blocks had the offered generation before and after their copy, and came undamaged.

        Raises:
            PipeClosedError: The peer is gone; what arrived must not be used.
            DeadlineError, CancelledError: As their names say.
        """

    @abstractmethod
    def wait_ready(self, value: int, wait: Wait) -> int:
        """Wait until the source's computation has come so far; returns how far it is.

        Args:
            value: Of the source's progress, as an offer names it.
            wait: Deadline and cancel flag.

        Raises:
            PipeClosedError: The peer is gone.
            DeadlineError, CancelledError: As their names say.
        """

    @abstractmethod
    def alive(self) -> bool:
        """Whether the peer is there as far as this side knows; never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Close; reads under way fail. Harmless if repeated."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerRead:
    """A read of what the source is still computing.

    Attributes:
        reads: Which blocks, with steps.
        local: uint8 [blocks, block_bytes], the blocks of the target's rank.
    """

    reads: BlockReads
    local: Bytes


class FollowingReadPipe(ReadPipe):
    """A pipe that takes one request for all layers of what is being computed, and reads each as soon as it is there."""

    @abstractmethod
    def follow(self, reads: Sequence[LayerRead], wait: Wait) -> tuple[list[Valid], float]:
        """Make reads, each as soon as it can be; on return nothing writes into the local blocks any more.

        Args:
            reads: In the order of their progress.
            wait: Deadline and cancel flag.

        Returns:
            Parallel to ``reads`` what :meth:`ReadPipe.read` returns, and the seconds that passed in waiting.

        Raises:
            BatonError: As :meth:`ReadPipe.read`.
        """


class CastingReadPipe(ReadPipe):
    """A pipe whose source's memory is mapped here, so that a read can convert what it copies."""

    @abstractmethod
    def read_cast(self, reads: BlockReads, local: Bytes, caster: BlockCaster, wait: Wait) -> Cast:
        """Convert blocks; on return nothing writes into ``local`` any more, whatever happened.

        Args:
            reads: In range on both sides, with segments, all of whose bytes are those of the source's dtype.
            local: uint8 [blocks, block_bytes], the blocks of the target's rank.
            caster: From the source's dtype to the target's.
            wait: Deadline and cancel flag.

        Raises:
            BatonError: As :meth:`ReadPipe.read`.
        """
