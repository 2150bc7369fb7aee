"""A follower's process: loads its share of the model and runs what the leader asks for, until the leader is gone."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import torch

from baton.background import BackgroundThread
from baton.config import EngineConfig
from baton.engine.communicator import CONNECT_TIMEOUT_S, Communicator, is_disconnect
from baton.engine.device import rank_device
from baton.engine.device_memory import DeviceArena
from baton.engine.executor.channel import (
    ChannelClosedError,
    Message,
    StepBuffer,
    error_to_message,
    recv_message,
    send_message,
)
from baton.engine.runner.input_batch import KVMoves
from baton.errors import BatonError, ConfigError, InternalError
from baton.kv_cache.arena import Arena, HostArena
from baton.kv_cache.shards import ShardSpec
from baton.logs import quiet_imports, set_up_logging

with quiet_imports():
    from baton.engine.runner.model_runner import ExecutionPath, ModelRunner, load_whole

log = logging.getLogger("baton.engine.executor.follower")  # as a module that is run, it is called something else


class Follower:
    """What a follower does at the leader's request.

    Raises:
        ConfigError: The model cannot be loaded or divided.
    """

    def __init__(self, config: EngineConfig, spec: ShardSpec) -> None:
        torch.set_num_threads(config.threads)
        self._device = rank_device(config.device, spec.index, spec.tp_size * spec.pp_size)
        self._device.enter()
        self.communicator = Communicator(spec, self._device.memory)
        whole = load_whole(config, hold=False, rank=spec.index)
        self._runner = ModelRunner(config, whole, self.communicator)
        self._steps: StepBuffer | None = None
        self._allocated = 0

    def answer(self, message: Message, descriptors: list[int]) -> Message:
        """Do what a message asks for; what it cannot do is told in the answer."""
        try:
            return self._handle(message, descriptors)
        except Exception as error:
            # Ranks that wait for this one in the middle of a step fail too, up to the leader.
            self.communicator.disconnect()
            if not isinstance(error, BatonError) and not is_disconnect(error):
                log.exception("rank %d failed", self.communicator.spec.index)
            return error_to_message(error)

    def _handle(self, message: Message, descriptors: list[int]) -> Message:
        match message.get("do"):
            case "map_steps":
                self._steps = StepBuffer(_single_descriptor(descriptors))
            case "connect":
                self.communicator.connect(int(message["port"]), int(message["generation"]))
            case "use":
                return {"why": self._runner.use(ExecutionPath(message["path"]))}
            case "bind":
                self._runner.bind(self._arena(message, _single_descriptor(descriptors)))
            case "graph_bytes":
                return {"bytes": self._runner.graph_bytes()}
            case "measure":
                torch.cuda.reset_peak_memory_stats(self._device.memory)
                self._allocated = torch.cuda.memory_allocated(self._device.memory)
            case "measured":
                return {"bytes": torch.cuda.max_memory_allocated(self._device.memory) - self._allocated}
            case "step":
                if self._steps is None:
                    raise InternalError("a step before there is memory for it")
                scratch = int(message["scratch_blocks"]), int(message["offset"])
                batch = self._steps.read()
                self._runner.run(batch, *scratch, stored=bool(message["stored"]))
                if self._device.is_cuda and self.communicator.spec.pp_rank and not len(batch.logit_rows):
                    # Nothing comes back to the leader behind which it could wait for what is written here.
                    torch.cuda.synchronize(self._device.memory)
            case "move":
                sources, targets = (np.array(message[name], np.int64) for name in ("sources", "targets"))
                self._runner.move_kv(KVMoves(sources, targets))
            case unknown:
                raise InternalError(f"a follower does not know the request {unknown!r}")
        return {}

    def _arena(self, message: Message, descriptor: int) -> Arena:
        """This rank's arena, which the leader has allocated."""
        handle = str(message["handles"][self.communicator.spec.index - 1])
        if not handle:
            return HostArena.attach(descriptor, writable=True)
        return DeviceArena.attach(self._device, bytes.fromhex(handle), descriptor)


def _config(values: dict[str, Any]) -> EngineConfig:
    """Return the leader's configuration, whose tuples came as lists."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        fields[name] = tuple(value) if isinstance(value, list) else value
    return EngineConfig(**fields)


def main(argv: list[str]) -> int:
    """Serve the leader at the other end of an inherited socket; returns the exit status."""
    channel = socket.socket(fileno=int(argv[1]))
    # The leader alone decides when its followers end; it may be told to drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    BackgroundThread(
        "leader", partial(_end_with_leader, channel.fileno()), restart=False, on_failure=lambda error: os._exit(1)
    ).start()
    try:
        first, _ = recv_message(channel, deadline=time.monotonic() + CONNECT_TIMEOUT_S)
        spec = ShardSpec(**first["shard"])
        name, form = first["log"] or ("baton", "text")
        set_up_logging("warning", f"{name} rank {spec.index}", form=form)
        try:
            follower = Follower(_config(first["config"]), spec)
        except ConfigError as error:
            _answer(channel, first, error_to_message(error))
            return 0
        _answer(channel, first, {})
        while True:
            message, descriptors = recv_message(channel, deadline=None)
            _answer(channel, message, follower.answer(message, descriptors))
    except ChannelClosedError:
        return 0


def _answer(channel: socket.socket, request: Message, answer: Message) -> None:
    values = {"request": request.get("request"), **answer}
    send_message(channel, values, deadline=time.monotonic() + CONNECT_TIMEOUT_S)


def _single_descriptor(descriptors: list[int]) -> int:
    if len(descriptors) != 1:
        raise InternalError(f"expected one file descriptor, got {len(descriptors)}")
    return descriptors[0]


def _end_with_leader(channel: int) -> None:
    """End this process, whatever it is doing, once the leader is gone: also while it loads or computes."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
