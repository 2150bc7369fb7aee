"""Every store of files and batches: records, parts, results, leases, and what a second process sees."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from starlette.requests import Request
from tests.support.servers.redis_server import RedisServer, missing_redis

from baton.errors import ConfigError, QueueFullError, UnavailableError
from baton_router.frontend.batches.endpoints import BatchEndpoints, BatchLimits
from baton_router.frontend.batches.redis_store import RedisBatchStore
from baton_router.frontend.batches.schemas import CreateBatchBody
from baton_router.frontend.batches.sqlite_store import SqliteBatchStore
from baton_router.frontend.batches.store import (
    BATCH_PREFIX,
    FILE_PREFIX,
    PART_BYTES,
    BatchRecord,
    BatchStore,
    FileRecord,
    LineResult,
    measure_tenant,
    read_content,
)

missing = missing_redis()
Opener = Callable[[], BatchStore]


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.skipif(bool(missing), reason=str(missing)))])
async def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opener]:
    """Opens the same store as another process would."""
    opened: list[BatchStore] = []
    server = RedisServer() if request.param == "redis" else None
    if server is not None:
        await server.start()

    def open_store() -> BatchStore:
        opened.append(SqliteBatchStore(tmp_path / "b") if server is None else RedisBatchStore(server.url, "baton"))
        return opened[-1]

    yield open_store
    for each in opened:
        await each.close()
    if server is not None:
        await server.kill()


@pytest.fixture
def store(reopen: Opener) -> BatchStore:
    return reopen()


def file(ident: str, tenant: str = "a", **fields: object) -> FileRecord:
    values = {"filename": "x.jsonl", "purpose": "batch", "status": "processed", "size": 3, "created_at": 10}
    return FileRecord(id=f"file-{ident}", tenant=tenant, **{**values, "removed_at": 100, **fields})  # type: ignore[arg-type]


def batch(ident: str, status: str = "validating", tenant: str = "a") -> BatchRecord:
    return BatchRecord(
        id=f"batch_{ident}",
        tenant=tenant,
        status=status,
        endpoint="/v1/completions",
        input_file_id="file-i",
        output_id=f"file-{ident}-o",
        error_id=f"file-{ident}-e",
        created_at=10,
        expires_at=20,
        removed_at=1000,
        metadata={"naïve": "ü"},
    )


async def content(store: BatchStore, ident: str) -> bytes:
    return b"".join([data async for data in read_content(store, ident)])


async def test_records_are_kept_by_tenant_in_their_order(store: BatchStore, reopen: Opener) -> None:
    for ident, tenant in (("3", "a"), ("1", "a"), ("2", "b")):
        assert await store.write_record(file(ident, tenant))
    assert await store.write_record(batch("x"))
    other = reopen()
    assert [x.id for x in await other.list_records(FILE_PREFIX, "a")] == ["file-3", "file-1"]
    assert [x.id for x in await other.list_records(BATCH_PREFIX, "a")] == ["batch_x"]
    assert await other.list_records(FILE_PREFIX, "") == []
    assert await other.get("batch_x") == batch("x")
    assert await other.get("file-9") is None
    assert await other.get("something") is None


async def test_a_record_changes_only_from_the_expected_status(store: BatchStore) -> None:
    assert await store.write_record(batch("x"))
    assert not await store.write_record(batch("x", "failed"))  # it is there already
    assert not await store.write_record(batch("x", "completed"), expected="in_progress")
    assert not await store.write_record(batch("y", "completed"), expected="in_progress")
    assert await store.write_record(batch("x", "in_progress"), expected="validating")
    changed = await store.get("batch_x")
    assert changed is not None
    assert changed.status == "in_progress"
    assert await store.get("batch_y") is None


async def test_open_batches_are_those_that_have_not_ended(store: BatchStore) -> None:
    for ident in "xyz":
        await store.write_record(batch(ident, tenant=ident))
    await store.write_record(batch("y", "failed", "y"), expected="validating")
    await store.write_record(batch("z", "cancelling", "z"), expected="validating")
    assert [(x.id, x.status) for x in await store.open_batches()] == [
        ("batch_x", "validating"),
        ("batch_z", "cancelling"),
    ]


async def test_content_is_the_parts_in_order(store: BatchStore) -> None:
    for number in range(1, 41):
        await store.write_part("file-p", number, b"%d\0\xff," % number)
    assert await content(store, "file-p") == b"".join(b"%d\0\xff," % number for number in range(1, 41))
    assert await store.measure("file-p") == (40, 9 * 4 + 31 * 5)
    assert await content(store, "file-q") == b""
    assert await store.measure("file-q") == (0, 0)


async def test_the_first_result_of_a_line_counts(store: BatchStore, reopen: Opener) -> None:
    x = batch("x")
    await store.write_record(x)
    await store.add_results(x, [LineResult(7, False, b"seven\n"), LineResult(2, True, b"two\n")])
    again = [LineResult(7, True, b"not seven\n"), LineResult(2, False, b"again\n"), LineResult(2, True, b"2\n")]
    await reopen().add_results(x, [*again, LineResult(3, False, b"three\n"), LineResult(100, False, b"last\n")])
    assert await content(store, x.output_id) == b"three\nseven\nlast\n"
    assert await content(store, x.error_id) == b"two\n"
    assert await store.part_numbers(x.output_id) == [3, 7, 100]
    assert await store.measure(x.output_id) == (3, 17)
    assert await store.measure(x.error_id) == (1, 4)


async def test_a_lease_is_one_routers_until_it_ends(store: BatchStore, reopen: Opener) -> None:
    other = reopen()
    assert await store.claim("batch_x", "one", 60)
    assert await store.claim("batch_x", "one", 60)
    assert not await other.claim("batch_x", "two", 60)
    await other.release("batch_x", "two")  # has no effect: it is not its own
    assert not await other.claim("batch_x", "two", 60)
    await store.release("batch_x", "one")
    assert await other.claim("batch_x", "two", 0.05)
    async with asyncio.timeout(60):
        while not await store.claim("batch_x", "one", 60):  # the other one has died
            await asyncio.sleep(0.01)


async def test_what_is_due_is_removed_with_its_content(store: BatchStore) -> None:
    await store.write_record(file("old", removed_at=50))
    await store.write_record(file("new", removed_at=51))
    await store.write_part("file-old", 1, b"abc")
    assert [x.id for x in await store.due_records(50)] == ["file-old"]
    await store.delete(file("old"))
    assert await store.get("file-old") is None
    assert await store.due_records(50) == []
    assert await content(store, "file-old") == b""
    assert [x.id for x in await store.list_records(FILE_PREFIX, "a")] == ["file-new"]
    assert await store.write_record(msgspec.structs.replace(file("new"), removed_at=70), expected="processed")
    assert await store.due_records(60) == []


async def test_only_the_owner_can_read_the_files(tmp_path: Path) -> None:
    store = SqliteBatchStore(tmp_path / "b")
    await store.write_record(file("1"))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "b").iterdir()}
    await store.close()
    assert set(modes.values()) == {0o600}
    assert len(modes) == 3  # the database, its log and the log's index
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("")
    with pytest.raises(ConfigError, match="cannot be kept") as raised:
        SqliteBatchStore(tmp_path / "b")
    assert raised.value.field == "batch_store"


@pytest.mark.skipif(bool(missing), reason=str(missing))
async def test_a_redis_that_is_away_is_an_error_to_try_again_after() -> None:
    server = RedisServer()
    store = RedisBatchStore(server.url, "baton")
    with pytest.raises(UnavailableError, match="store of batches"):
        await store.get("file-1")
    await store.close()


async def test_content_is_read_in_bounded_pieces(store: BatchStore) -> None:
    parts = [b"a" * 10, b"b" * (3 * PART_BYTES + 5), b"c" * PART_BYTES, b"d", b"", b"e" * (PART_BYTES - 1), b"f" * 7]
    for number, data in enumerate(parts):
        await store.write_part("file-p", number, data)
    pieces = [data async for data in read_content(store, "file-p")]
    assert b"".join(pieces) == b"".join(parts)
    assert max(map(len, pieces)) <= PART_BYTES
    assert await store.read_parts("file-p", [0, 1, 2], 4, 8) == [b"a" * 6, b"bb"]


async def test_old_batches_that_ended_make_room_and_a_list_reads_its_page_alone(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.write_record(file("i", ""))
    for at in range(9):
        await store.write_record(batch(str(at), "validating" if at == 0 else "failed", ""))
    await store.write_record(batch("other", "failed", "b"))
    await store.write_record(file("0-o", "", size=7))
    endpoints = BatchEndpoints(store, BatchLimits(ended_batches=4))
    body = CreateBatchBody(input_file_id="file-i", endpoint="/v1/completions", completion_window="24h")
    created = (await endpoints.create(body, None))["id"]
    assert list(await store.batch_states("")) == ["batch_0", "batch_6", "batch_7", "batch_8", created]
    assert list(await store.batch_states("b")) == ["batch_other"]
    assert await store.get("file-0-o") is not None
    read: list[str] = []
    get = store.get

    async def counting(ident: str) -> object:
        read.append(ident)
        return await get(ident)

    monkeypatch.setattr(store, "get", counting)
    request = Request({"type": "http", "headers": [], "query_string": b"limit=2&after=" + created.encode()})
    answer = msgspec.json.decode((await endpoints.list_batches(request)).body)
    assert [x["id"] for x in answer["data"]] == ["batch_8", "batch_7"] == read
    assert answer["has_more"]


async def test_a_tenant_without_room_starts_no_batch(store: BatchStore) -> None:
    await store.write_record(file("i", "", size=50))
    body = CreateBatchBody(input_file_id="file-i", endpoint="/v1/completions", completion_window="24h")
    for limits in (BatchLimits(tenant_bytes=49), BatchLimits(files=1)):
        with pytest.raises(QueueFullError, match="delete some"):
            await BatchEndpoints(store, limits).create(body, None)
    assert await store.batch_states("") == {}
    await store.write_record(batch("x", tenant=""))
    await store.add_results(batch("x"), [LineResult(1, False, b"12345"), LineResult(2, True, b"67")])
    assert await measure_tenant(store, "") == 57


async def test_it_may_be_closed_again(store: BatchStore) -> None:
    """The fixture closes it once more."""
    await store.close()
