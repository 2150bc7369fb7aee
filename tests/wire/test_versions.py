"""What earlier releases say is understood, and they understand what this version says.

``tests/wire/VERSION.json`` is a release's recording (``record.py``): its descriptors, and a conversation with a real
decode instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from tests.support.router.world import World, run
from tests.support.servers.cluster import LocalCluster
from tests.wire.record import FILES, conversation, descriptors, engine_config, generate_request, unpacked

from baton.api.v1 import worker_pb2
from baton.rpc.channel import open_channel
from baton.rpc.convert import sampling_from_pb
from baton.rpc.server import GrpcServer
from baton.token_ids import unpack_ids
from baton.types import RequestId, Role
from baton.version import __version__
from baton_router.registry.instance import Status
from baton_router.types import RoutedRequest

RECORDINGS = sorted(Path(__file__).parent.glob("*.json"))
SERVICE = "baton.api.v1.WorkerService"
_DEPTH = 3


@dataclass(frozen=True)
class Release:
    """A recorded one."""

    document: dict[str, Any]

    @property
    def pool(self) -> descriptor_pool.DescriptorPool:
        found = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(unpacked(self.document["descriptors"])).file:
            found.Add(file)  # type: ignore[no-untyped-call]
        return found

    @property
    def files(self) -> list[descriptor_pb2.FileDescriptorProto]:
        return list(descriptor_pb2.FileDescriptorSet.FromString(unpacked(self.document["descriptors"])).file)


@pytest.fixture(params=RECORDINGS, ids=lambda path: path.stem)
def release(request: pytest.FixtureRequest) -> Release:
    return Release(json.loads(request.param.read_text()))


def messages(pool: descriptor_pool.DescriptorPool, files: list[str]) -> Iterator[Descriptor]:
    """Yield all messages, nested ones too."""
    left = [each for name in files for each in pool.FindFileByName(name).message_types_by_name.values()]
    while left:
        found = left.pop()
        left += found.nested_types
        if not found.GetOptions().map_entry:
            yield found


def filled(descriptor: Descriptor, depth: int = _DEPTH) -> Message:
    """Return a message that has a value in every field, of a choice in the last one."""
    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if field.message_type is not None and depth == 0:
            continue
        target = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            target[value_of(key)] = value_of(value)
        elif field.message_type is not None:
            part = filled(field.message_type, depth - 1)
            if field.is_repeated:
                target.append(part)
            else:
                target.CopyFrom(part)
        elif field.is_repeated:
            target.append(value_of(field))
        else:
            setattr(message, field.name, value_of(field))
    return message


def value_of(field: FieldDescriptor) -> Any:
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    kinds: dict[int, Callable[[int], Any]] = {
        FieldDescriptor.CPPTYPE_STRING: lambda n: (
            f"text {n}" if field.type == FieldDescriptor.TYPE_STRING else b"%d" % n
        ),
        FieldDescriptor.CPPTYPE_BOOL: lambda n: True,
        FieldDescriptor.CPPTYPE_DOUBLE: lambda n: n + 0.5,
        FieldDescriptor.CPPTYPE_FLOAT: lambda n: n + 0.5,
    }
    return kinds.get(field.cpp_type, lambda n: n)(field.number)


def test_this_version_is_recorded_or_comes_after_one_that_is() -> None:
    assert RECORDINGS
    assert any(path.stem.split(".")[0] == __version__.split(".")[0] for path in RECORDINGS)


def test_no_message_field_value_or_call_has_gone_or_changed(release: Release) -> None:
    new = {file.name: file for file in descriptors().file}
    for file in release.files:
        now = new[file.name]
        for service in file.service:
            methods = {each.name: each for each in next(x for x in now.service if x.name == service.name).method}
            for method in service.method:
                assert methods[method.name] == method, method.name
    pool, names = release.pool, [file.name for file in release.files]
    current = descriptor_pool.Default()  # type: ignore[no-untyped-call]
    for then in messages(pool, names):
        today = current.FindMessageTypeByName(then.full_name)
        for field in then.fields:
            same = today.fields_by_number.get(field.number)
            assert same is not None, f"{then.full_name}.{field.name} has gone: instances of this release send it"
            assert (same.name, same.type, same.is_repeated) == (field.name, field.type, field.is_repeated)
            if field.enum_type is not None:
                values = {value.name: value.number for value in same.enum_type.values}
                assert {value.name: value.number for value in field.enum_type.values}.items() <= values.items()


def test_what_either_says_the_other_reads(release: Release) -> None:
    pool, names = release.pool, [file.name for file in release.files]
    current = descriptor_pool.Default()  # type: ignore[no-untyped-call]
    for then in messages(pool, names):
        today = current.FindMessageTypeByName(then.full_name)
        old, new = message_factory.GetMessageClass(then), message_factory.GetMessageClass(today)
        said = filled(then)
        assert MessageToDict(new.FromString(said.SerializeToString())) == MessageToDict(said), then.full_name
        known = old.FromString(filled(today).SerializeToString())
        known.DiscardUnknownFields()
        assert {field.name for field, _ in known.ListFields()} == {
            field.name for field, _ in filled(today).ListFields() if field.number in then.fields_by_number
        }


class RecordedInstance:
    """Answers as an instance of a release did."""

    def __init__(self, conversation: dict[str, Any], version: str | None = None) -> None:
        self._info = unpacked(conversation["info"])
        if version is not None:
            info = worker_pb2.GetInfoResponse.FromString(self._info)
            info.version = version
            self._info = info.SerializeToString()
        self._streams = {name: unpacked(text) for name, text in conversation["streams"].items()}
        self._answers = [unpacked(answer) for answer in conversation["answers"]]
        self.asked: list[bytes] = []

    async def get_info(self, request: bytes, context: Any) -> bytes:
        return self._info

    async def generate_many(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            self.asked.append(request)
            for answer in self._answers:
                yield answer

    def stream(self, name: str) -> Callable[[bytes, Any], AsyncIterator[bytes]]:
        """Return a call that says what the instance said first, and then nothing more."""

        async def follow(request: bytes, context: Any) -> AsyncIterator[bytes]:
            yield self._streams[name]
            await asyncio.Event().wait()

        return follow

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        handlers = {
            "GetInfo": grpc.unary_unary_rpc_method_handler(self.get_info),
            "GenerateMany": grpc.stream_stream_rpc_method_handler(self.generate_many),
            "StreamLoad": grpc.unary_stream_rpc_method_handler(self.stream("StreamLoad")),
            "StreamKvEvents": grpc.unary_stream_rpc_method_handler(self.stream("StreamKvEvents")),
        }
        server = GrpcServer(host="127.0.0.1", port=0, services=[SERVICE])
        server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = await server.start()
        await server.set_serving(True)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        yield World(stack)


def asked_for(release: Release) -> RoutedRequest:
    recorded = worker_pb2.GenerateManyRequest.FromString(unpacked(release.document["decode"]["request"]))
    request = recorded.starts[0].request
    return RoutedRequest(
        RequestId(request.request_id), unpack_ids(request.prompt_token_ids), sampling_from_pb(request.sampling)
    )


def answered(conversation: dict[str, Any]) -> list[int]:
    tokens: list[int] = []
    for answer in conversation["answers"]:
        message = worker_pb2.GenerateManyResponse.FromString(unpacked(answer))
        tokens += message.token_ids
        tokens += [token for each in message.messages for delta in each.response.deltas for token in delta.token_ids]
    return tokens


async def test_todays_router_has_an_instance_of_the_release_generate(release: Release, world: World) -> None:
    instance = RecordedInstance(release.document["decode"])
    async with instance.serving() as address:
        router = await world.router(decode=(address,))
        await router.until(lambda: bool(router.registry.ready(Role.DECODE)))
        answer = await run(router, asked_for(release))
        assert answer.tokens[0] == answered(release.document["decode"])
        assert len(answer.tokens[0]) == 8
        assert router.dispatcher.num_in_flight == 0
        await router.registry.close()


async def test_a_release_too_far_away_is_refused_by_name(release: Release, world: World) -> None:
    async with RecordedInstance(release.document["decode"], version="9.0.0").serving() as address:
        router = await world.router(decode=(address,))
        await router.until(lambda: any(x.status is Status.REFUSED for x in router.registry.instances()))
        (instance,) = router.registry.instances()
        assert "version is '9.0.0'" in instance.reason
        assert router.metric("instance_refusals_total", field="version") == 1
        await router.registry.close()


async def test_an_instance_of_today_answers_a_router_of_the_release(release: Release) -> None:
    recorded = worker_pb2.GenerateManyRequest.FromString(unpacked(release.document["decode"]["request"]))
    async with LocalCluster(engine_config(), decode_pipes=(("tcp",),)) as cluster:
        theirs = answered(await conversation(cluster, recorded.starts[0].request))
        ours = answered(await conversation(cluster, generate_request()))
        assert theirs == ours == answered(release.document["decode"])
        await cluster.check_integrity()


def events(answers: list[bytes]) -> list[worker_pb2.PrefillResponse]:
    found = [worker_pb2.PrefillResponse.FromString(answer) for answer in answers]
    return [each for each in found if each.WhichOneof("event") != "queue"]


async def test_a_prefill_instance_of_today_serves_a_decode_instance_of_the_release(release: Release) -> None:
    recorded = release.document["prefill"]
    theirs = events([*map(unpacked, recorded["answers"])])
    async with LocalCluster(engine_config(), decode_pipes=(("tcp",),)) as cluster:
        ours: list[bytes] = []
        async with open_channel(cluster.prefill[0].address) as channel:
            call = channel.unary_stream(f"/{SERVICE}/Prefill")(unpacked(recorded["request"]))
            async for answer in call:
                ours.append(answer)
                if worker_pb2.PrefillResponse.FromString(answer).HasField("result"):
                    break
            call.cancel()
        await cluster.check_integrity()
    found = events(ours)
    assert found[-1].result.first_token_id == theirs[-1].result.first_token_id
    assert {each.WhichOneof("event") for each in found} == {"accepted", "offer", "result"}
    offered = [
        [block for each in said if not each.offer.HasField("ready") for block in each.offer.block_ids]
        for said in (found, theirs)
    ]
    assert len(offered[0]) == len(offered[1]) > 0


def test_all_files_of_the_wire_are_recorded() -> None:
    folder = Path(__file__).resolve().parents[2] / "protos/baton/api/v1"
    assert {Path(file.name).name for file in FILES} == {path.name for path in folder.glob("*.proto")}
