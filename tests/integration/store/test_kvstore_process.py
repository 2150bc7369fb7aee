"""The KV store as a process: how it begins, ends, complains, and what outlives kills of it."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest
from tests.support.servers.kvstore_service import BLOCK, KIND, WAIT_S, Instance, serving
from tests.support.transport.named_blocks import names

from baton.api.v1 import kvstore_pb2
from baton.rpc.convert import fingerprint_to_pb
from baton.rpc.server import free_port
from baton_kvstore.main import main


def test_the_process_serves_without_torch_and_ends_on_sigterm() -> None:
    port = free_port()
    script = (
        "import sys\nfrom baton_kvstore.main import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'baton.engine'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else code)\n"
    )
    argv = [sys.executable, "-c", script, "--port", str(port), "--capacity-bytes", "1000000"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    try:
        assert asyncio.run(serving(f"127.0.0.1:{port}"))
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, log
    assert f"listening on 127.0.0.1:{port}" in log


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--capacity-bytes", "0"], "capacity_bytes"),
        (["--pipes", "pigeon"], "pigeon"),
        (["--host", "0.0.0.0"], "--token-file"),
        (["--token-file", "/nowhere"], "/nowhere"),
        (["--default-lease-s", "61"], "default_lease_s"),
        (["--metrics-port", "70000"], "metrics_port"),
    ],
)
def test_a_configuration_that_cannot_work_ends_with_one_line(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("flag", ["--port", "--kv-port", "--metrics-port"])
def test_a_port_in_use_ends_with_one_line(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main([flag, str(taken.getsockname()[1])]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "in use" in error


async def test_a_durable_put_and_a_deletion_outlive_kills_of_the_process(tmp_path: Path) -> None:
    port = free_port()
    argv = [sys.executable, "-m", "baton_kvstore.main", "--port", str(port), "--capacity-bytes", str(6 * BLOCK)]
    argv += ["--disk-path", str(tmp_path / "kv"), "--disk-bytes", "8000000"]
    there: list[int] = []
    for first in (0, 100, 200):
        process = await asyncio.to_thread(subprocess.Popen, argv, stderr=subprocess.DEVNULL)
        try:
            assert await serving(f"127.0.0.1:{port}")
            instance = Instance(f"127.0.0.1:{port}")
            for label in there:
                answer = await instance.get(label)
                assert len(answer.block_ids) == 1, label
                assert (await instance.fetch(answer)).valid.all()
                assert instance.holds(names(label))
                released = kvstore_pb2.ReleaseRequest(lease_id=answer.lease_id)
                await instance.stub.Release(released, timeout=WAIT_S)
            assert (await instance.get(first - 50)).lease_id == 0
            hashes = names(*range(first, first + 12))
            instance.fill(hashes)
            response = await instance.stub.Put(instance.put_request(hashes, durable=True), timeout=WAIT_S)
            assert list(response.durable) == [True] * 12
            there += range(first, first + 12)
            await instance.put(first + 50)
            request = kvstore_pb2.DeleteRequest(fingerprint=fingerprint_to_pb(KIND), block_hashes=names(first + 50))
            assert (await instance.stub.Delete(request, timeout=WAIT_S)).num_deleted == 1
            load = [asyncio.ensure_future(instance.put(first + 60 + i)) for i in range(8)]
            await asyncio.wait(load, return_when=asyncio.FIRST_COMPLETED)
        finally:
            process.kill()
            process.wait()
        await asyncio.wait(load)
        assert load[0].exception() is None or isinstance(load[0].exception(), grpc.aio.AioRpcError)
        for task in load:
            task.exception()
        await instance.close()
