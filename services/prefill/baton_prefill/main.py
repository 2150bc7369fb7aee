"""``baton-prefill``: a prefill instance."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from baton.transport.lookup_buffer import LookupBuffer

from baton.transport.connector.p2p_load import Offer
from baton.transport.connector.p2p_offer import P2POfferer
from baton.types import Role
from baton.worker.instance import Parts
from baton.worker.main import main as run_worker
from baton.worker.servicer import WorkerContext
from baton_prefill.servicer import PrefillServicer

OFFER_BUFFER_BYTES = 64 * 1024 * 1024


class PrefillParts:
    """A prefill instance offers what it computes."""

    def __init__(self, parts: Parts) -> None:
        self._buffer: LookupBuffer[Offer] = LookupBuffer(max_bytes=OFFER_BUFFER_BYTES)
        self.connector = P2POfferer(
            arena=parts.arena,
            buffer=self._buffer,
            wake=parts.wake,
            block_size=parts.engine_config.block_size,
            lease_s=parts.config.lease_s,
            max_leases=parts.config.max_leases,
        )

    def servicer(self, context: WorkerContext) -> PrefillServicer:
        """Build the prefill calls."""
        return PrefillServicer(context, self.connector)

    async def close(self) -> None:
        """End all leases."""
        self.connector.close()
        self._buffer.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_worker(Role.PREFILL, PrefillParts, argv)


if __name__ == "__main__":
    sys.exit(main())
