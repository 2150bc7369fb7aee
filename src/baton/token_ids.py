"""Token ids of a whole prompt, as one ``array("I")``: without an object per id on the way through the router.

On the wire they are bytes, four per id, little-endian.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from baton.errors import InvalidRequestError

if TYPE_CHECKING:
    TokenIds: TypeAlias = array[int]
else:
    TokenIds = array  # which has no parameters at run time before Python 3.12
"""Ids as ``array("I")``: 32 bits each."""


def token_ids(ids: Sequence[int]) -> TokenIds:
    """Return ids as an array; one that already is is not copied.

    Raises:
        OverflowError: One is negative or needs more than 32 bits.
    """
    return ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)


def max_id(ids: TokenIds) -> int:
    """Return the largest id; 0 of none."""
    return int(np.frombuffer(ids, np.uint32).max()) if ids else 0


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return ids as a message carries them: uint32, little-endian."""
    return _in_wire_order(token_ids(ids)).tobytes()


def unpack_ids(data: bytes) -> TokenIds:
    """Return the ids that a message carries, packed as :func:`pack_ids` does it.

    Raises:
        InvalidRequestError: The bytes end within an id.
    """
    if len(data) % 4:
        message = f"prompt_token_ids has {len(data)} bytes: four per id are wanted"
        raise InvalidRequestError(message, field="prompt_token_ids")
    return _in_wire_order(array("I", data))


def _in_wire_order(ids: TokenIds) -> TokenIds:
    if sys.byteorder == "little":
        return ids
    swapped = ids[:]
    swapped.byteswap()
    return swapped
