"""The control line between a driver and its agents, and the agents' service of small messages."""

from __future__ import annotations

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from baton.errors import ConfigError, InvalidRequestError, PipeClosedError, TransferError
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.wire import BadFrameError
from baton.rpc.service_token import Token
from baton_bench.agents import MAX_CONTROL_BYTES, Agent, Line, Order, serve_orders
from baton_bench.kv.methods import MessageServer, MessageStream, recv_step, round_trips, send_schedule

S = 240.0


def soon() -> float:
    return time.monotonic() + S


def double(value: int) -> dict[str, int]:
    return {"value": 2 * value}


def refuse() -> dict[str, int]:
    raise ConfigError("no memory for that", field="isl")


ORDERS: dict[str, Order] = {"double": double, "refuse": refuse}


@pytest.fixture
def ends():
    """Both ends of a line, and what becomes of the agent that serves the second."""
    mine, theirs = socket.socketpair()
    line = Line(Stream(theirs, peer="driver"))
    with ThreadPoolExecutor(1) as pool:
        served: Future[None] = pool.submit(serve_orders, line, ORDERS)
        stream = Stream(mine, peer="agent")
        yield stream, served
        stream.close()
        line.close()


def test_orders_are_answered_in_turn(ends):
    stream, served = ends
    agent = Agent("agent", Line(stream))
    assert agent.ask("double", dict, S, value=4) == {"value": 8}
    for do in ("refuse", "nothing such"):
        with pytest.raises((ConfigError, BadFrameError)) as caught:
            agent.ask(do, dict, S)
        assert caught.value.field == {"refuse": "isl"}.get(do, "do")
    for fields in ({}, {"value": "4"}, {"value": 4, "more": 1}):
        with pytest.raises(BadFrameError):
            agent.ask("double", dict, S, **fields)
    assert agent.ask("double", dict, S, value=5) == {"value": 10}
    agent.close()
    assert isinstance(served.exception(S), PipeClosedError)


def test_an_agent_that_is_gone_is_named(ends):
    stream, served = ends
    agent = Agent("source 3", Line(stream))
    with pytest.raises(InvalidRequestError):
        agent.ask("double", dict, S, value="x" * MAX_CONTROL_BYTES)
    stream.send_all([b"null\n"], Wait(soon()), "sending")  # not an order
    assert isinstance(served.exception(S), BadFrameError)
    stream.sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(TransferError, match="source 3 is gone"):
        agent.ask("double", dict, S, value=1)


@pytest.mark.parametrize("data", [b"[1]", b"{", b"", b"\xff" * 100], ids=["list", "cut", "empty", "bytes"])
def test_what_is_no_order_ends_the_line(ends, data):
    stream, served = ends
    stream.send_all([data, b"\n"], Wait(soon()), "sending")
    assert isinstance(served.exception(S), BadFrameError)


def test_a_line_without_an_end_is_refused_at_the_bound(ends):
    stream, served = ends
    with pytest.raises(PipeClosedError):  # the other end hangs up while we send
        stream.send_all([b"x" * (64 * MAX_CONTROL_BYTES)], Wait(soon()), "sending")
    assert isinstance(served.exception(S), BadFrameError)


def test_orders_that_arrive_in_parts_or_together_are_told_apart(ends):
    stream, _ = ends
    line = Line(stream)
    for part in (b'{"do": "dou', b'ble", "value": 1}\n{"do": "double", "value": 2}', b"\n"):
        stream.send_all([part], Wait(soon()), "sending")
    assert [line.recv(S) for _ in range(2)] == [{"ok": {"value": 2}}, {"ok": {"value": 4}}]
    assert not line.has_received


def test_messages_come_back_and_schedules_are_followed():
    progress = list[int]()
    service = MessageServer("127.0.0.1", Token("secret"), progress.append)

    def connect():
        return MessageStream.connect(service.address, Token("secret"))

    try:
        with connect() as messages:
            assert len(round_trips(messages, 4096, 20, S)) == 20
            rows = [(0, 7, 1), (1_000_000, 8, 0), (2_000_000, 9, 1)]
            start = time.monotonic()
            send_schedule(messages, np.array(rows, dtype=np.int64))
            assert [recv_step(messages, deadline=soon()) for _ in range(2)] == [0, 2]
            assert time.monotonic() - start >= 0.002
            assert progress == [7, 8, 9]
            send_schedule(messages, np.array([(-1, 0, 0)], dtype=np.int64))
            with pytest.raises(PipeClosedError):
                recv_step(messages, deadline=soon())
        with connect() as messages:  # the others are served on
            assert len(round_trips(messages, 64, 1, S)) == 1
    finally:
        service.close()
