"""Every store of files and batches: records, parts, results, leases, and what a second process sees."""

from __future__ import annotations

import asyncio
import random
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from tests.support.servers.redis_server import RedisServer, missing_redis

from baton.errors import ConfigError, InvalidRequestError, QueueFullError, UnavailableError
from baton_router.frontend.batches.endpoints import BatchEndpoints, BatchLimits
from baton_router.frontend.batches.redis_store import RedisBatchStore
from baton_router.frontend.batches.schemas import CreateBatchBody
from baton_router.frontend.batches.sqlite_store import SqliteBatchStore
from baton_router.frontend.batches.store import (
    BATCH_PREFIX,
    FILE_PREFIX,
    LINE_PARTS,
    PART_BYTES,
    BatchRecord,
    BatchStore,
    FileRecord,
    LineResult,
    RecordReader,
    Usage,
    encode_record,
    read_content,
)

missing = missing_redis()
Opener = Callable[[], BatchStore]
WRONG_VALUES = st.none() | st.booleans() | st.integers(-9, 2**70) | st.text() | st.lists(st.integers(), max_size=2)


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
    assert (await store.measure("file-p")).size == 9 * 4 + 31 * 5
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
    assert await store.part_numbers(x.output_id) == [line * LINE_PARTS for line in (3, 7, 100)]
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
    parts = [b"a" * 10, b"b" * PART_BYTES, b"c" * PART_BYTES, b"d", b"", b"e" * (PART_BYTES - 1), b"f" * 7]
    for number, data in enumerate(parts):
        await store.write_part("file-p", number, data)
    pieces = [data async for data in read_content(store, "file-p")]
    assert b"".join(pieces) == b"".join(parts)
    assert max(map(len, pieces)) <= PART_BYTES
    assert await store.read_parts("file-p", [3, 4, 5, 6]) == parts[3:6]


async def test_a_large_line_is_kept_in_parts(store: BatchStore) -> None:
    x = batch("x")
    await store.write_record(x)
    large = [random.Random(seed).randbytes(size) for seed, size in enumerate((10_000_000, 2 * PART_BYTES))]
    results = [LineResult(9, False, large[1]), LineResult(4, False, large[0]), LineResult(5, True, b"5")]
    await store.add_results(x, [*results, LineResult(8, False, b"8")])
    again = [LineResult(4, True, large[1]), LineResult(4, False, large[1]), LineResult(5, False, large[1])]
    await store.add_results(x, again)
    numbers = await store.part_numbers(x.output_id)
    assert {number // LINE_PARTS for number in numbers} == {4, 8, 9}
    for number in numbers:  # nothing larger has to be read for a piece
        (part,) = await store.read_parts(x.output_id, [number])
        assert len(part) <= PART_BYTES
    pieces = [data async for data in read_content(store, x.output_id)]
    assert b"".join(pieces) == large[0] + b"8" + large[1]
    assert max(map(len, pieces)) <= PART_BYTES
    assert await store.measure(x.output_id) == (3, len(large[0]) + 1 + len(large[1]))
    assert await store.measure(x.error_id) == (1, 1)


def form(content: bytes, *fields: tuple[str, str]) -> Request:
    """An upload of a file."""
    parts = [f'--B\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields]
    head = '--B\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    body = "".join([*parts, head]).encode() + content + b"\r\n--B--\r\n"

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"multipart/form-data; boundary=B")]
    return Request({"type": "http", "method": "POST", "headers": headers, "query_string": b""}, receive)


