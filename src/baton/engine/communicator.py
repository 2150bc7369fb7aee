"""Collective operations of an instance's ranks: sums in a stage, hidden states between stages.

Over gloo on loopback, between GPUs by NCCL: there an operation is queued on the device behind what computes its input,
and what is queued after it waits for it.

Process groups are made directly, not through torch's global registry: several engines may live in one process. Gloo
reports at once when a peer's connection closes; a rank that fails therefore leaves its groups, ranks that wait for it
fail too, and so on, up to the leader.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from baton.config.environment import set_nccl_environment
from baton.errors import ConfigError, InternalError
from baton.kv_cache.shards import ShardSpec

LOOPBACK = "127.0.0.1"
STEP_TIMEOUT_S = 600.0
"""Longest time (seconds) for which one rank waits for another within a step, or the leader for a step's end."""
CONNECT_TIMEOUT_S = 60.0


class Rendezvous:
    """Where ranks find each other: a store that listens on loopback as long as this object lives."""

    def __init__(self) -> None:
        listener = socket.socket()
        listener.bind((LOOPBACK, 0))
        listener.listen(128)
        self.port: int = listener.getsockname()[1]
        # The store would listen on every interface; it takes a socket that already listens, and owns it then.
        self.store = _store(self.port, listener.detach())


class Communicator:
    """One rank's connection to the other ranks.

    Args:
        spec: This rank.
        device: Where it computes; default: a CPU.

    Attributes:
        spec: As given.
        generation: Number of the groups that this rank joined last; 0: none yet.
    """

    def __init__(self, spec: ShardSpec, device: torch.device | None = None) -> None:
        self.spec = spec
        self.generation = 0
        self._device = device or torch.device("cpu")
        self._stage: Any = None
        self._all: Any = None

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank's stage begins the model."""
        return self.spec.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's stage ends the model."""
        return self.spec.pp_rank == self.spec.pp_size - 1

    @property
    def has_head(self) -> bool:
        """Whether this rank computes the logits: the first one of the last stage does."""
        return self.is_last_stage and self.spec.tp_rank == 0

    @property
    def splits_heads(self) -> bool:
        """Whether this rank's stage has other ranks."""
        return self.spec.tp_size > 1

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.spec.tp_size * self.spec.pp_size == 1

    @property
    def connected(self) -> bool:
        """Whether the groups are there; after :meth:`disconnect` they are not."""
        return self._stage is not None or self._all is not None

    def connect(self, rendezvous: Rendezvous | int, generation: int) -> None:
        """Join groups with all other ranks, which must do the same; leaves earlier ones.

        Args:
            rendezvous: Of the leader, or the port of it.
            generation: Tells these groups from earlier ones.

        Raises:
            RuntimeError: Not all of them came in time.
        """
        self.disconnect()
        store = _store(rendezvous) if isinstance(rendezvous, int) else rendezvous.store
        make = _nccl_group if self._device.type == "cuda" else _gloo_group
        spec = self.spec
        if spec.tp_size > 1:
            self._stage = make(store, f"{generation}/stage-{spec.pp_rank}", spec.tp_rank, spec.tp_size)
        if spec.pp_size > 1:
            self._all = make(store, f"{generation}/all", spec.index, spec.tp_size * spec.pp_size)
        self.generation = generation

    def disconnect(self) -> None:
        """Close the connections, which wakes ranks that wait for this one; harmless if repeated."""
        groups = (self._stage, self._all)
        self._stage = None
        self._all = None
        for group in groups:
            if group is not None and self._device.type == "cuda":
                group.abort()  # what is queued on the device would wait for the others for ever

    def all_agree(self, *, fine: bool) -> bool:
        """Whether all ranks, each of which must ask, say that something went well."""
        group = self._all or self._stage
        if group is None:
            return fine
        wrong = torch.tensor([0.0 if fine else 1.0], device=self._device)
        group.allreduce([wrong]).wait()
        return float(wrong) == 0.0

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the ranks of this stage, in place where it is contiguous."""
        total = partial.contiguous()
        self._connected_group(self._stage).allreduce([total]).wait()
        return total

    def receive_hidden(self, like: torch.Size | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Receive hidden states from the same place of the stage before."""
        hidden = torch.empty(tuple(like), dtype=dtype, device=self._device)
        self._connected_group(self._all).recv([hidden], self.spec.index - self.spec.tp_size, 0).wait()
        return hidden

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Send hidden states to the same place of the stage after."""
        self._connected_group(self._all).send([hidden.contiguous()], self.spec.index + self.spec.tp_size, 0).wait()

    def gather_logits(self, logits: torch.Tensor, rows: int, vocab_size: int) -> torch.Tensor:
        """Bring the logits from the last stage to the leader.

        Args:
            logits: [rows, vocab_size] on the rank that gives them, anything elsewhere.
            rows: How many; 0 sends nothing.
            vocab_size: Columns.

        Returns:
            On the leader the logits [rows, vocab_size], float32 if they came from another rank; anything elsewhere.
        """
        if self.is_first_stage and self.is_last_stage:
            return logits
        if self.has_head and rows:
            if logits.shape != (rows, vocab_size):
                raise InternalError(f"logits of shape {tuple(logits.shape)}, expected {(rows, vocab_size)}")
            self._connected_group(self._all).send([logits.float().contiguous()], 0, 1).wait()
        if self.spec.index == 0:
            logits = torch.empty((rows, vocab_size), dtype=torch.float32, device=self._device)
            if rows:
                last = (self.spec.pp_size - 1) * self.spec.tp_size
                self._connected_group(self._all).recv([logits], last, 1).wait()
        return logits

    def _connected_group(self, group: Any) -> Any:
        if group is None:
            raise InternalError("this rank is not connected to the others")
        return group


def is_disconnect(error: BaseException) -> bool:
    """Whether an error only says that another rank has disconnected, not why."""
    text = str(error)
    return any(words in text for words in ("closed by peer", "reset by peer", "Broken pipe", "NCCL communicator was"))


def _store(port: int, listener: int | None = None) -> Any:
    """Open a store on loopback: the server's end, if given a listening socket, else a client's."""
    stores: Any = dist  # torch exports its stores without saying so
    return stores.TCPStore(
        LOOPBACK,
        port,
        is_master=listener is not None,
        timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _gloo_group(store: Any, name: str, rank: int, size: int) -> Any:
    parts: Any = dist
    options = parts.ProcessGroupGloo._Options()
    device = dist.ProcessGroupGloo.create_device(hostname=LOOPBACK, lazy_init=False)
    options._devices = [device]
    options._threads = 1
    options._timeout = timedelta(seconds=STEP_TIMEOUT_S)
    return parts.ProcessGroupGloo(parts.PrefixStore(name, store), rank, size, options)


def _nccl_group(store: Any, name: str, rank: int, size: int) -> Any:
    """Make a group of GPUs; NCCL's own connections are made with the first operation."""
    parts: Any = dist
    if not dist.is_nccl_available():
        raise ConfigError("tp and pp on GPUs need NCCL, which this torch was built without", field="device")
    set_nccl_environment()
    options = parts.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=STEP_TIMEOUT_S)
    return parts.ProcessGroupNCCL(parts.PrefixStore(name, store), rank, size, options)
