"""What the load is put on: an OpenAI endpoint, or a Baton router over gRPC."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol

import orjson

from baton.bench.serve.http_stream import BrokenStreamError, HttpClient
from baton.bench.serve.options import ServeOptions
from baton.bench.serve.prompts import PlannedRequest
from baton.bench.serve.sample import Sample
from baton.client import AsyncClient
from baton.config.flags import AccessConfig
from baton.errors import BatonError, ConfigError, UnavailableError
from baton.rpc.tls import Tls, read_tls

_LIST_TIMEOUT_S = 10.0


class Target(Protocol):
    """A service that answers."""

    model: str

    async def prepare(self) -> None:
        """Look whether it is there, and choose the model.

        Raises:
            BatonError: It is not.
        """

    async def ask(self, request: PlannedRequest, sample: Sample) -> None:
        """Send a request, and note in ``sample`` what comes; failures too."""

    async def close(self) -> None:
        """End connections."""


def make_target(options: ServeOptions, access: AccessConfig) -> Target:
    """Return the target that the options name.

    Raises:
        ConfigError: Certificates or keys cannot be read.
    """
    if options.endpoint == "grpc":
        return GrpcTarget(options, access, read_tls(access))
    return OpenAITarget(options, access)


class OpenAITarget:
    """``/v1/completions`` or ``/v1/chat/completions`` of any service, streamed."""

    def __init__(self, options: ServeOptions, access: AccessConfig) -> None:
        self.model = options.model
        self._options = options
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        context = ssl.create_default_context(cafile=access.tls_ca or None) if options.url.startswith("https") else None
        self._http = HttpClient(options.url.removesuffix("/").removesuffix("/v1"), headers, context)
        self._read = _read_chat if options.endpoint == "chat" else _read_completion

    async def prepare(self) -> None:
        """See :class:`Target`."""
        try:
            async with asyncio.timeout(_LIST_TIMEOUT_S):
                answer = await self._http.send("GET", "/v1/models", b"", _ignore)
        except (OSError, BrokenStreamError, TimeoutError) as error:
            raise UnavailableError(f"{self._options.url} does not answer: {error or 'time is up'}") from error
        if self.model:
            return
        if answer.status != 200:
            text = bytes(answer.body[:200]).decode(errors="replace")
            raise UnavailableError(f"{self._options.url}/v1/models answers {answer.status}: {text}")
        try:
            self.model = orjson.loads(answer.body)["data"][0]["id"]
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            text = bytes(answer.body[:200]).decode(errors="replace")
            message = f"{self._options.url}/v1/models lists no model: {text}; give --model"
            raise ConfigError(message, field="model") from error

    async def ask(self, request: PlannedRequest, sample: Sample) -> None:
        """See :class:`Target`."""
        path, body = self._body(request)
        counted: dict[str, Any] = {}

        def on_event(data: bytes, at: float) -> None:
            if data == b"[DONE]":
                counted["done"] = True
                return
            try:  # here: the parser makes an error of its own of what is raised in it
                self._take(orjson.loads(data), at, sample, counted)
            except (orjson.JSONDecodeError, AttributeError, LookupError, TypeError) as error:
                sample.fail("bad event", f"{type(error).__name__}: {error}")

        await _guarded(self._send(path, body, on_event, counted, sample), self._options.timeout_s, sample)
        _take_usage(sample, counted.get("usage"))

    def _take(self, event: dict[str, Any], at: float, sample: Sample, counted: dict[str, Any]) -> None:
        if error := event.get("error"):
            sample.fail("error event", str(error.get("message", error)))
        if self._read(event):
            sample.arrivals.append(at)
        if event.get("usage"):
            counted["usage"] = event["usage"]

    async def _send(
        self, path: str, body: bytes, on_event: Callable[[bytes, float], None], counted: dict[str, Any], sample: Sample
    ) -> None:
        answer = await self._http.send("POST", path, body, on_event)
        if answer.status != 200:
            sample.fail(f"http {answer.status}", bytes(answer.body).decode(errors="replace"))
        elif not answer.is_stream:
            sample.fail("no stream", f"content type {answer.content_type or 'missing'}")
        elif "done" not in counted:
            sample.fail("cut", "the stream ended without [DONE]")

    def _body(self, request: PlannedRequest) -> tuple[str, bytes]:
        options = self._options
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.endpoint == "chat":
            prompt = request.prompt
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return "/v1/chat/completions", orjson.dumps(body)
        body["prompt"] = request.prompt
        return "/v1/completions", orjson.dumps(body)

    async def close(self) -> None:
        """See :class:`Target`."""
        self._http.close()


def _ignore(data: bytes, at: float) -> None:
    """Take an event of an answer that should have none."""


def _read_completion(event: dict[str, Any]) -> bool:
    """Whether an event has output: also a token whose text waits for the next one, but not a bare end."""
    choices = event.get("choices")
    return bool(choices and (choices[0].get("text") or choices[0].get("finish_reason") is None))


def _read_chat(event: dict[str, Any]) -> bool:
    """Whether an event has output: text, reasoning or a call; not the one that names the role, nor a bare end."""
    choices = event.get("choices")
    if not choices:
        return False
    delta = choices[0].get("delta") or {}
    if any(delta.get(key) for key in ("content", "reasoning", "reasoning_content", "tool_calls", "refusal")):
        return True
    return delta.get("content") == "" and "role" not in delta and choices[0].get("finish_reason") is None


def _take_usage(sample: Sample, usage: dict[str, Any] | None) -> None:
    counts = usage or {}
    sample.prompt_tokens = counts.get("prompt_tokens")
    sample.cached_tokens = (counts.get("prompt_tokens_details") or {}).get("cached_tokens")
    sample.finish(counts.get("completion_tokens"))


async def _guarded(work: Any, timeout_s: float, sample: Sample) -> None:
    """Run a request; what goes wrong becomes the sample's error, by kind."""
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except TimeoutError:
        sample.fail("timeout", f"no end within {timeout_s:g} s")
    except BrokenStreamError as error:
        sample.fail("cut" if sample.arrivals else "connection", str(error))
    except OSError as error:
        sample.fail("connection", str(error))
    except BatonError as error:
        sample.fail(error.code, error.message)


