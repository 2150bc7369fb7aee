"""Block transfer: a server that lets its arena's blocks be read, and a fetcher that copies them into its own."""

from baton.kv_transfer.blocks.fetcher import BlockFetcher, LinkOptions
from baton.kv_transfer.blocks.plan import SequenceBlocks
from baton.kv_transfer.blocks.server import BlockServer, ServerOptions
from baton.kv_transfer.pipes.base import MemoryNetwork, TcpOptions
from baton.kv_transfer.types import BlockReads, BlockSource, Endpoint, FetchResult

__all__ = [
    "BlockFetcher",
    "BlockReads",
    "BlockServer",
    "BlockSource",
    "Endpoint",
    "FetchResult",
    "LinkOptions",
    "MemoryNetwork",
    "SequenceBlocks",
    "ServerOptions",
    "TcpOptions",
]
