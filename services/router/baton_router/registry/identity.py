"""Whether an instance is what this router can serve with: checked before it gets a request or feeds the index."""

from __future__ import annotations

import logging

from baton.errors import ConfigError, FingerprintMismatchError
from baton.hashing import HASH_SCHEME
from baton.kv_cache.fingerprint import Fingerprint
from baton.types import Role
from baton_router.registry.instance import InstanceInfo

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
        self._kinds: dict[Role, dict[str, Fingerprint]] = {Role.PREFILL: {}, Role.DECODE: {}}
        """One of each kind of KV dtype that was admitted, by role."""

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
            mine.require_akin(theirs, who="instance")
            self._require_partner(theirs, role)
        if theirs.hash_scheme != HASH_SCHEME:
            raise _differs("hash_scheme", HASH_SCHEME, theirs.hash_scheme)
        if theirs.block_size < 1 or self._block_size not in (None, theirs.block_size):
            raise _differs("block_size", self._block_size or "1 or more", theirs.block_size)
        tokenizer = self._own_tokenizer if first else self._tokenizer
        if tokenizer and info.tokenizer_digest and tokenizer != info.tokenizer_digest:
            raise _differs("tokenizer", tokenizer[:16], info.tokenizer_digest[:16])
        if mine is None or first:
            self._fingerprint = theirs
            self._kinds = {Role.PREFILL: {}, Role.DECODE: {}}
        elif theirs.block_size != mine.block_size:
            log.info("%s has blocks of %d tokens, others of %d", info.instance_id, theirs.block_size, mine.block_size)
        self._kinds[role][theirs.kind] = theirs
        self._tokenizer = tokenizer or info.tokenizer_digest

    def _require_partner(self, theirs: Fingerprint, role: Role) -> None:
        """Refuse an instance that could not hand KV over to, or take it from, any that there is.

        Decode instances take KV of prefill instances. Where the other role is not there yet, its own is compared.

        Raises:
            FingerprintMismatchError: Names ``kv_dtype`` or ``kv_cast``.
        """
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        partners = list(self._kinds[other].values())
        if not partners:
            partners = list(self._kinds[role].values())
            if any(x.takes(theirs) or theirs.takes(x) for x in partners):
                return
        if role is Role.DECODE:
            if not any(theirs.takes(x) for x in partners):
                partners[0].require_reader(theirs, who="instance")
        elif not any(x.takes(theirs) for x in partners):
            partners[0].require_source(theirs, who="instance")


def _differs(field: str, here: object, there: object) -> FingerprintMismatchError:
    return FingerprintMismatchError(f"{field} of the instance differs: {here!r} here, {there!r} there", field=field)
