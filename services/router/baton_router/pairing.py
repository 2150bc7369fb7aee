"""Which prefill instances can hand KV over to which decode instances: where dtypes differ, not all to all."""

from __future__ import annotations

from baton_router.instance import Instance

Pairing = tuple[list[Instance], list[Instance]]
"""Prefill and decode instances, any of the former with any of the latter."""


def pairings(prefills: list[Instance], decodes: list[Instance]) -> list[Pairing]:
    """Divide instances so that each decode instance is with just those prefill instances whose KV it takes.

    A prefill instance may be in several parts, a decode instance is in one.

    Args:
        prefills: Ready ones.
        decodes: Ready ones, at least one.
    """
    if len({info.kind for x in (*prefills, *decodes) if (info := x.info) is not None}) == 1:
        return [(prefills, decodes)]
    parts: dict[tuple[int, ...], list[Instance]] = {}
    for decode in decodes:
        takes = tuple(at for at, prefill in enumerate(prefills) if _takes(decode, prefill))
        parts.setdefault(takes, []).append(decode)
    return [([prefills[at] for at in takes], some) for takes, some in parts.items()]


def _takes(decode: Instance, prefill: Instance) -> bool:
    assert decode.info is not None  # a ready instance has said what it is
    assert prefill.info is not None
    return decode.info.fingerprint.takes(prefill.info.fingerprint)
