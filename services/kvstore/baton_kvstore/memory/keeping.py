"""What operators and services ask of blocks beyond storing them: keep these, forget those, forget a tenant's."""

from __future__ import annotations

from collections.abc import Sequence

from baton.kv_cache.fingerprint import Fingerprint
from baton.types import BlockHash
from baton_kvstore.memory.store import BlockStore
from baton_kvstore.tiers.disk.format import Kind


def keep(store: BlockStore, fingerprint: Fingerprint, hashes: Sequence[BlockHash]) -> list[bool]:
    """Pin blocks until :func:`unkeep`, and return which of them are there and pinned.

    Raises:
        QueueFullError: As much is pinned as may be; those before stay pinned.
    """
    found = []
    for name in hashes:
        entries = store.pin(fingerprint.digest(), [name])
        found.append(bool(entries))
        for entry in entries:
            is_new = False
            try:
                is_new = store.holds.hold(entry)
            finally:
                if not is_new:
                    store.end_save(entries, saved=False)
    return found


def unkeep(store: BlockStore, fingerprint: Fingerprint, hashes: Sequence[BlockHash]) -> None:
    """Pin blocks no more."""
    entries = store.pin(fingerprint.digest(), hashes)
    for entry in entries:
        if entry.held:
            store.let_go(entry)
    store.end_save(entries, saved=False)


def forget_tenant(store: BlockStore, name: str) -> dict[Kind, set[BlockHash]]:
    """Forget everything of a tenant that is in memory, and return what that was."""
    share = store.quotas.find(name)
    if share is None:
        return {}
    blocks = share.blocks()
    store.forget([entry for entry in share.entries if not entry.doomed])
    return blocks
