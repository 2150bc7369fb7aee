"""Taking over new API keys and certificates while a router runs."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

import pytest
from tests.support.servers.certificates import Authority, Certificate

from baton.rpc.tls import Tls
from baton_router.accounts import CredentialReload, FileAccounts


def content(path: str) -> str:
    return Path(path).read_text()


async def test_a_look_that_fails_is_not_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path / "authority")
    first, second = authority.issue("before"), authority.issue("after")
    files = Certificate(str(tmp_path / "cert"), str(tmp_path / "key"), first.ca)

    def put(cert: str, key: str) -> None:
        shutil.copy(cert, files.cert)
        shutil.copy(key, files.key)

    put(first.cert, first.key)
    shown = Tls(files.cert, files.key, files.ca)
    context = shown.http_context()
    (tmp_path / "keys").write_text("key\n")
    accounts = FileAccounts(str(tmp_path / "keys"), "", shared=False)
    renewal = CredentialReload(accounts, shown, context)
    refresh = shown.refresh

    def replaced_meanwhile() -> bool:
        found = refresh()
        put(second.cert, first.key)
        return found

    with monkeypatch.context() as patch:
        put(second.cert, second.key)
        patch.setattr(shown, "refresh", replaced_meanwhile)
        await renewal.look()
    put(second.cert, second.key)
    await renewal.look()
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context) as server:
        peer = await asyncio.to_thread(ssl.get_server_certificate, server.sockets[0].getsockname())
    assert content(second.cert).endswith(peer)

    def unforeseen() -> bool:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(accounts, "renew", unforeseen)
    put(first.cert, first.key)
    await renewal.look()
    assert renewal._shown == shown.generation
