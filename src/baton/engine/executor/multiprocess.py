"""The executor of several processes, as the leader sees it: starts the followers, leads them, notices their death.

Every request to the followers has a number, which each of them answers once. A rank that fails in the middle of a step
leaves its groups (:meth:`Communicator.disconnect`); before the next step all of them reconnect. A rank that dies
ends the instance: its part of the KV is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from baton.background import BackgroundThread
from baton.child_process import ChildProcess, RunningProcess, start_python
from baton.config import EngineConfig
from baton.engine.communicator import CONNECT_TIMEOUT_S, STEP_TIMEOUT_S, Rendezvous, is_disconnect
from baton.engine.executor.base import ExecutorLostError
from baton.engine.executor.channel import (
    ChannelClosedError,
    Message,
    StepBuffer,
    error_from_message,
    open_channel,
    recv_message,
    send_message,
)
from baton.engine.executor.in_process import InProcessExecutor
from baton.engine.runner.input_batch import ForwardBatch, ForwardOutput, KVMoves
from baton.engine.runner.model_runner import ExecutionPath
from baton.errors import BatonError, ConfigError, InternalError
from baton.kv_cache.arena import SharedDeviceArena
from baton.kv_cache.shards import KVShards, ShardSpec
from baton.logs import log_style

ResultT = TypeVar("ResultT")

LOAD_TIMEOUT_S = 1800.0
"""How long a follower may take to load its share, after the leader has loaded its own."""
END_TIMEOUT_S = 10.0
"""How long (seconds) a process may take to end after its channel was closed."""


def start_follower(channel: socket.socket) -> RunningProcess:
    """Start a follower that serves the other end of a channel."""
    descriptor = channel.fileno()
    return start_python("baton.engine.executor.follower", [str(descriptor)], pass_fds=[descriptor])


class FollowerProcess:
    """One follower's process and channel; it begins to load at once.

    Attributes:
        spec: Rank that the process runs.
        channel: The leader's end of the channel to it.
    """

    def __init__(self, spec: ShardSpec, config: EngineConfig) -> None:
        self.spec = spec
        self.channel, follower_end = open_channel()
        try:
            self.process = ChildProcess(start_follower(follower_end))
        except BaseException:
            self.channel.close()
            raise
        finally:
            follower_end.close()
        with contextlib.suppress(
            ChannelClosedError
        ):  # then it died at once, which the wait for its first answer reports
            values = {"config": dataclasses.asdict(config), "shard": dataclasses.asdict(spec), "log": log_style()}
            self.send({"request": 0, **values}, CONNECT_TIMEOUT_S)

    @property
    def name(self) -> str:
        spec = self.spec
        return f"rank {spec.index} (stage {spec.pp_rank}, tensor {spec.tp_rank}, process {self.process.pid})"

    def send(self, message: Message, timeout_s: float, descriptors: Sequence[int] = ()) -> None:
        """Send a message; see :func:`baton.engine.executor.messages.send_message`."""
        send_message(self.channel, message, deadline=time.monotonic() + timeout_s, descriptors=descriptors)

    def death_error(self) -> ExecutorLostError:
        """Return an error that says how it ended; a closed channel announces its end."""
        code = self.process.wait(END_TIMEOUT_S)
        if code is None:
            return ExecutorLostError(f"{self.name} does not answer")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return ExecutorLostError(f"{self.name} {how}")


def watch_followers(followers: Sequence[FollowerProcess], stop: int, dead: Callable[[FollowerProcess], None]) -> None:
    """Wait until a follower dies, or the other end of a pipe is closed; without using the processor.

    Args:
        followers: The processes to watch.
        stop: The pipe's end to read from, which this function closes.
        dead: Called with the first one that dies.
    """
    waits: dict[int, FollowerProcess] = {}
    try:
        poll = select.poll()
        poll.register(stop, select.POLLIN)
        for follower in followers:
            with contextlib.suppress(ProcessLookupError):  # dead already: its channel reports it
                descriptor = os.pidfd_open(follower.process.pid)
                waits[descriptor] = follower
                poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll()]
        if stop not in ready:
            dead(waits[ready[0]])
    finally:
        for descriptor in (*waits, stop):
            os.close(descriptor)


def end_followers(followers: Sequence[FollowerProcess], stop_watching: int | None = None) -> None:
    """Kill followers, which have nothing to save and may be in the middle of a step, and wait for their end.

    Args:
        followers: The processes to end.
        stop_watching: The pipe's end whose other one :func:`watch_followers` has; closed first.
    """
    if stop_watching is not None:
        os.close(stop_watching)
    for follower in followers:
        follower.channel.close()
        follower.process.send_signal(signal.SIGKILL)
    for follower in followers:
        follower.process.wait()


class MultiprocessExecutor(InProcessExecutor):
    """Runs rank 0 in this process and every other rank in a child process."""

    takes_chosen = False

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._generation = 0
        self._request = 0
        self._open_requests = True  # to load
        self._buffer: StepBuffer | None = None
        self._lost: ExecutorLostError | None = None
        self._on_lost: Callable[[ExecutorLostError], None] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._followers: list[FollowerProcess] = []
        self._watcher: threading.Thread | None = None
        # Also when close is never called: at the interpreter's end at the latest.
        self._end = weakref.finalize(self, end_followers, self._followers)

    def load(self) -> None:
        """Load the model on all ranks, at the same time."""
        if len(self.shards) == 1:
            raise ConfigError("executor multiprocess needs tp or pp above 1", field="executor")
        for spec in self.shards[1:]:
            self._followers.append(FollowerProcess(spec, self.config))
        self._start_watching()
        self._load()

    def _start_watching(self) -> None:
        stop, stop_watching = os.pipe()
        self._end.detach()
        self._end = weakref.finalize(self, end_followers, self._followers, stop_watching)
        this = weakref.ref(self)

        def report(dead: FollowerProcess) -> None:
            if (executor := this()) is not None:
                executor.follower_died(dead)

        watch = partial(watch_followers, tuple(self._followers), stop, report)
        self._watcher = BackgroundThread("ranks", watch, restart=False)
        self._watcher.start()

    def _join_ranks(self) -> None:
        """Wait until every follower has loaded its share, and bring all ranks together.

        Raises:
            ConfigError: A follower cannot work like that.
            ExecutorLostError: A follower died.
        """
        self._collect_answers(LOAD_TIMEOUT_S)
        self._buffer = StepBuffer.create(self.config, self.max_model_len, self.layout.num_groups)
        self.ask({"do": "map_steps"}, descriptors=[(self._buffer.fd,)] * len(self._followers))
        self._connect_ranks()

    def bind(self, shards: KVShards) -> None:
        """Bind this rank's arena, and give every follower its own; all capture steps at the same time."""
        arenas = shards.arenas[1 : len(self.shards)]
        exported = [arena.export() if isinstance(arena, SharedDeviceArena) else None for arena in arenas]
        fds = [arena.fd if handle is None else handle[1] for arena, handle in zip(arenas, exported, strict=True)]
        message: Message = {"do": "bind", "handles": [handle[0].hex() if handle else "" for handle in exported]}
        try:
            self._run_on_all_ranks(message, partial(super().bind, shards), [(fd,) for fd in fds])
        finally:
            for handle in exported:
                if handle is not None:
                    os.close(handle[1])

    def graph_bytes(self) -> int:
        """Measure what captured decode steps take, on all ranks at the same time: they are captured together."""
        if not self.compute.is_cuda:
            return 0
        own_bytes, answers = self._run_on_all_ranks({"do": "graph_bytes"}, super().graph_bytes)
        return max(own_bytes, *(int(answer["bytes"]) for answer in answers))

    def peak_bytes(self, num_tokens: int) -> list[int]:
        self.ask({"do": "measure"})
        own_bytes = super().peak_bytes(num_tokens)
        return [*own_bytes, *(int(answer["bytes"]) for answer in self.ask({"do": "measured"}))]

    def _run_on_all_ranks(
        self,
        message: Message,
        call: Callable[[], ResultT],
        descriptors: Sequence[Sequence[int]] = (),
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> tuple[ResultT, list[Message]]:
        """Have all followers do something while this rank does it, in which ranks wait for each other.

        Raises:
            ConfigError, InternalError: A rank could not; it may go well the next time.
            ExecutorLostError: A follower died.
        """
        if not self.communicator.connected:
            self._connect_ranks()
        try:
            self._send(message, descriptors)
            return call(), self._collect_answers(timeout_s)
        except Exception as error:
            self.communicator.disconnect()  # ranks that wait for this one fail now, and answer
            raise (error if isinstance(error, ConfigError) else self._cause_of(error)) from error
        except BaseException:
            # Interrupted: answers that are still to come will be passed over by their number.
            self.communicator.disconnect()
            raise

    def ask(self, message: Message, *, descriptors: Sequence[Sequence[int]] = ()) -> list[Message]:
        """Have all followers do something, and return their answers.

        Args:
            message: Request to all followers.
            descriptors: File descriptors for each follower.

        Raises:
            ConfigError, InternalError: A follower could not.
            ExecutorLostError: A follower died.
        """
        self._send(message, descriptors)
        try:
            return self._collect_answers(STEP_TIMEOUT_S)
        except BaseException:
            self.communicator.disconnect()  # as the one that failed did
            raise

    def _use_path(self, path: ExecutionPath) -> str:
        answers = self.ask({"do": "use", "path": path})
        return next((why for why in (super()._use_path(path), *(answer["why"] for answer in answers)) if why), "")

    def _run(
        self, batch: ForwardBatch, scratch_blocks: int = 0, offset: int = 0, *, stored: bool = False
    ) -> ForwardOutput:
        """Run a step on all ranks; see :meth:`_run_on_all_ranks`."""
        if self._buffer is None:
            raise InternalError("a step before the ranks have met")
        self._buffer.write(batch)
        message = {"do": "step", "scratch_blocks": scratch_blocks, "offset": offset, "stored": stored}
        run_here = partial(super()._run, batch, scratch_blocks, offset, stored=stored)
        return self._run_on_all_ranks(message, run_here, timeout_s=STEP_TIMEOUT_S)[0]

    def move_kv(self, moves: KVMoves) -> None:
        self._send({"do": "move", "sources": moves.sources.tolist(), "targets": moves.targets.tolist()})
        super().move_kv(moves)
        self._collect_answers(STEP_TIMEOUT_S)

    def _cause_of(self, error: Exception) -> BatonError:
        """Return the error to raise for a step that failed: a death, else a cause, else what was noticed here."""
        if isinstance(error, BatonError):
            local_error = error
        else:
            local_error = InternalError(f"rank 0: {type(error).__name__}: {error}")
        if self._open_requests and not isinstance(error, ExecutorLostError):
            try:
                self._collect_answers(STEP_TIMEOUT_S)
            except BatonError as remote_error:
                return min(remote_error, local_error, key=_error_rank)
        return local_error

    def watch(self, on_lost: Callable[[ExecutorLostError], None]) -> None:
        """Have a function called when a follower dies, in a thread of its own; at once if one has."""
        with self._lock:
            self._on_lost = on_lost
            lost = self._lost
        if lost is not None:
            on_lost(lost)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.communicator.disconnect()
        self._end()
        if self._watcher is not None and threading.current_thread() is not self._watcher:
            self._watcher.join()
        if self._buffer is not None:
            self._buffer.close()

    def _connect_ranks(self) -> None:
        """Connect all ranks with each other, replacing earlier connections."""
        self._generation += 1
        rendezvous = Rendezvous()
        self._send({"do": "connect", "port": rendezvous.port, "generation": self._generation})
        try:
            self.communicator.connect(rendezvous, self._generation)
        except RuntimeError as error:
            self.communicator.disconnect()
            self._collect_answers(CONNECT_TIMEOUT_S + END_TIMEOUT_S)
            raise InternalError(f"the ranks did not find each other: {error}") from error
        self._collect_answers(CONNECT_TIMEOUT_S + END_TIMEOUT_S)

    def _send(self, message: Message, descriptors: Sequence[Sequence[int]] = ()) -> None:
        if self._lost is not None:
            raise self._lost
        if self._closed:
            raise InternalError("the engine was closed")
        self._request += 1
        self._open_requests = True
        for index, follower in enumerate(self._followers):
            try:
                follower.send(
                    {**message, "request": self._request}, STEP_TIMEOUT_S, descriptors[index] if descriptors else ()
                )
            except ChannelClosedError:
                raise self._note_loss(follower.death_error()) from None

    def _collect_answers(self, timeout_s: float) -> list[Message]:
        """Take one answer of every follower, and raise the first error among them once all are there."""
        deadline = time.monotonic() + timeout_s
        answers: list[Message] = []
        errors: list[BatonError] = []
        for follower in self._followers:
            try:
                answer = self._receive_answer(follower, deadline)
            except ChannelClosedError:
                errors.append(self._note_loss(follower.death_error()))
            except InternalError as error:
                errors.append(self._note_loss(ExecutorLostError(f"{follower.name}: {error.message}")))
            else:
                if "error" in answer:
                    errors.append(error_from_message(answer, follower.spec.index))
                answers.append(answer)
        self._open_requests = False
        if errors:
            raise min(errors, key=_error_rank)
        return answers

    def _receive_answer(self, follower: FollowerProcess, deadline: float) -> Message:
        """Take the answer to the last request; those to earlier ones, which were interrupted, are passed over."""
        while True:
            answer, _ = recv_message(follower.channel, deadline=deadline)
            if answer.get("request") == self._request:
                return answer

    def _note_loss(self, lost: ExecutorLostError) -> ExecutorLostError:
        """Note that a rank is gone; returns the first loss there was."""
        with self._lock:
            self._lost = self._lost or lost
            return self._lost

    def follower_died(self, follower: FollowerProcess) -> None:
        """Note that a follower has died; called by the watching thread."""
        lost = self._note_loss(follower.death_error())
        if self.compute.is_cuda:
            self.communicator.disconnect()  # the step in flight would wait on the device for ever
        with self._lock:
            on_lost = self._on_lost
            closed = self._closed
        if not closed and on_lost is not None:
            on_lost(lost)


def _error_rank(error: BatonError) -> int:
    """Order in which errors are reported: a death, a cause, then errors of ranks that only noticed."""
    return 0 if isinstance(error, ExecutorLostError) else 2 if is_disconnect(error) else 1
