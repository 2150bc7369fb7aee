"""Who a request belongs to, as far as the router can tell."""

from __future__ import annotations

import functools
import hashlib
import secrets

from baton_router.accounts.accounts import Account

_REMEMBERED = 1024
"""So many salts and users, of at most 512 characters each, have names that are not worked out again."""


class Tenants:
    """Names tenants. A salt is a secret and a user may be a person: their names say nothing to those who see them."""

    def __init__(self) -> None:
        self._digest = functools.lru_cache(_REMEMBERED)(functools.partial(_digest, secrets.token_bytes(16)))

    def name(self, account: Account | None, cache_salt: str, user: str) -> str:
        """Return a request's tenant: whose API key it showed, else its cache salt, else its user; else all share one.

        Args:
            account: The API key's holder; ``None``: there are no API keys.
            cache_salt: As in the request.
            user: As in the request.
        """
        if account is not None:
            return account.name
        if cache_salt:
            return f"salt-{self._digest(cache_salt)}"
        return f"user-{self._digest(user)}" if user else ""


def _digest(key: bytes, text: str) -> str:
    return hashlib.blake2s(text.encode("utf-8", "surrogatepass"), digest_size=6, key=key).hexdigest()
