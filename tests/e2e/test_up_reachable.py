"""``baton up --host 0.0.0.0``: other addresses than 127.0.0.1 reach the router alone; an instance there joins it."""

from __future__ import annotations

import re
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.support.servers.up import running_up

from baton import Client

pytestmark = pytest.mark.slow

ELSEWHERE = "127.0.0.2"
"""Reached only by what listens on it, or on all addresses: services on 127.0.0.1 do not."""
KEY = "sk-tenant"


def test_the_router_is_reached_from_elsewhere_and_the_services_are_not(model: str, tmp_path: Path) -> None:
    keys, token = tmp_path / "keys", tmp_path / "token"
    for path, text in ((keys, KEY), (token, secrets.token_hex(32))):
        path.touch(mode=0o600)
        path.write_text(text)
    words = ["--ratio", "0P1D", "--host", "0.0.0.0", "--api-keys", str(keys), "--token-file", str(token)]
    with running_up(*words, "--model", model, "--kv-blocks", "200") as running:
        url, grpc = (address.replace("127.0.0.1", ELSEWHERE) for address in (running.url, running.grpc))
        body = {"model": "baton-tiny", "prompt": "def main():", "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=240).status_code == 401
        with httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=240) as client:
            assert client.post(f"{url}/v1/completions", json=body).status_code == 200
            for port in re.findall(r"127\.0\.0\.1:(\d+)", "".join(running.lines).partition("Baton is up")[2]):
                if not running.url.endswith(port) and not running.grpc.endswith(port):
                    with pytest.raises(ConnectionRefusedError):
                        socket.create_connection((ELSEWHERE, int(port)))
            flags = ["--host", ELSEWHERE, "--routers", grpc, "--token-file", str(token), "--instance-id", "elsewhere"]
            command = [sys.executable, "-m", "baton_decode.main", *flags, "--model", model, "--kv-blocks", "200"]
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as instance:
                assert instance.stderr is not None
                try:
                    next(line for line in instance.stderr if "registered" in line)
                    with Client(grpc, token_file=str(token)) as sdk:
                        known = {each.instance_id: each for each in sdk.list_instances()}
                        assert known["elsewhere"].address.startswith(ELSEWHERE)
                        sdk.drain("decode-0", wait=10, migrate=True)
                    answer = client.post(f"{url}/v1/completions", json=body)
                    assert answer.status_code == 200
                    assert answer.headers["x-baton-decode-instance"] == "elsewhere"
                finally:
                    instance.terminate()
                    instance.communicate(timeout=240)
