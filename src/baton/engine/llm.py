"""Offline inference: a list of prompts in, a list of answers out, with the engine that services use."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from baton.config import EngineConfig
from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.request import EngineRequest, RequestMetrics, SequenceOutput
from baton.errors import InternalError, InvalidRequestError
from baton.tokenizer import IncrementalDetokenizer, StopStringMatcher, StopStrings, Tokenizer
from baton.tokenizer.model_files import model_directory, read_file
from baton.types import FinishReason, RequestId, SamplingParams, TokenLogprob


@dataclass(slots=True)
class SequenceResult:
    """One of the ``n`` answers to a prompt.

    Attributes:
        index: Index of the answer, 0 to n-1.
        text: Text without stop strings and special tokens.
        token_ids: All tokens, a stop token included.
        logprobs: Parallel to ``token_ids``, if asked for.
        finish_reason: Why it ended.
        stop_reason: The stop string or the stop token id that ended it, if one did.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt; ``text``, ``token_ids`` and so on are those of the first of its ``outputs``.

    Attributes:
        prompt: The prompt, if it was given as text.
        prompt_token_ids: Token ids of the prompt.
        outputs: The ``n`` answers.
        prompt_logprobs: One entry per prompt token, if asked for; the first entry is ``None``.
        metrics: Token counts and times of the request.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[SequenceResult]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    metrics: RequestMetrics | None = None

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first answer."""
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Log probabilities of the first answer."""
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first answer ended."""
        return self.outputs[0].finish_reason


class LLM:
    """A model for offline use, also as a context manager. Not thread-safe.

    Attributes:
        config: Configuration of the engine.
        core: The engine.
        tokenizer: The model's tokenizer; ``None``: it has none, and prompts must be token ids.
    """

    def __init__(self, model: str | EngineConfig, **overrides: Any) -> None:
        """Load a model.

        Args:
            model: Local path, GGUF file or hub name of a model, or a whole configuration.
            overrides: Fields of :class:`~baton.config.EngineConfig` to set, such as ``dtype`` or ``tp``.

        Raises:
            ConfigError: The model cannot be loaded, or a field has a wrong value; names the field.
        """
        config = EngineConfig(model=model) if isinstance(model, str) else model
        self.config = dataclasses.replace(config, **overrides)
        self.core: EngineCore = build_engine(self.config)
        self.tokenizer = _load_tokenizer(self.config.model)
        self._ids = itertools.count()

    def close(self) -> None:
        """Release the KV pool and the other ranks' processes; the object cannot be used afterwards."""
        if self.core.speculator is not None:
            self.core.speculator.drafter.close()
        self.core.executor.close()
        self.core.shards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate answers to all prompts as one batch.

        Args:
            prompts: One text, a list of texts, or a list of lists of token ids.
            sampling: Sampling parameters of all prompts, or a list with one entry per prompt; default:
                ``SamplingParams()``.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidRequestError: A prompt or parameter is invalid; nothing was generated. Names the field.
            InternalError: A step failed.
        """
        many: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise InvalidRequestError(f"{len(each)} sampling parameters for {len(many)} prompts", field="sampling")
        jobs = [self._make_job(prompt, params) for prompt, params in zip(many, each, strict=True)]
        self._run(jobs)
        return [job.output for job in jobs]

    def _make_job(self, prompt: str | Sequence[int], sampling: SamplingParams) -> _Job:
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError(f"{self.config.model} has no tokenizer: give token ids", field="prompt")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        if sampling.stop and self.tokenizer is None:
            raise InvalidRequestError(f"{self.config.model} has no tokenizer for stop strings", field="stop")
        if not all(sampling.stop):
            raise InvalidRequestError("a stop string must not be empty", field="stop")
        grammars = self.core.grammars
        constraint = None
        if sampling.grammar is not None and grammars is not None:
            sampling.grammar.validate(vocab_size=self.core.executor.vocab_size)
            constraint = grammars.constraint(sampling.grammar)
        request = EngineRequest(RequestId(f"llm-{next(self._ids)}"), ids, sampling, constraint=constraint)
        self.core.validate(request)
        return _Job(request, text, self.tokenizer)

    def _run(self, jobs: list[_Job]) -> None:
        """Add requests while the queue has room, and step the engine until all jobs are done."""
        todo = iter(jobs)
        live: dict[RequestId, _Job] = {}
        try:
            while True:
                room = max(0, self.config.max_queue - self.core.stats().num_waiting)
                for job in itertools.islice(todo, room):
                    self.core.add_request(job.request)
                    live[job.request.request_id] = job
                if not live:
                    return
                for output in self.core.step():
                    self._process_output(live, output)
        finally:
            for request_id in live:
                self.core.abort(request_id)
            while self.core.has_work():
                self.core.step()

    def _process_output(self, live: dict[RequestId, _Job], output: SequenceOutput) -> None:
        job = live.get(output.request_id)
        if job is None:
            return
        if output.finish_reason is FinishReason.ERROR:
            raise InternalError(f"the model failed: {output.error}")
        job.add_output(output)
        if job.done:
            del live[output.request_id]
            self.core.abort(output.request_id)


class _Job:
    """One request and its results so far."""

    def __init__(self, request: EngineRequest, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.request = request
        results = [SequenceResult(index) for index in range(request.sampling.n)]
        self.output = RequestOutput(prompt, request.prompt_token_ids, results)
        stops = StopStrings(request.sampling.stop)
        self._streams = [
            (IncrementalDetokenizer(tokenizer), StopStringMatcher(stops)) if tokenizer is not None else None
            for _ in results
        ]

    @property
    def done(self) -> bool:
        return all(result.finish_reason is not None for result in self.output.outputs)

    def add_output(self, output: SequenceOutput) -> None:
        """Add a step's output, unless a stop string ended the sequence before."""
        result = self.output.outputs[output.index]
        if result.finish_reason is not None:
            return
        if output.index == 0:
            self.output.metrics = output.metrics or self.output.metrics
            self.output.prompt_logprobs = output.prompt_logprobs or self.output.prompt_logprobs
        result.token_ids += output.token_ids
        if output.logprobs is not None:
            result.logprobs = (result.logprobs or []) + output.logprobs
        result.finish_reason = output.finish_reason
        result.stop_reason = output.stop_token_id
        stream = self._streams[output.index]
        if stream is not None:
            self._add_text(result, *stream, output)

    def _add_text(
        self,
        result: SequenceResult,
        detokenizer: IncrementalDetokenizer,
        matcher: StopStringMatcher,
        output: SequenceOutput,
    ) -> None:
        # A token that ends the sequence is no part of its text, whether or not it counts as special.
        shown = output.token_ids[:-1] if output.stop_token_id is not None else output.token_ids
        text = detokenizer.push(shown)
        if output.finish_reason is not None:
            text += detokenizer.flush()
        result.text += matcher.push(text)
        if matcher.matched is not None:
            result.finish_reason = FinishReason.STOP
            result.stop_reason = matcher.matched
        elif output.finish_reason is not None:
            result.text += matcher.flush()


def _load_tokenizer(model: str) -> Tokenizer | None:
    directory = model_directory(model)
    return None if read_file(directory / "tokenizer.json") is None else Tokenizer.load(directory)
