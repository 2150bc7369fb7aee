"""Takes over what changes in files while a router runs: API keys and certificates."""

from __future__ import annotations

import asyncio
import logging
import ssl

from baton.rpc.tls import Tls
from baton_router.accounts.accounts import FileAccounts
from baton_router.accounts.redis_source import RedisAccounts

log = logging.getLogger(__name__)

INTERVAL_S = 2.0


class CredentialReload:
    """Looks at the files every :data:`INTERVAL_S` seconds.

    Args:
        accounts: API keys, if there are any.
        tls: Certificates, if there are any.
        https: Context of the HTTP server, if it speaks TLS.
    """

    def __init__(
        self, accounts: FileAccounts | RedisAccounts | None, tls: Tls | None, https: ssl.SSLContext | None
    ) -> None:
        self._accounts, self._tls, self._https = accounts, tls, https
        self._shown = tls.generation if tls is not None else 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin, in the running loop.

        Raises:
            ConfigError: API keys cannot be read.
        """
        if self._accounts is not None:
            await self._accounts.start()
        if self._accounts is not None or self._https is not None:
            self._task = asyncio.create_task(self._run(), name="renewal")

    async def close(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._accounts is not None:
            await self._accounts.close()

    async def look(self) -> None:
        """Take over what has changed. What cannot be is reported, and tried again by the next look."""
        for renew in (self._renew_accounts, self._renew_certificates):
            try:
                await renew()
            except Exception:  # a file in the middle of being replaced, say: it must not be the last look
                log.exception("API keys or certificates could not be taken over")

    async def _renew_accounts(self) -> None:
        if self._accounts is not None:
            await self._accounts.renew()

    async def _renew_certificates(self) -> None:
        if self._tls is not None and self._https is not None:
            self._tls.refresh()
            generation = self._tls.generation
            if self._shown != generation:
                self._tls.renew(self._https)
                self._shown = generation

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.look()
