"""The synchronous client.

Generated from ``async_client.py`` by ``scripts/gen_sync_client.py``: do not edit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack, overload

from baton.client.async_client import AsyncClient
from baton.client.portal import LONG_CALL_S, PortalClient, Stream
from baton.client.request import Options, Prompt
from baton.client.scaling import Switch
from baton.client.settings import DEFAULT_RETRIES, DEFAULT_TIMEOUT_S
from baton.client.types import Generation, Instance, Model, RouteDecision, Stats
from baton.errors import BatonError
from baton.rpc.tls import Tls
from baton.types import Role


class Client(PortalClient):
    """Client of a Baton router, over gRPC.

    May be used from several threads, which share one background thread and its connection. Close it, or use it as a
    context manager. A client that was used does not survive a fork: create one in each process::

        with baton.Client("127.0.0.1:8001") as client:
            print(client.generate("def main():", max_tokens=32).text)

    Args:
        address: ``host:port`` of the router's gRPC server, or the addresses of several routers of the same instances.
            If one is out of reach, the next one is asked and continues answers that have begun.
        token: API key, if the router requires one.
        token_file: File with the services' shared token, for services. Client and router prove it to each other; it
            is not sent. Excludes ``token``.
        timeout: Deadline of calls that have no ``timeout`` of their own, in seconds. Above 0.
        retries: Retries of a call that failed because no router or instance was available, before its first token.
        direct: Receive tokens from the decode instances. The router only places the request and signs a ticket; it
            continues the answer if the instance's stream breaks.
        tokenizer: With ``direct``, the directory of the model's tokenizer; default: the path that the instance names.
        tls: Certificates, if the services use TLS: ``baton.rpc.tls.Tls(cert, key, ca)``.

    Raises:
        InvalidRequestError: An argument is invalid; names it.
        ConfigError: The token file cannot be read, or other users can read it.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:8001",
        *,
        token: str | None = None,
        token_file: str = "",
        timeout: float = DEFAULT_TIMEOUT_S,
        retries: int = DEFAULT_RETRIES,
        direct: bool = False,
        tokenizer: str = "",
        tls: Tls | None = None,
    ) -> None:
        super().__init__(
            AsyncClient(
                address,
                token=token,
                token_file=token_file,
                timeout=timeout,
                retries=retries,
                direct=direct,
                tokenizer=tokenizer,
                tls=tls,
            ),
            timeout,
        )

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        stream: Literal[False] = False,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        stream: Literal[True],
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Stream: ...

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        stream: bool = False,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Generation | Stream:
        """Generate an answer to a prompt.

        Args:
            prompt: Text, token ids, or chat messages (``{"role": ..., "content": ...}``).
            model: Name of the model; empty: the model that the router serves.
            stream: Return a stream of chunks instead of the whole answer.
            timeout: Deadline of the whole call, in seconds; default: the client's.
            **options: Sampling parameters and other fields of the request; see :class:`baton.client.Options`.

        Returns:
            The answer, or with ``stream=True`` an iterator over its chunks.

        Raises:
            InvalidRequestError: An argument is invalid; names the field.
            QueueFullError: All instances are full; ``retry_after_s`` says when to retry.
            UnavailableError: No router or instance is available.
            DeadlineError: The answer was not complete within ``timeout``.
            BatonError: Other errors; see :mod:`baton.errors`. With ``stream=True`` most are raised by the iteration.
        """
        if not stream:
            return self._call(
                self._core.generate(prompt, model=model, stream=False, timeout=timeout, **options), timeout
            )
        return self._open_stream(
            self._core.generate(prompt, model=model, stream=True, timeout=timeout, **options), timeout
        )

    def route(
        self, prompt: Prompt, *, model: str = "", cache_salt: str = "", timeout: float | None = None
    ) -> RouteDecision:
        """Return where the router would place a prompt now, and why. Nothing is reserved.

        Args:
            prompt: Text, token ids, or chat messages.
            model: Name of the model; empty: the model that the router serves.
            cache_salt: Cache salt of the request.
            timeout: Deadline in seconds; default: the client's.

        Raises:
            UnavailableError: No router or instance is available.
        """
        return self._call(self._core.route(prompt, model=model, cache_salt=cache_salt, timeout=timeout), timeout)

    def list_instances(self, *, timeout: float | None = None) -> list[Instance]:
        """Return all instances that the router knows, healthy or not.

        Args:
            timeout: Deadline in seconds; default: the client's.
        """
        return self._call(self._core.list_instances(timeout=timeout), timeout)

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the models that requests can name.

        Args:
            timeout: Deadline in seconds; default: the client's.
        """
        return self._call(self._core.models(timeout=timeout), timeout)

    def stats(self, *, window: float = 60.0, timeout: float | None = None) -> Stats:
        """Return rates and latencies of the router's recent requests, and its queue.

        Args:
            window: Length of the period in seconds, at most 180.
            timeout: Deadline in seconds; default: the client's.

        Raises:
            PermissionDeniedError: The API key is not an administrator's.
        """
        return self._call(self._core.stats(window=window, timeout=timeout), timeout)

    def explain(self, request_id: str, *, timeout: float | None = None) -> dict[str, Any]:
        """Return how a request was placed and how it went: what ``baton explain --json`` prints.

        Args:
            request_id: ``request_id`` of an answer, or ``id`` or ``x-request-id`` of an answer over HTTP.
            timeout: Deadline in seconds; default: the client's.

        Raises:
            NotFoundError: The router does not know the request. Each router remembers only the latest requests that
                it placed itself.
            InternalError: What the router answers is no JSON object.
        """
        return self._call(self._core.explain(request_id, timeout=timeout), timeout)

    def health(self, *, timeout: float = 2.0) -> dict[str, bool]:
        """Return, by address, whether each of the client's routers is serving.

        Args:
            timeout: Seconds to wait for each router; one that does not answer in time is not serving.

        Raises:
            UnavailableError: The client is closed.
        """
        return self._call(self._core.health(timeout=timeout), timeout)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Generate the next message of a conversation: ``generate`` with messages.

        Args:
            messages: Messages with ``role`` and ``content``. Append ``answer.message`` to continue.
            model: Name of the model; empty: the model that the router serves.
            timeout: Deadline in seconds; default: the client's.
            **options: See :class:`baton.client.Options`.

        Raises:
            InvalidRequestError: ``messages`` are not messages with role and content.
            BatonError: See :meth:`generate`.
        """
        return self._call(self._core.chat(messages, model=model, timeout=timeout, **options), timeout)

    def map(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = 16,
        keep_errors: bool = False,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Iterator[Generation | BatonError]:
        """Generate answers to many prompts, some at a time; yields them in the order of the prompts.

        Args:
            prompts: The prompts; read only as far as needed, so that they may be endless.
            concurrency: Number of concurrent requests, at least 1.
            keep_errors: Yield the error of a failed request in place of its answer, instead of raising it.
            model: Name of the model; empty: the model that the router serves.
            timeout: Deadline of each request, in seconds; default: the client's.
            **options: See :class:`baton.client.Options`.

        Raises:
            InvalidRequestError: ``concurrency`` is below 1.
            BatonError: A request failed; the other ones are cancelled.
        """
        return self._iterate(
            self._core.map(
                prompts, concurrency=concurrency, keep_errors=keep_errors, model=model, timeout=timeout, **options
            ),
            timeout,
        )

    def drain(self, instance: str, *, wait: float = 60.0, migrate: bool = False) -> int:
        """Stop new requests to an instance, and wait for its running ones.

        Args:
            instance: Identifier of the instance.
            wait: Seconds to wait, at most one day; 0 only stops new requests.
            migrate: After ``wait``, have the routers continue the remaining requests on other instances.

        Returns:
            Number of requests that still run.

        Raises:
            NotFoundError: The router does not know the instance.
            BatonError: The instance does not answer, or ``token_file`` is missing.
        """
        return self._call(self._core.drain(instance, wait=wait, migrate=migrate), wait + self._timeout)

    def set_role(self, instance: str, role: Role) -> None:
        """Change the role of an idle instance, which keeps its caches. A drained instance takes requests again.

        Args:
            instance: Identifier of the instance.
            role: The new role.

        Raises:
            BusyError: The instance is not idle: drain it first.
            NotFoundError: The router does not know the instance.
            BatonError: The instance does not answer, or ``token_file`` is missing.
        """
        self._call(self._core.set_role(instance, role))

    def scale(
        self, *, prefill: int | None = None, decode: int | None = None, wait: float = 30.0, dry_run: bool = False
    ) -> list[Switch]:
        """Change the numbers of prefill and decode instances while requests run, by switching roles.

        The least busy instances of the role with too many are drained and get the other role.

        Args:
            prefill: Number of prefill instances; default: all that are not decode instances.
            decode: Number of decode instances, at least 1; default likewise.
            wait: Seconds for the requests on an instance to end, before they continue elsewhere.
            dry_run: Only return the instances that would switch.

        Returns:
            The switches, in their order.

        Raises:
            ConfigError: The numbers do not add up to the number of instances.
            BatonError: An instance does not answer, or stayed busy.
        """
        return self._call(self._core.scale(prefill=prefill, decode=decode, wait=wait, dry_run=dry_run), LONG_CALL_S)
