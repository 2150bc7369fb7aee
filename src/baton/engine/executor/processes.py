"""Followers as processes: start, notice of their death, end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.config import EngineConfig
from baton.engine.communicator import CONNECT_TIMEOUT_S
from baton.engine.executor.base import ExecutorLostError
from baton.engine.executor.messages import ChannelClosedError, Message, open_channel, send_message
from baton.kv_cache.shards import ShardSpec

END_TIMEOUT_S = 10.0
"""How long (seconds) a process may take to end after its channel was closed."""


class Process(Protocol):
    """What is needed of a started process; ``subprocess.Popen`` is one."""

    @property
    def pid(self) -> int:
        """Process id."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns its status, negative for a signal, or raises ``subprocess.TimeoutExpired``."""

    def kill(self) -> None:
        """End it by SIGKILL."""


def start_follower(channel: socket.socket) -> Process:
    """Start a follower that serves the other end of a channel."""
    command = [sys.executable, "-m", "baton.engine.executor.follower", str(channel.fileno())]
    # A session of its own: a terminal's Ctrl-C reaches the leader alone, which may want to drain.
    return subprocess.Popen(command, pass_fds=[channel.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)


class FollowerProcess:
    """One follower's process and channel; it begins to load at once.

    Attributes:
        spec: Its rank.
        channel: The leader's end of the channel to it.
    """

    def __init__(self, spec: ShardSpec, config: EngineConfig) -> None:
        self.spec = spec
        self.channel, theirs = open_channel()
        try:
            self.process = start_follower(theirs)
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()
        with contextlib.suppress(
            ChannelClosedError
        ):  # then it died at once, which the wait for its first answer reports
            values = {"config": dataclasses.asdict(config), "shard": dataclasses.asdict(spec)}
            self.send({"request": 0, **values}, CONNECT_TIMEOUT_S)

    @property
    def name(self) -> str:
        """For errors and logs."""
        spec = self.spec
        return f"rank {spec.index} (stage {spec.pp_rank}, tensor {spec.tp_rank}, process {self.process.pid})"

    def send(self, message: Message, timeout_s: float, descriptors: Sequence[int] = ()) -> None:
        """Send a message; see :func:`baton.engine.executor.messages.send_message`."""
        send_message(self.channel, message, deadline=time.monotonic() + timeout_s, descriptors=descriptors)

    def death_error(self) -> ExecutorLostError:
        """Return an error that says how it ended; a closed channel announces its end."""
        try:
            code = self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
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
        follower.process.kill()
    for follower in followers:
        follower.process.wait()
