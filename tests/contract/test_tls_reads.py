"""KV over TLS: who is let in, what a listener on the way sees, and when ``auto`` means it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.servers.certificates import Authority
from tests.support.transport.transport_faults import Proxy
from tests.support.transport.transport_rig import PRINT, Rig, certificates, connect_raw, soon

from baton.errors import BatonError, ConfigError, PipeClosedError, UnauthenticatedError
from baton.kv_transfer.blocks import BlockFetcher, BlockSource, Endpoint, LinkOptions
from baton.kv_transfer.pipes.registry import resolve_kinds
from baton.kv_transfer.streams import Wait
from baton.rpc.tls import Tls


def fetch(rig: Rig, tls: Tls, address: str = "") -> bool:
    """Fetch block 3 with these certificates; returns whether it came as it is."""
    source = rig.server.source
    if address:
        source = BlockSource(
            source.instance_id, source.epoch, (Endpoint("tls", address),), source.fingerprint, source.num_blocks
        )
    fetcher = BlockFetcher(rig.target, PRINT, kinds=("tls",), links=LinkOptions(tls=tls))
    try:
        result = fetcher.fetch(source, [3], rig.source_arena.generations[[3]], [5], deadline=soon(240))
        return bool(result.valid.all()) and rig.same([3], [5])
    finally:
        fetcher.close()


def test_only_certificates_of_the_same_authority_get_in(tmp_path: Path) -> None:
    rig = Rig("tls")
    foreign = Authority(tmp_path / "other").issue("foreign")
    with pytest.raises(UnauthenticatedError, match="certificates don't hold"):
        fetch(rig, Tls(foreign.cert, foreign.key, foreign.ca))
    assert fetch(rig, certificates())
    rig.close()


def test_the_reader_is_refused_where_only_the_server_holds(tmp_path: Path) -> None:
    """A reader that believes the server's authority, but was certified by another."""
    root = tmp_path / "other"
    foreign = Authority(root).issue("foreign")
    served = Authority(tmp_path / "served").issue("served")
    both = tmp_path / "both.pem"
    both.write_text(Path(foreign.ca).read_text() + Path(served.ca).read_text())
    rig = Rig("tls")
    server = rig.serve(tls=Tls(served.cert, served.key, served.ca))
    with pytest.raises(UnauthenticatedError):
        fetch(rig, Tls(foreign.cert, foreign.key, str(both)), server.endpoints[0].address)
    server.close()
    rig.close()


def test_the_servers_certificate_must_have_the_host_that_was_dialled(tmp_path: Path) -> None:
    rig = Rig("tls")
    made = Authority(tmp_path / "named").issue("named", names="DNS:kv.example")
    server = rig.serve(tls=Tls(made.cert, made.key, made.ca))
    address = server.endpoints[0].address
    with pytest.raises(UnauthenticatedError, match=r"127\.0\.0\.1"):
        fetch(rig, Tls(made.cert, made.key, made.ca), address)
    assert fetch(rig, Tls(made.cert, made.key, made.ca, name="kv.example"), address)
    server.close()
    rig.close()


def test_nothing_can_be_read_on_the_way() -> None:
    rig = Rig("tls")
    secret = np.frombuffer(b"the KV of somebody's prompt" * 40, np.uint8)
    rig.source_arena.blocks[3, : len(secret)] = secret
    seen = bytearray()

    def see(at: int, data: bytes) -> bytes:
        seen.extend(data)
        return data

    proxy = Proxy(rig.server.endpoints[0].address, see, asked=see)
    assert fetch(rig, certificates(), proxy.address)
    proxy.close()
    assert len(seen) > rig.target.blocks.shape[1]
    for word in (b"somebody", b"BTNP", b"nonce"):
        assert word not in seen
    rig.close()


def test_a_peer_without_tls_is_sent_away() -> None:
    rig = Rig("tls")
    stream = connect_raw("tcp", rig.server.endpoints[0].address)
    stream.send_all([b"BTNP and so on, in the clear"], Wait(soon()), "talking")
    with pytest.raises(BatonError):
        stream.recv_exact(1 << 20, Wait(soon()), "listening")
    stream.close()
    deadline = time.monotonic() + 240
    while rig.server.num_connections():
        assert time.monotonic() < deadline
    plain = Rig("tcp")
    with pytest.raises(PipeClosedError, match="TLS"):
        fetch(rig, certificates(), plain.server.endpoints[0].address)
    plain.close()
    assert fetch(rig, certificates())
    rig.close()


def test_auto_is_encrypted_where_there_are_certificates() -> None:
    assert resolve_kinds("auto", LinkOptions(tls=certificates())) == ("shm", "tls")
    with pytest.raises(ConfigError, match="--tls-cert") as caught:
        resolve_kinds(("shm", "tls"))
    assert caught.value.field == "pipes"
