"""The served model's tokenizer, loaded as soon as an instance says which model that is: no request waits for it."""

from __future__ import annotations

import asyncio
import logging

from baton.errors import BatonError
from baton.tokenizer import TextModelCache
from baton.types import Role
from baton_router.registry.registry import Registry

log = logging.getLogger(__name__)

_LOOK_S = 60.0
_PATIENCE_S = 10.0
"""How long the router is not ready for want of a tokenizer: one may have to come from afar, and token ids need none."""


class Preload:
    """Loads the tokenizer of the first model that is served, once.

    Args:
        tokenizers: Where it is kept.
        registry: The instances.
    """

    def __init__(self, tokenizers: TextModelCache, registry: Registry) -> None:
        self._tokenizers, self._registry = tokenizers, registry
        self._task: asyncio.Task[None] | None = None
        self.over = False
        """Whether it is loaded, cannot be, or takes too long to be waited for."""

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run(), name="preload of the tokenizer")

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while not self._registry.ready(Role.DECODE):
            await self._registry.wait_changed(_LOOK_S)
        late = asyncio.get_running_loop().call_later(_PATIENCE_S, self._give_up)
        try:
            await self._tokenizers.get(self._registry.model_info().path)
        except BatonError as error:
            log.warning("prompts can only be token ids as it is: %s", error)
        finally:
            late.cancel()
            self.over = True

    def _give_up(self) -> None:
        self.over = True
