"""Offline inference: a list of prompts in, a list of answers out, with the engine that services use."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from baton.config import EngineConfig
from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.request import EngineRequest, RequestMetrics, SequenceOutput
from baton.errors import InternalError, InvalidRequestError
from baton.terminal import Step, progress
from baton.tokenizer import IncrementalDetokenizer, StopStringMatcher, StopStrings, TextModel, Tokenizer
from baton.tokenizer.generation_config import sampling_defaults
from baton.tokenizer.model_files import model_directory, read_file
from baton.types import FinishReason, RequestId, SamplingParams, TokenLogprob

Message = Mapping[str, Any]
"""A message of a conversation: ``{"role": "user", "content": "..."}``."""


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
        directory = model_directory(self.config.model)
        has_tokenizer = read_file(directory / "tokenizer.json") is not None
        self._text_model = TextModel.load(directory) if has_tokenizer else None
        self._sampling_defaults = (
            sampling_defaults(directory) if self._text_model is None else self._text_model.sampling_defaults
        )
        self.tokenizer = None if self._text_model is None else self._text_model.tokenizer
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
        *,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Generate answers to all prompts as one batch.

        Args:
            prompts: One text, a list of texts, or a list of lists of token ids.
            sampling: Sampling parameters of all prompts, or a list with one entry per prompt; default: those of
                :meth:`get_default_sampling_params`, with ``max_tokens`` up to what the context has room for.
            show_progress: Show a progress bar on standard error while it is a terminal.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidRequestError: A prompt or parameter is invalid; nothing was generated. Names the field.
            InternalError: A step failed.
        """
        many: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._generate([self._encode(prompt) for prompt in many], sampling, show_progress)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Generate answers to conversations as one batch, with the model's chat template.

        Names of special tokens in messages are plain text, as in the services. Calls of tools stay part of the text.

        Args:
            conversations: Messages of one conversation, each with ``role`` and ``content``, or a list of conversations.
            sampling: As for :meth:`generate`.
            tools: Definitions of the tools that the model may call, as OpenAI's interface describes them.
            add_generation_prompt: End the prompt with what begins the assistant's answer.
            continue_final_message: Let the model go on with the last message; needs ``add_generation_prompt=False``.
            chat_template_kwargs: More variables for the template, such as ``enable_thinking``.
            show_progress: As for :meth:`generate`.

        Returns:
            One output per conversation, in order; ``prompt`` is the rendered text.

        Raises:
            InvalidRequestError: A message or parameter is invalid, or the model has no chat template; nothing was
                generated. Names the field.
            InternalError: A step failed.
        """
        if self._text_model is None:
            raise InvalidRequestError(f"{self.config.model} has no tokenizer: give token ids", field="messages")
        is_one = bool(conversations) and all(isinstance(each, Mapping) for each in conversations)
        prompts: list[tuple[str | None, list[int]]] = []
        for messages in cast(Sequence[Sequence[Message]], [conversations] if is_one else conversations):
            text = self._text_model.chat_text(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
                tools=tools,
            )
            prompts.append((text.text, self._text_model.encode(text, add_special_tokens=False).tolist()))
        return self._generate(prompts, sampling, show_progress)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the model's ``generation_config.json`` recommends, else the usual ones."""
        return SamplingParams(**self._sampling_defaults)

    def _default_sampling(self, num_prompt: int) -> SamplingParams:
        """Return the default parameters for a prompt: the recommended number of tokens may be more than fit."""
        sampling = self.get_default_sampling_params()
        if sampling.max_tokens is not None:
            sampling.max_tokens = max(1, min(sampling.max_tokens, self.core.executor.max_model_len - num_prompt))
        return sampling

    def _encode(self, prompt: str | Sequence[int]) -> tuple[str | None, list[int]]:
        """Return a prompt's text, if it has one, and its token ids."""
        if not isinstance(prompt, str):
            return None, list(prompt)
        if self.tokenizer is None:
            raise InvalidRequestError(f"{self.config.model} has no tokenizer: give token ids", field="prompt")
        return prompt, self.tokenizer.encode(prompt)

    def _generate(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
    ) -> list[RequestOutput]:
        if sampling is None:
            each = [self._default_sampling(len(ids)) for _, ids in prompts]
        else:
            each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidRequestError(f"{len(each)} sampling parameters for {len(prompts)} prompts", field="sampling")
        jobs = [self._make_job(*prompt, params) for prompt, params in zip(prompts, each, strict=True)]
        with progress() if show_progress else contextlib.nullcontext() as step:
            self._run(jobs, step)
        return [job.output for job in jobs]

    def _make_job(self, text: str | None, ids: list[int], sampling: SamplingParams) -> _Job:
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

    def _run(self, jobs: list[_Job], show: Step | None) -> None:
        """Add requests while the queue has room, and step the engine until all jobs are done.

        Args:
            jobs: The requests.
            show: Called after each request that is done; ``None``: nothing is shown.
        """
        todo = iter(jobs)
        num_done = 0
        num_tokens = 0
        started_s = time.perf_counter()
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
                    num_tokens += len(output.token_ids)
                    if not self._process_output(live, output):
                        continue
                    num_done += 1
                    if show is not None:
                        rate = num_tokens / (time.perf_counter() - started_s)
                        show(f"{num_done}/{len(jobs)} prompts, {rate:,.0f} tokens/s", len(jobs) - num_done)
        finally:
            for request_id in live:
                self.core.abort(request_id)
            while self.core.has_work():
                self.core.step()

    def _process_output(self, live: dict[RequestId, _Job], output: SequenceOutput) -> bool:
        """Add a step's output to its request; returns whether the request is done with it."""
        job = live.get(output.request_id)
        if job is None:
            return False
        if output.finish_reason is FinishReason.ERROR:
            raise InternalError(f"the model failed: {output.error}")
        job.add_output(output)
        if job.done:
            del live[output.request_id]
            self.core.abort(output.request_id)
        return job.done


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
