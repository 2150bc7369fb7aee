"""Which instances serve the same thing: their KV has the same content, whatever the shape of its blocks.

What decides the numbers (weights, adapter, dtypes and scales, rope, hash scheme) must be equal among all instances of
a router: a stream that moves to another instance would go on with another model. How these numbers lie in blocks may
differ: block size, tensor- and pipeline-parallel ranks, layout. Ranks and layout don't matter to routing. Instances of
equal block size share their block hashes and form a *group*; a group's name is the content key, the root of its hash
chains.
"""

from __future__ import annotations

import dataclasses

from baton.errors import FingerprintMismatchError
from baton.kv.fingerprint import Fingerprint

_FREE = frozenset({"model", "block_size"})


def require_same_content(reference: Fingerprint, other: Fingerprint) -> None:
    """Refuse an instance that does not serve what the others do.

    Args:
        reference: Of those that are there.
        other: Of the one that comes.

    Raises:
        FingerprintMismatchError: Names the first field that differs.
    """
    key = reference.content_key()
    for item in dataclasses.fields(reference):
        here, there = getattr(reference, item.name), getattr(other, item.name)
        if item.name in _FREE or here == there:
            continue
        # The content key itself decides which fields are content, so that both never disagree.
        if dataclasses.replace(reference, **{item.name: there}).content_key() != key:
            raise FingerprintMismatchError(
                f"KV of the instance differs in {item.name}: {here!r:.80} here, {there!r:.80} there", field=item.name
            )
