"""Objects as a tier: whole or not there, and how few are asked for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.transport.named_blocks import name_of, names
from tests.support.transport.remote_tiers import BLOCK, KIND, WAIT_S, Place, place_of, value_of, write

from baton.errors import ConfigError
from baton_kvstore.tiers.object_backend import ObjectBackend
from baton_kvstore.tiers.redis_backend import RedisBackend, RedisOptions
from baton_kvstore.tiers.remote import HEADER_BYTES


async def test_objects_are_whole_or_not_there(tmp_path: Path) -> None:
    def work(place: Place) -> None:
        tier = place.tier()
        write(tier, *range(20))
        assert all(len(value) == HEADER_BYTES + BLOCK for value in place.keys().values())
        assert len(place.keys()) == 20
        folder = Path(place.root.removeprefix("file://"))
        for path in folder.rglob("*"):
            path.chmod(0o700)
        assert {path.name for path in folder.iterdir()} == {KIND.key.hex()}

    async with place_of("file", tmp_path) as place:
        await asyncio.to_thread(work, place)


def test_an_object_in_a_file_survives_a_crash_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ObjectBackend(f"file://{tmp_path}/objects", timeout_s=WAIT_S, requests=1)
    path = Path(backend._path(KIND, name_of(1)))
    right, synced = os.fsync, []

    def fsync(fd: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{fd}")), path.exists()))
        right(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    assert backend.write(KIND, names(1), [value_of(name_of(1))]) == [True]
    (file, was_there), *folders = synced
    assert file.name.startswith(path.name)
    assert not was_there
    assert folders == [(folder, True) for folder in list(path.parents)[:3]]
    backend.close()


async def test_a_lookup_asks_for_no_more_than_one_object_that_is_not_there(tmp_path: Path) -> None:
    async with place_of("file", tmp_path) as place:
        writer = await asyncio.to_thread(place.tier)
        await asyncio.to_thread(write, writer, *range(9))
        backend = place.backend()
        asked: list[str] = []
        exists = backend._fs.exists  # type: ignore[union-attr]

        def counted(path: str) -> bool:
            asked.append(path)
            return bool(exists(path))

        backend._fs.exists = counted  # type: ignore[union-attr]
        found = await asyncio.to_thread(backend.has, KIND, names("new", *range(9)))
        assert (found, len(asked)) == ([False] + [None] * 9, 1)
        found = await asyncio.to_thread(backend.has, KIND, names(*range(9), "new", "newer"))
        assert found == [True] * 9 + [False] * 2
        backend.close()


def test_a_missing_package_or_a_wrong_url_is_named() -> None:
    for url, word in (("nosuch://x", "nosuch"), ("s3-of-nobody://b", "s3-of-nobody")):
        with pytest.raises(ConfigError, match=word) as caught:
            ObjectBackend(url, timeout_s=1.0, requests=1)
        assert caught.value.field == "object_url"
    with pytest.raises(ConfigError, match="redis") as caught:
        RedisBackend(RedisOptions("http://nowhere", "p"))
    assert caught.value.field == "redis_url"
    assert "secret" not in repr(RedisOptions("redis://:secret@h:1/0", "p"))
    script = (
        "import sys; sys.modules['redis'] = sys.modules['fsspec'] = None\n"
        "from baton.errors import ConfigError\n"
        "from baton.config.kvstore import KVStoreConfig\n"
        "from baton_kvstore.tiers.open import open_chain\n"
        "for name, url in (('redis_url', 'redis://h:1'), ('object_url', 'memory://x')):\n"
        "    try:\n        open_chain(KVStoreConfig(**{name: url}))\n"
        "    except ConfigError as error:\n        print(error.field, error.message)\n"
    )
    lines = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "redis_url --redis-url needs" in lines
    assert "object_url --object-url needs" in lines
