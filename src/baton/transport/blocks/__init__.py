"""Block transfer: a server that lets its arena's blocks be read, and a fetcher that copies them into its own."""

from baton.transport.block_types import BlockReads, BlockSource, Endpoint, FetchResult
from baton.transport.blocks.fetcher import BlockFetcher
from baton.transport.blocks.links import LinkOptions
from baton.transport.blocks.parts import SequenceBlocks
from baton.transport.blocks.server import BlockServer, ServerOptions
from baton.transport.pipe.memory import MemoryNetwork
from baton.transport.pipe.tcp_read import TcpOptions

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
