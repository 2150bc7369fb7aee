"""``baton health``, as a container probe calls it."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from baton.cli.main import main
from baton.rpc.server import GrpcServer
from baton.rpc.service_token import Token


@pytest.mark.parametrize("arguments", [["nowhere"], ["host:port"], [":1"], ["127.0.0.1:1", "--timeout-s", "0"]])
def test_arguments_that_cannot_work(arguments, capsys):
    assert main(["health", *arguments]) == 2
    assert "HOST:PORT" in capsys.readouterr().err


def test_nobody_there(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["health", address, "--timeout-s", "1"]) == 1
    assert capsys.readouterr().out == f"{address} refuses the connection: nothing listens there\n"


def test_nobody_answers(capsys):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert main(["health", address, "--timeout-s", "0.1", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["serving"], shown["reason"]) == (False, "does not answer within 0.1 s")


@pytest.mark.parametrize(("serving", "status"), [(True, 0), (False, 1)])
async def test_what_the_service_says(serving, status, capsys):
    """Without a token, although the server wants one: probes have none."""
    server = GrpcServer(host="127.0.0.1", port=0, services=["test"], token=Token("secret"))
    port, patient = await server.start(), ["--timeout-s", "240"]
    try:
        await server.set_serving(serving)
        assert await asyncio.to_thread(main, ["health", f"127.0.0.1:{port}", *patient]) == status
        assert await asyncio.to_thread(main, ["health", f"127.0.0.1:{port}", "--service", "liveness", *patient]) == 0
    finally:
        await server.stop(0)
    assert ("not serving" in capsys.readouterr().out.splitlines()[0]) is not serving
