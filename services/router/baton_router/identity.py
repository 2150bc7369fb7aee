"""Whether an instance is what this router can serve with: checked before it gets a request or feeds the index."""

from __future__ import annotations

import logging

from baton.errors import ConfigError, FingerprintMismatchError
from baton.hashing import HASH_SCHEME
from baton.kv.fingerprint import Fingerprint
from baton.types import Role
from baton_router.instance import InstanceInfo

log = logging.getLogger(__name__)


class IdentityCheck:
    """Compares instances with the router and with the first of them that is there.

    Args:
        tokenizer: Digest of the router's own tokenizer; empty: the instances' is used.
        block_size: Tokens per block that all must have; ``None``: any, each size is a group of its own.
    """

    def __init__(self, tokenizer: str = "", block_size: int | None = None) -> None:
        self._own_tokenizer = tokenizer
        self._block_size = block_size
        self._tokenizer = tokenizer
        self._fingerprint: Fingerprint | None = None

    def admit(self, info: InstanceInfo, role: Role, *, first: bool) -> None:
        """Check an instance.

        Args:
            info: What it says of itself.
            role: What it should be.
            first: No other instance is there: this one decides what is served.

        Raises:
            ConfigError: Another role than expected.
            FingerprintMismatchError: Its KV, its hashes or its token ids would not be what the others' are; names the
                field.
        """
        if info.role is not role:
            raise ConfigError(f"role is {info.role}, expected {role}", field="role")
        mine, theirs = self._fingerprint, info.fingerprint
        if mine is not None and not first:
            mine.require_compatible(theirs, who="instance")
        if theirs.hash_scheme != HASH_SCHEME:
            raise _differs("hash_scheme", HASH_SCHEME, theirs.hash_scheme)
        if theirs.block_size < 1 or self._block_size not in (None, theirs.block_size):
            raise _differs("block_size", self._block_size or "1 or more", theirs.block_size)
        tokenizer = self._own_tokenizer if first else self._tokenizer
        if tokenizer and info.tokenizer_digest and tokenizer != info.tokenizer_digest:
            raise _differs("tokenizer", tokenizer[:16], info.tokenizer_digest[:16])
        if mine is None or first:
            self._fingerprint = theirs
        elif theirs.block_size != mine.block_size:
            log.info("%s has blocks of %d tokens, others of %d", info.instance_id, theirs.block_size, mine.block_size)
        self._tokenizer = tokenizer or info.tokenizer_digest


def _differs(field: str, here: object, there: object) -> FingerprintMismatchError:
    return FingerprintMismatchError(f"{field} of the instance differs: {here!r} here, {there!r} there", field=field)
