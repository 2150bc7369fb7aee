"""What a network can do to links that are more than plain TCP: right bytes or a clear error, in time, nothing left."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.support.transport.transport_faults import STALL_S, Fault, Proxy, counting_proxy
from tests.support.transport.transport_rig import Rig, lets_go, open_fds

from baton.errors import BatonError
from baton.kv_transfer.blocks import BlockSource, Endpoint

SEEDS = 40
DEADLINE_S = 240.0
IDS = np.array([3, 4, 5, 20, 9, 30])
PLACES = np.arange(len(IDS))


class Links:
    """A source and a reader of it, whose every fetch goes over a connection of its own."""

    def __init__(self, kind: str) -> None:
        self.rig = Rig(kind)
        self.address = self.rig.server.endpoints[0].address

    def fetch(self, proxy: Proxy, seconds: float) -> Any:
        rig, known = self.rig, self.rig.server.source
        ends = (Endpoint(rig.kind, proxy.address),)
        source = BlockSource(known.instance_id, known.epoch, ends, known.fingerprint, known.num_blocks)
        rig.target.blocks[: len(IDS)] = 0xEE
        generations = rig.source_arena.generations[IDS]
        return rig.fetcher.fetch(source, IDS, generations, PLACES, deadline=time.monotonic() + seconds)

    def sizes(self) -> tuple[int, int]:
        """Bytes of an undisturbed fetch: from the source, and to it."""
        proxy, seen = counting_proxy(self.address)
        assert self.fetch(proxy, 2 * DEADLINE_S).valid.all()
        proxy.close()
        return seen[0], seen[1]

    def outcome(self, fault: Fault) -> str:
        """Fetch once; what is said to be valid is right."""
        proxy = fault.proxy(self.address)
        start = time.monotonic()
        try:
            valid = self.fetch(proxy, STALL_S).valid
        except BatonError:
            valid = None
        assert time.monotonic() - start < DEADLINE_S, f"{fault}"
        fault.release.set()
        proxy.close()
        if valid is None:
            return "failed"
        assert self.rig.same(IDS[valid], PLACES[valid]), f"{fault}"
        return "right" if valid.all() else "damaged"


@pytest.mark.parametrize("kind", ["tls", "gloo"])
def test_right_bytes_or_a_clear_error(kind: str) -> None:
    fds = open_fds()
    links = Links(kind)
    sizes = links.sizes()
    found = Counter(links.outcome(Fault(seed, sizes)) for seed in range(SEEDS))
    assert found["failed"] > SEEDS // 4, found
    assert links.sizes()  # a link that nobody disturbs works as before
    links.rig.close()
    del links
    assert lets_go(fds + 2), "descriptors leak"