async def outcomes(calls: Iterable[Awaitable[object]]) -> int:
    """Return how many calls at once pass; the others must find no room."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    refused = [x for x in answers if isinstance(x, QueueFullError)]
    assert [x for x in answers if isinstance(x, BaseException) and x not in refused] == []
    return len(answers) - len(refused)


@pytest.mark.parametrize("limits", [BatchLimits(files=3), BatchLimits(tenant_bytes=39)], ids=["files", "bytes"])
async def test_uploads_at_once_do_not_pass_the_bounds(reopen: Opener, limits: BatchLimits) -> None:
    routers = [BatchEndpoints(reopen(), limits) for _ in range(2)]
    uploads = [routers[at % 2].serve_files(form(b"0123456789", ("purpose", "batch"))) for at in range(50)]
    assert await outcomes(uploads) == 3
    assert await reopen().usage("") == (3, 30, 0)


async def test_batches_created_at_once_do_not_pass_the_bound(reopen: Opener) -> None:
    await reopen().write_record(file("i", ""))
    routers = [BatchEndpoints(reopen(), BatchLimits(batches=3)) for _ in range(2)]
    body = CreateBatchBody(input_file_id="file-i", endpoint="/v1/completions", completion_window="24h")
    assert await outcomes(routers[at % 2].create(body, None) for at in range(50)) == 3
    assert (await reopen().usage("")).batches == 3


async def test_results_count_where_files_do(store: BatchStore) -> None:
    x = batch("x")
    await store.write_record(x)
    await store.write_record(file("other", "b", size=100))
    await store.add_results(x, [LineResult(1, False, b"12345"), LineResult(2, True, b"67")])
    assert await store.usage("a") == (0, 7, 1)
    await store.write_record(file("x-o", size=5))
    await store.write_record(msgspec.structs.replace(x, status="completed"), expected="validating")
    assert await store.usage("a") == (1, 5, 0)
    with pytest.raises(QueueFullError, match="1 files already"):
        await store.write_record(file("y"), bounds=Usage(1, 100, 0))
    with pytest.raises(QueueFullError, match="8 bytes with this, of at most 7"):
        await store.write_record(file("y"), bounds=Usage(2, 7, 0))
    assert await store.write_record(file("y"), bounds=Usage(2, 8, 0))
    with pytest.raises(QueueFullError, match="0 batches have not ended"):
        await store.write_record(batch("y"), bounds=Usage(3, 8, 0))


@pytest.mark.parametrize("name", ["purpose", "expires_after[anchor]", "anything"])
async def test_a_field_of_a_form_is_given_once(store: BatchStore, name: str) -> None:
    request = form(b"{}", ("purpose", "batch"), *[(name, "batch")] * 2)
    with pytest.raises(InvalidRequestError, match="more than once") as raised:
        await BatchEndpoints(store, BatchLimits()).serve_files(request)
    assert raised.value.field == name
    assert (await store.usage("")).files == 0


WRONG = {
    "number": b"5",
    "list": b"[]",
    "cut": b'{"id": "batch_',
    "other-id": encode_record(batch("other")),
    **{
        name: msgspec.json.encode({**msgspec.to_builtins(batch(name)), **changes})
        for name, changes in {
            "tenant": {"tenant": 5},
            "status": {"status": "strange"},
            "metadata": {"metadata": [1]},
            "times": {"times": {"strange": 5}},
            "errors": {"errors": [{"code": 5}]},
            "created": {"created_at": "now"},
        }.items()
    },
}


async def overwrite(store: BatchStore, ident: str, body: bytes) -> None:
    """Damage a stored record."""
    if isinstance(store, RedisBatchStore):
        await store._redis.hset(store._key("record", ident), "body", body)
    else:
        assert isinstance(store, SqliteBatchStore)
        assert await store._change("UPDATE records SET body = ? WHERE id = ?", (body, ident))


async def test_a_record_that_cannot_be_read_is_left_out(store: BatchStore, caplog: pytest.LogCaptureFixture) -> None:
    for name, body in WRONG.items():
        await store.write_record(batch(name))
        await overwrite(store, f"batch_{name}", body)
    await store.write_record(file("wrong"))
    await overwrite(store, "file-wrong", b'{"id": "file-wrong", "size": "x"}')
    await store.write_record(batch("right"))
    await store.write_record(file("right"))
    for _ in range(2):
        assert [x.id for x in await store.open_batches()] == ["batch_right"]
        assert [x.id for x in await store.list_records(BATCH_PREFIX, "a")] == ["batch_right"]
        assert [x.id for x in await store.list_records(FILE_PREFIX, "a")] == ["file-right"]
        assert [await store.get(f"batch_{name}") for name in WRONG] == [None] * len(WRONG)
    for name in WRONG:
        assert sum(f"batch_{name} cannot be read" in x for x in caplog.messages) == 1
    assert [x.id for x in await store.due_records(1000)] == ["file-right", "batch_right"]
    assert list(await store.batch_states("a")) == ["batch_right"]  # what cannot be read goes when it is due


@given(st.dictionaries(st.sampled_from([x.name for x in msgspec.structs.fields(BatchRecord)]), WRONG_VALUES))
def test_whatever_a_record_has_it_is_read_or_left_out(changes: dict[str, object]) -> None:
    stored = {**msgspec.to_builtins(batch("x")), **changes}
    record = RecordReader().read("batch_x", msgspec.json.encode(stored))
    if record is not None:
        assert RecordReader().read("batch_x", encode_record(record)) == record


async def test_what_a_batch_keeps_goes_with_it(store: BatchStore) -> None:
    """A batch that never ended goes with its results; the files of one that ended are kept until they are due."""
    x = batch("x")
    await store.write_record(x)
    await store.add_results(x, [LineResult(1, False, b"12345"), LineResult(2, True, b"67")])
    await store.delete(x)
    assert await store.usage("a") == (0, 0, 0)
    await store.add_results(x, [LineResult(3, False, b"a router that learns of it late")])
    for ident in (x.output_id, x.error_id):
        assert await store.part_numbers(ident) == []
        assert await store.measure(ident) == (0, 0)
    y = batch("y")
    await store.write_record(y)
    await store.add_results(y, [LineResult(1, False, b"12345")])
    await store.write_record(file("y-o", size=5))
    ended = msgspec.structs.replace(y, status="completed")
    await store.write_record(ended, expected="validating")
    await store.delete(ended)
    assert await content(store, y.output_id) == b"12345"
    assert [x.id for x in await store.due_records(100)] == [y.output_id]
    await store.delete(file("y-o"))
    assert await content(store, y.output_id) == b""


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
    assert (await store.usage("")).size == 57


async def test_it_may_be_closed_again(store: BatchStore) -> None:
    """The fixture closes it once more."""
    await store.close()


async def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="others could change what is in") as caught:
        SqliteBatchStore(folder)
    assert caught.value.field == "batch_store"
    assert not list(folder.iterdir())
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    await SqliteBatchStore(tmp_path / "link").close()
