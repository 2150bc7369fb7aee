"""The executor of several processes, as the leader sees it: starts the followers, leads them, notices their death.

Every request to the followers has a number, which each of them answers once. A rank that fails in the middle of a step
leaves its groups (:meth:`Communicator.disconnect`); before the next step all of them connect anew. A rank that dies
ends the instance: its part of the KV is lost.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from baton.config import EngineConfig
from baton.engine.communicator import CONNECT_TIMEOUT_S, STEP_TIMEOUT_S, Communicator, Rendezvous, is_disconnect
from baton.engine.executor.base import ExecutorLostError
from baton.engine.executor.in_process import InProcessExecutor
from baton.engine.executor.messages import (
    ChannelClosedError,
    Message,
    error_from_message,
    recv_message,
)
from baton.engine.executor.processes import END_TIMEOUT_S, FollowerProcess, end_followers, watch_followers
from baton.engine.executor.step_buffer import StepBuffer
from baton.engine.runner.input_batch import ForwardBatch, ForwardOutput
from baton.engine.runner.model_runner import ExecutionPath
from baton.errors import BatonError, ConfigError, InternalError
from baton.kv_cache.shards import KVShards

LOAD_TIMEOUT_S = 1800.0
"""How long a follower may take to load its share, after the leader has loaded its own."""


class MultiprocessExecutor(InProcessExecutor):
    """Runs rank 0 in this process and every other rank in a child process."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.communicator = Communicator(self.shards[0])
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
        self._load(self.communicator, self._wait_loaded)

    def _start_watching(self) -> None:
        stop, stop_watching = os.pipe()
        self._end.detach()
        self._end = weakref.finalize(self, end_followers, self._followers, stop_watching)
        this, followers = weakref.ref(self), list(self._followers)

        def watch() -> None:
            watch_followers(followers, stop, lambda dead: _report(this(), dead))

        self._watcher = threading.Thread(target=watch, name="ranks", daemon=True)
        self._watcher.start()

    def _wait_loaded(self, max_model_len: int) -> None:
        """Wait until every follower has loaded its share, and bring all ranks together.

        Raises:
            ConfigError: A follower cannot work like that.
            ExecutorLostError: A follower died.
        """
        self._answers(LOAD_TIMEOUT_S)
        self._buffer = StepBuffer.create(self.config, max_model_len)
        self.ask({"do": "map_steps"}, descriptors=[(self._buffer.fd,)] * len(self._followers))
        self._connect_ranks()

    def bind(self, shards: KVShards) -> None:
        """Bind this rank's arena, and give every follower its own."""
        super().bind(shards)
        self.ask({"do": "bind"}, descriptors=[(arena.fd,) for arena in shards.arenas[1:]])

    def ask(self, message: Message, *, descriptors: Sequence[Sequence[int]] = ()) -> list[Message]:
        """Have all followers do something, and return their answers.

        Args:
            message: What to do.
            descriptors: File descriptors for each follower.

        Raises:
            ConfigError, InternalError: A follower could not.
            ExecutorLostError: A follower died.
        """
        self._send(message, descriptors)
        try:
            return self._answers(STEP_TIMEOUT_S)
        except BaseException:
            self.communicator.disconnect()  # as the one that failed did
            raise

    def _use(self, path: ExecutionPath) -> str:
        answers = self.ask({"do": "use", "path": path})
        return next((why for why in (super()._use(path), *(answer["why"] for answer in answers)) if why), "")

    def _run(self, batch: ForwardBatch, scratch_blocks: int = 0) -> ForwardOutput:
        """Run a step on all ranks.

        Raises:
            InternalError: A rank failed; the next step may work.
            ExecutorLostError: A rank is gone.
        """
        if self._buffer is None:
            raise InternalError("a step before the ranks have met")
        if not self.communicator.connected:
            self._connect_ranks()
        self._buffer.write(batch)
        try:
            self._send({"do": "step", "scratch_blocks": scratch_blocks})
            output = super()._run(batch, scratch_blocks)
            self._answers(STEP_TIMEOUT_S)
        except Exception as error:
            self.communicator.disconnect()  # ranks that wait for this one fail now, and answer
            raise self._cause_of(error) from error
        except BaseException:
            # Interrupted: answers that are still to come will be passed over by their number.
            self.communicator.disconnect()
            raise
        return output

    def _cause_of(self, error: Exception) -> BatonError:
        """Return the error to raise for a step that failed: a death, else a cause, else what was noticed here."""
        mine = error if isinstance(error, BatonError) else InternalError(f"rank 0: {type(error).__name__}: {error}")
        if self._open_requests and not isinstance(error, ExecutorLostError):
            try:
                self._answers(STEP_TIMEOUT_S)
            except BatonError as theirs:
                return min(theirs, mine, key=_weight)
        return mine

    def watch(self, on_lost: Callable[[ExecutorLostError], None]) -> None:
        """Have a function called when a follower dies, in a thread of its own; at once if one has."""
        with self._lock:
            self._on_lost = on_lost
            lost = self._lost
        if lost is not None:
            on_lost(lost)

    def close(self) -> None:
        """End the followers and wait for their end; harmless if repeated."""
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
        """Connect all ranks with each other, anew if they were before."""
        self._generation += 1
        rendezvous = Rendezvous()
        self._send({"do": "connect", "port": rendezvous.port, "generation": self._generation})
        try:
            self.communicator.connect(rendezvous, self._generation)
        except RuntimeError as error:
            self.communicator.disconnect()
            self._answers(CONNECT_TIMEOUT_S + END_TIMEOUT_S)
            raise InternalError(f"the ranks did not find each other: {error}") from error
        self._answers(CONNECT_TIMEOUT_S + END_TIMEOUT_S)

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

    def _answers(self, timeout_s: float) -> list[Message]:
        """Take one answer of every follower, and raise the first error among them once all are there."""
        deadline = time.monotonic() + timeout_s
        answers: list[Message] = []
        errors: list[BatonError] = []
        for follower in self._followers:
            try:
                answer = self._answer_of(follower, deadline)
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
            raise min(errors, key=_weight)
        return answers

    def _answer_of(self, follower: FollowerProcess, deadline: float) -> Message:
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
        with self._lock:
            on_lost, closed = self._on_lost, self._closed
        if not closed and on_lost is not None:
            on_lost(lost)


def _weight(error: BatonError) -> int:
    """Order in which errors are reported: a death, a cause, then errors of ranks that only noticed."""
    return 0 if isinstance(error, ExecutorLostError) else 2 if is_disconnect(error) else 1


def _report(executor: MultiprocessExecutor | None, dead: FollowerProcess) -> None:
    if executor is not None:
        executor.follower_died(dead)