class GrpcTarget:
    """A Baton router, through the SDK."""

    def __init__(self, options: ServeOptions, access: AccessConfig, tls: Tls | None) -> None:
        self.model = options.model
        self._options = options
        self._client = AsyncClient(
            options.url,
            token=options.api_key or None,
            token_file="" if options.api_key else access.token_file,
            timeout=options.timeout_s,
            retries=0,
            tls=tls,
        )

    async def prepare(self) -> None:
        """See :class:`Target`."""
        models = await self._client.models(timeout=_LIST_TIMEOUT_S)
        if not self.model:
            if not models:
                raise UnavailableError(f"{self._options.url} has no model yet")
            self.model = models[0].name

    async def ask(self, request: PlannedRequest, sample: Sample) -> None:
        """See :class:`Target`."""
        await _guarded(self._send(request, sample), self._options.timeout_s, sample)
        sample.finish(sample.output_tokens or None)

    async def _send(self, request: PlannedRequest, sample: Sample) -> None:
        stream = await self._client.generate(
            request.prompt,
            model=self.model,
            stream=True,
            max_tokens=request.output_tokens,
            temperature=0.0,
            ignore_eos=self._options.ignore_eos,
        )
        async with stream:
            while (chunks := await stream.next_chunks()) is not None:
                count = sum(len(chunk.token_ids) for chunk in chunks)
                if count:
                    sample.arrivals.append(time.perf_counter())
                    sample.output_tokens += count
        if stream.trace is not None:
            sample.prompt_tokens, sample.cached_tokens = stream.trace.prompt_tokens, stream.trace.cached_tokens

    async def close(self) -> None:
        """See :class:`Target`."""
        await self._client.close()
