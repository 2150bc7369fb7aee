"""The rival's radix tree, in its own environment: events as JSON, block hashes as 64-bit numbers."""

from __future__ import annotations

import itertools
import json
import struct
from typing import Any

from dynamo._core import RadixTree
from workload import HASH, Side, serve


class Dynamo(Side):
    """The first eight bytes of a hash name a block, both by itself and with all before it."""

    def __init__(self, chains: list[bytes]) -> None:
        super().__init__(chains)
        self.tree: Any = RadixTree()
        self.ids = itertools.count(1)

    def numbers(self, chain: int, begin: int, end: int) -> list[int]:
        data = self.chains[chain]
        return [struct.unpack_from("<Q", data, at * HASH)[0] >> 1 for at in range(begin, end)]

    def message(self, instance: int, chain: int, begin: int, end: int) -> bytes:
        """Return an event as it comes over the wire."""
        blocks = [{"block_hash": x, "tokens_hash": x} for x in self.numbers(chain, begin, end)]
        parent = self.numbers(chain, begin - 1, begin)[0] if begin else None
        return json.dumps(
            {"event_id": next(self.ids), "data": {"stored": {"parent_hash": parent, "blocks": blocks}}, "dp_rank": 0},
            separators=(",", ":"),
        ).encode()

    def apply(self, instance: int, message: bytes) -> None:
        self.tree.apply_event(instance, message)

    def question(self, chain: int, blocks: int) -> object:
        return self.numbers(chain, 0, blocks)

    def find(self, question: object) -> object:
        return self.tree.find_matches(question).scores

    def answer(self, result: Any) -> dict[int, int]:
        """Return what was found as leading blocks per instance."""
        return {worker: depth for (worker, _), depth in result.items()}


if __name__ == "__main__":
    serve(Dynamo)
