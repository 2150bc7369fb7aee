"""Records what this version says over the wire: its descriptors, and what a real instance was asked and answered.

    python -m tests.wire.record

Run at each release, before its version is raised: later ones are tested against ``tests/wire/VERSION.json``.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from tests.support.servers.cluster import LocalCluster

from baton.api.v1 import auth_pb2, common_pb2, events_pb2, kvstore_pb2, router_pb2, worker_pb2
from baton.config import EngineConfig
from baton.rpc.channel import open_channel
from baton.rpc.convert import sampling_to_pb
from baton.rpc.server import GrpcServer
from baton.token_ids import pack_ids
from baton.types import SamplingParams
from baton.version import __version__

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "models" / "baton-tiny"
FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR for module in (auth_pb2, common_pb2, events_pb2, worker_pb2, kvstore_pb2, router_pb2)
)
PROMPT = list(range(10, 90))
SERVICE = "/baton.api.v1.WorkerService/"


def packed(data: bytes) -> str:
    """Return bytes as the files have them."""
    return base64.b85encode(zlib.compress(data, 9)).decode()


def unpacked(text: str) -> bytes:
    """Return what :func:`packed` was given."""
    return zlib.decompress(base64.b85decode(text))


def descriptors() -> descriptor_pb2.FileDescriptorSet:
    """Return all of this version's."""
    found = descriptor_pb2.FileDescriptorSet()
    for file in FILES:
        file.CopyToProto(found.file.add())
    return found


def engine_config() -> EngineConfig:
    """Return what the recorded instances ran; from the repository's root the model has the same name everywhere."""
    return EngineConfig(model=os.path.relpath(MODEL), dtype="float32", kv_blocks=64, max_model_len=512)


async def conversation(cluster: LocalCluster, request: worker_pb2.GenerateRequest) -> dict[str, Any]:
    """Ask a decode instance as a router does, and return what went either way."""
    asked = worker_pb2.GenerateManyRequest(starts=[worker_pb2.CallStart(call=1, request=request)])
    async with open_channel(cluster.decode[0].address) as channel:
        info = await channel.unary_unary(SERVICE + "GetInfo")(b"")
        call = channel.stream_stream(SERVICE + "GenerateMany")()
        await call.write(asked.SerializeToString())
        answers: list[bytes] = []
        async for answer in call:
            answers.append(answer)
            if worker_pb2.GenerateManyResponse.FromString(answer).ends:
                break
        call.cancel()
        streams: dict[str, str] = {}
        for name in ("StreamLoad", "StreamKvEvents"):
            stream = channel.unary_stream(SERVICE + name)(b"")
            async for message in stream:
                streams[name] = packed(message)
                break
            stream.cancel()
    return {
        "info": packed(info),
        "request": packed(asked.SerializeToString()),
        "answers": [*map(packed, answers)],
        "streams": streams,
    }


async def handover(cluster: LocalCluster) -> dict[str, Any]:
    """Have a decode instance ask a prefill instance, and return what went either way."""
    target, said = cluster.prefill[0].address, {"request": b"", "answers": [b""]}

    async def forward(request: bytes, context: Any) -> AsyncIterator[bytes]:
        said["request"], said["answers"] = request, []
        async with open_channel(target) as channel:
            async for answer in channel.unary_stream(SERVICE + "Prefill")(request):
                said["answers"].append(answer)
                yield answer

    name = SERVICE.strip("/")
    handlers = {"Prefill": grpc.unary_stream_rpc_method_handler(forward)}
    server = GrpcServer(host="127.0.0.1", port=0, services=[name])
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    port = await server.start()
    request = generate_request()
    request.prefill_candidates.append(f"127.0.0.1:{port}")
    request.remote_prefill_threshold = 1
    await conversation(cluster, request)
    await server.stop(0)
    return {"request": packed(said["request"]), "answers": [*map(packed, said["answers"])]}


def generate_request() -> worker_pb2.GenerateRequest:
    """Return a request whose prompt the decode instance computes."""
    sampling = sampling_to_pb(SamplingParams(max_tokens=8, temperature=0.0, seed=5))
    return worker_pb2.GenerateRequest(request_id="r", prompt_token_ids=pack_ids(PROMPT), sampling=sampling)


async def record() -> dict[str, Any]:
    """Run instances and return the document."""
    async with LocalCluster(engine_config(), decode_pipes=(("tcp",),)) as cluster:
        prefill = await handover(cluster)
    async with LocalCluster(engine_config(), decode_pipes=(("tcp",),)) as cluster:
        local = await conversation(cluster, generate_request())
    wire = packed(descriptors().SerializeToString())
    return {"version": __version__, "descriptors": wire, "decode": local, "prefill": prefill}


def main() -> None:
    """Write the file of this version."""
    document = asyncio.run(record())
    path = HERE / f"{__version__}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{path}: {path.stat().st_size} bytes")  # noqa: T201


if __name__ == "__main__":
    main()
