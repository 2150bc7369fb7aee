"""A pipe of another package: the owner copies the blocks asked for to a file, which the reader reads and removes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

from baton.kv_transfer.native_copy import fence
from baton.kv_transfer.pipes.base import PipeKind, PipeOptions, Served
from baton.kv_transfer.pipes.pool import Connection, PooledReadPipe
from baton.kv_transfer.pipes.read_server import serve_reads
from baton.kv_transfer.pipes.tcp import TcpServer, dial_reader
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.types import BlockReads, Bytes, Valid, current
from baton.kv_transfer.wire import (
    Facts,
    FrameKind,
    pack_bits,
    pack_header,
    pack_request,
    recv_control,
    send_control,
    source_views,
    target_views,
    unpack_bits,
)

ENTRY_POINTS = "[baton.pipes]\nfile = tests.support.transport.file_pipe:FileKind\n"


def install(site: Path) -> None:
    """Write the metadata that an installer writes, so that the pipe is found if ``site`` is on the path."""
    info = site / "baton_file_pipe-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: baton-file-pipe\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


class FileReadPipe(PooledReadPipe[Connection]):
    kind: ClassVar[str] = "file"

    def __init__(self, address: str, facts: Facts, options: PipeOptions) -> None:
        def dial(wait: Wait) -> Connection:
            return Connection(dial_reader(address, facts, options.token, wait))

        super().__init__(dial, max_connections=4)

    def request(self, connection: Connection, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        stream, payload = connection.stream, pack_request(reads, checksums=False)
        stream.send_all([pack_header(FrameKind.READ, len(payload)), payload], wait, "asking for blocks")
        answer = recv_control(stream, FrameKind.WELCOME, wait)
        sent, unchanged = (unpack_bits(bytes.fromhex(answer[name]), len(reads)) for name in ("sent", "unchanged"))
        path = Path(answer["path"])
        with path.open("rb") as file:
            for view in target_views(local, reads.local_ids[sent], reads.segments_of(local.shape[1])):
                assert file.readinto(view) == len(view)
        path.unlink()
        return sent & unchanged


class FileServer(TcpServer):
    def __init__(self, served: Served, options: PipeOptions) -> None:
        super().__init__(served, options)
        self._folder = tempfile.TemporaryDirectory()

    def serve(self, stream: Stream, wait: Wait) -> None:
        shards = self._served.shards

        def answer(reads: BlockReads, checksums: bool) -> None:
            blocks = shards.arenas[reads.source_shard].blocks
            sent = current(shards.primary, reads)
            with tempfile.NamedTemporaryFile(dir=self._folder.name, delete=False) as file:
                for view in source_views(blocks, reads.remote_ids[sent], reads.segments_of(blocks.shape[1])):
                    file.write(view)
            fence()
            unchanged = current(shards.primary, reads)
            fields = {"path": file.name, "sent": pack_bits(sent).hex(), "unchanged": pack_bits(unchanged).hex()}
            send_control(stream, FrameKind.WELCOME, fields, Wait())

        serve_reads(stream, shards, self._served.limits, answer)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


class FileKind(PipeKind):
    name: ClassVar[str] = "file"
    serves_host_memory_only: ClassVar[bool] = True

    def connect(self, address: str, facts: Facts, wait: Wait) -> FileReadPipe:
        pipe = FileReadPipe(address, facts, self.options)
        pipe.open_first(wait)
        return pipe

    def listen(self, served: Served) -> FileServer:
        return FileServer(served, self.options)
