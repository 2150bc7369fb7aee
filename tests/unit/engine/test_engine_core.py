"""The engine core over a toy model: tokens, ends, sampling that survives moves, errors, books."""

from __future__ import annotations

import pytest
from tests.support.models.toy_runner import ToyRunner
from tests.support.preemption import expect_short_outputs

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.request import EngineRequest, SequenceOutput
from baton.engine.runner.input_batch import ForwardBatch, ForwardOutput
from baton.engine.scheduler import PROMPT_LOGPROB_ROWS
from baton.errors import ConfigError, InvalidRequestError
from baton.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KVEvent
from baton.seeds import sequence_seed
from baton.types import BlockHash, FinishReason, RequestId, SamplingParams, Tenant

BLOCK = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
PROMPT = [5, 9, 14, 33, 21, 7, 50, 3, 18, 42, 11]


class Engine:
    """An engine, and all it has said."""

    def __init__(self, num_blocks: int = 64, **options: object) -> None:
        values = {"block_size": BLOCK, "prefill_chunk": 8, "max_num_batched_tokens": 24, "max_num_seqs": 8, **options}
        self.config = EngineConfig(**values)
        self.runner = ToyRunner(block_size=BLOCK)
        self.events: list[KVEvent] = []
        self.core = EngineCore(
            self.config, self.runner, self.runner.make_arena(num_blocks), on_events=self.events.extend
        )
        self.outputs: list[SequenceOutput] = []

    def add(self, name: str, prompt: list[int], sampling: SamplingParams = GREEDY, **fields: object) -> None:
        self.core.add_request(EngineRequest(RequestId(name), prompt, sampling, **fields))  # type: ignore[arg-type]

    def step(self, count: int = 1) -> list[SequenceOutput]:
        new = [output for _ in range(count) for output in self.core.step()]
        self.outputs += new
        return new

    def run(self) -> None:
        for _ in range(1000):
            if not self.core.has_work():
                self.core.check_integrity()
                assert self.core.stats().blocks_active == 0
                return
            self.step()
        raise AssertionError("no end in sight")

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [t for o in self.outputs if (o.request_id, o.index) == (name, index) for t in o.token_ids]

    def end(self, name: str, index: int = 0) -> SequenceOutput:
        (end,) = [o for o in self.outputs if (o.request_id, o.index) == (name, index) and o.finish_reason]
        return end


# Tokens and ends


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 40])
def test_greedy_tokens_are_those_of_the_model(length: int) -> None:
    engine = Engine()
    prompt = (PROMPT * 4)[:length]
    engine.add("a", prompt)
    engine.run()
    assert engine.tokens("a") == engine.runner.greedy(prompt, 10)


def test_end_token_ends_and_is_reported() -> None:
    engine = Engine()
    free = engine.runner.greedy(PROMPT, 10, ignore_eos=True)
    engine.runner.eos_token_ids = frozenset({free[4]})
    at = free.index(free[4])
    engine.add("a", PROMPT)
    engine.add("ignored", PROMPT, GREEDY.replace(ignore_eos=True))
    engine.run()
    assert engine.tokens("a") == free[: at + 1]
    assert (engine.end("a").finish_reason, engine.end("a").stop_token_id) == (FinishReason.STOP, free[4])
    assert engine.tokens("ignored") == free
    assert (engine.end("ignored").finish_reason, engine.end("ignored").stop_token_id) == (FinishReason.LENGTH, None)


def test_stop_token_ids_and_min_tokens() -> None:
    engine = Engine()
    free = engine.runner.greedy(PROMPT, 10, ignore_eos=True)
    stop = free[1]
    engine.add("a", PROMPT, GREEDY.replace(stop_token_ids=(stop,)))
    engine.add("later", PROMPT, GREEDY.replace(stop_token_ids=(stop,), min_tokens=5))
    engine.run()
    assert engine.tokens("a") == free[:2]
    assert engine.end("a").stop_token_id == stop
    assert stop not in engine.tokens("later")[:5]
    assert len(engine.tokens("later")) >= 5


def test_repetition_penalty_is_that_of_a_plain_loop() -> None:
    engine = Engine()
    sampling = GREEDY.replace(repetition_penalty=1.8, presence_penalty=0.7, frequency_penalty=0.4, max_tokens=16)
    engine.add("a", PROMPT, sampling)
    engine.run()
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + 16:
        logits = engine.runner.reference_logits(tokens)[-1]
        for token in set(tokens):
            logits[token] = logits[token] / 1.8 if logits[token] > 0 else logits[token] * 1.8
        for token in set(tokens[len(PROMPT) :]):
            logits[token] -= 0.7 + 0.4 * tokens[len(PROMPT) :].count(token)
        tokens.append(int(logits.argmax()))
    assert engine.tokens("a") == tokens[len(PROMPT) :]


def test_logprobs_come_with_each_token() -> None:
    engine = Engine()
    engine.add("a", PROMPT, GREEDY.replace(logprobs=2, max_tokens=4))
    engine.run()
    logprobs = [entry for output in engine.outputs for entry in output.logprobs or []]
    tokens = engine.tokens("a")
    assert [entry.token_id for entry in logprobs] == tokens
    for i, entry in enumerate(logprobs):
        reference = engine.runner.reference_logits(PROMPT + tokens[:i])[-1].log_softmax(-1)
        assert entry.logprob == pytest.approx(float(reference[entry.token_id]), abs=1e-5)
        assert entry.top[0] == (entry.token_id, entry.logprob)


@pytest.mark.parametrize("num_blocks", [64, 8])
def test_prompt_logprobs_cover_the_prompt_whatever_the_chunks_and_the_cache(num_blocks: int) -> None:
    engine = Engine(num_blocks, max_num_batched_tokens=9)
    prompt = (PROMPT * 2)[:21]
    engine.add("warm", prompt, GREEDY.replace(max_tokens=2))
    engine.run()
    engine.add("other", PROMPT[:5], GREEDY.replace(max_tokens=8))
    engine.add("a", prompt, GREEDY.replace(prompt_logprobs=1, max_tokens=8))
    engine.run()
    (found,) = [o.prompt_logprobs for o in engine.outputs if o.prompt_logprobs is not None]
    reference = engine.runner.reference_logits(prompt).log_softmax(-1)
    assert found[0] is None
    assert len(found) == len(prompt)
    for i, entry in enumerate(found[1:]):
        assert entry is not None
        assert entry.token_id == prompt[i + 1]
        assert entry.logprob == pytest.approx(float(reference[i, prompt[i + 1]]), abs=1e-5)
        assert entry.top[0][0] == int(reference[i].argmax())
    assert engine.tokens("a") == engine.runner.greedy(prompt, 8)


# n sequences


@pytest.mark.parametrize("caching", [True, False])
def test_n_sequences_are_those_of_single_requests_with_their_seeds(caching: bool) -> None:
    engine = Engine(prefix_caching=caching)
    sampling = SamplingParams(max_tokens=6, seed=99, n=3)
    engine.add("many", PROMPT, sampling)
    engine.run()
    for index in range(3):
        engine.add(f"single-{index}", PROMPT, sampling.replace(n=1, seed=sequence_seed(99, index)))
    engine.run()
    many = [engine.tokens("many", index) for index in range(3)]
    assert many == [engine.tokens(f"single-{index}") for index in range(3)]
    assert len(set(map(tuple, many))) == 3
    assert engine.end("many", 2).metrics is not None
    assert engine.end("many", 2).metrics.cached_tokens == (8 if caching else 0)  # type: ignore[union-attr]


def test_abort_of_n_ends_each_once_also_those_not_begun() -> None:
    engine = Engine()
    engine.add("many", PROMPT * 3, GREEDY.replace(n=4))
    engine.step()
    assert engine.core.abort(RequestId("many"))
    engine.run()
    assert [engine.end("many", index).finish_reason for index in range(4)] == [FinishReason.ABORT] * 4
    assert not engine.core.abort(RequestId("many"))


# Sampling goes on identically


def test_sampling_survives_preemption_and_migration() -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.3, top_p=0.95, seed=5, frequency_penalty=0.3)
    roomy = Engine()
    for i in range(3):
        roomy.add(str(i), PROMPT[i:], sampling)
    roomy.run()
    tight = Engine(12)
    expect_short_outputs(tight.core)
    for i in range(3):
        tight.add(str(i), PROMPT[i:], sampling)
    tight.run()
    assert tight.core.stats().num_preemptions > 0
    moved = Engine()
    for i in range(3):
        done = roomy.tokens(str(i))[: 3 + 5 * i]
        moved.add(str(i), PROMPT[i:], sampling, output_token_ids=done)
    moved.run()
    for i in range(3):
        tokens = roomy.tokens(str(i))
        assert tight.tokens(str(i)) == tokens
        assert moved.tokens(str(i)) == tokens[3 + 5 * i :]
        assert moved.end(str(i)).finish_reason == roomy.end(str(i)).finish_reason


def test_a_request_without_seed_samples_alike_on_like_engines_and_unlike_others() -> None:
    sampling = SamplingParams(max_tokens=12)
    engines = [Engine(seed=1), Engine(seed=1), Engine(seed=2)]
    for engine in engines:
        engine.add("a", PROMPT, sampling)
        engine.add("b", PROMPT, sampling)
        engine.run()
    first, second, third = engines
    assert first.tokens("a") == second.tokens("a")
    assert first.tokens("a") != first.tokens("b")
    assert first.tokens("a") != third.tokens("a")


# Bad input


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("prompt", {"prompt_token_ids": []}),
        ("prompt", {"prompt_token_ids": [64]}),
        ("prompt", {"prompt_token_ids": [-1]}),
        ("prompt", {"prompt_token_ids": [1.5]}),
        ("prompt", {"prompt_token_ids": [[1], [2, 3]]}),
        ("prompt", {"prompt_token_ids": [2**70]}),
        ("prompt", {"prompt_token_ids": [5] * 256}),
        ("max_tokens", {"sampling": GREEDY.replace(max_tokens=246)}),
        ("temperature", {"sampling": GREEDY.replace(temperature=-1.0)}),
        ("logit_bias", {"sampling": GREEDY.replace(logit_bias={64: 1.0})}),
        ("stop_token_ids", {"sampling": GREEDY.replace(stop_token_ids=(64,))}),
        ("output_token_ids", {"output_token_ids": [99]}),
        ("output_token_ids", {"output_token_ids": [5] * 10}),
        ("n", {"output_token_ids": [5], "sampling": GREEDY.replace(n=2)}),
        ("request_id", {"request_id": ""}),
        ("request_id", {"request_id": "taken"}),
    ],
)
def test_bad_input_names_its_field_and_takes_nothing(field: str, change: dict[str, object]) -> None:
    engine = Engine()
    engine.add("taken", PROMPT)
    values = {"request_id": "a", "prompt_token_ids": PROMPT, "sampling": GREEDY, **change}
    with pytest.raises(InvalidRequestError) as caught:
        engine.core.add_request(EngineRequest(**values))  # type: ignore[arg-type]
    assert caught.value.field == field
    assert engine.core.stats().num_waiting == 1
    engine.run()
    assert engine.tokens("taken") == engine.runner.greedy(PROMPT, 10)


def test_longest_sequence_is_clamped_to_the_pool_and_can_be_reached() -> None:
    engine = Engine(6)
    assert engine.core.max_model_len == 24
    with pytest.raises(InvalidRequestError) as caught:
        engine.add("a", PROMPT, GREEDY.replace(max_tokens=14))
    assert caught.value.field == "max_tokens"
    engine.add("a", PROMPT, SamplingParams(temperature=0.0, ignore_eos=True))
    engine.run()
    assert engine.tokens("a") == engine.runner.greedy(PROMPT, 13, ignore_eos=True)


def test_configuration_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(max_model_len=1000)
    assert caught.value.field == "max_model_len"
    with pytest.raises(ConfigError) as caught:
        Engine(block_size=8)
    assert caught.value.field == "block_size"


# Failures


def test_a_failed_step_ends_its_sequences_and_no_others() -> None:
    engine = Engine(max_num_seqs=2)
    for name in ("a", "b", "c"):
        engine.add(name, PROMPT)
    engine.step(3)
    engine.runner.fail_next = RuntimeError("the accelerator is on fire")
    engine.run()
    for name in ("a", "b"):
        assert engine.end(name).finish_reason is FinishReason.ERROR
        assert engine.end(name).error == "RuntimeError: the accelerator is on fire"
    assert engine.tokens("c") == engine.runner.greedy(PROMPT, 10)


def test_a_failure_before_the_first_token_ends_all_n() -> None:
    engine = Engine()
    engine.add("many", PROMPT, GREEDY.replace(n=3))
    engine.runner.fail_next = RuntimeError("no")
    engine.run()
    assert [engine.end("many", index).finish_reason for index in range(3)] == [FinishReason.ERROR] * 3


@pytest.mark.parametrize("sampling", [GREEDY, GREEDY.replace(logprobs=1), SamplingParams(max_tokens=10, seed=1)])
def test_logits_that_are_not_finite_end_their_own_request(sampling: SamplingParams) -> None:
    engine = Engine()
    engine.runner.poisoned = frozenset({62})
    engine.add("good", PROMPT, GREEDY.replace(logit_bias={62: -100.0}))
    engine.add("bad", [5, 6, 62], sampling)
    engine.run()
    assert engine.end("bad").finish_reason is FinishReason.ERROR
    assert "not finite" in (engine.end("bad").error or "")
    assert len(engine.tokens("good")) == 10


@pytest.mark.parametrize("in_prompt", [True, False])
def test_kv_that_led_to_bad_logits_is_not_found_again(*, in_prompt: bool) -> None:
    engine = Engine()
    prompt = (PROMPT * 2)[:20]
    poison = prompt[-1] if in_prompt else engine.runner.greedy(prompt, 10)[5]
    engine.add("warm", prompt[:9], GREEDY.replace(max_tokens=1))
    engine.run()
    engine.runner.poisoned = frozenset({poison})
    engine.add("good", PROMPT[::-1], GREEDY.replace(logit_bias={poison: -100.0}))
    engine.add("bad", prompt)  # its prompt takes several steps
    engine.run()
    assert engine.end("bad").finish_reason is FinishReason.ERROR
    assert "not finite" in (engine.end("bad").error or "")
    assert len(engine.tokens("good")) == 10
    told: set[BlockHash] = set()
    for event in engine.events:
        if isinstance(event, BlocksStored):
            told |= set(event.hashes)
        elif isinstance(event, BlocksRemoved):
            told -= set(event.hashes)
    assert told == {block for run in engine.core.snapshot() for block in run.hashes}
    engine.runner.poisoned = frozenset()
    engine.add("again", prompt)
    engine.run()
    metrics = engine.end("again").metrics
    assert metrics is not None
    assert metrics.cached_tokens == 0
    assert engine.tokens("again") == engine.runner.greedy(prompt, 10)


def test_bad_logits_of_one_of_n_end_each_once() -> None:
    engine = Engine()
    sampling = SamplingParams(max_tokens=8, seed=99, n=3, ignore_eos=True)
    engine.add("free", PROMPT, sampling)
    engine.run()
    free = [engine.tokens("free", index) for index in range(3)]
    found = [
        (t, at) for at, t in enumerate(free[1][:-1]) if not any(t in other[: at + 1] for other in (free[0], free[2]))
    ]
    engine.runner.poisoned = frozenset({found[0][0]})
    engine.add("many", PROMPT, sampling)
    engine.run()
    assert [engine.end("many", index).finish_reason for index in range(3)] == [FinishReason.ERROR] * 3
    assert engine.tokens("many", 1) == free[1][: found[0][1] + 1]
    engine.add("next", PROMPT)
    engine.run()
    assert engine.end("next").metrics.cached_tokens == 0  # type: ignore[union-attr]


def test_abort_while_waiting_and_while_running() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("running", PROMPT)
    engine.add("waiting", PROMPT)
    engine.add("next", PROMPT[:3])
    engine.step(4)
    assert engine.core.abort(RequestId("running"))
    assert engine.core.abort(RequestId("waiting"))
    assert not engine.core.abort(RequestId("unknown"))
    assert not engine.core.release(RequestId("running"))
    engine.run()
    assert engine.end("running").finish_reason is FinishReason.ABORT
    assert engine.tokens("waiting") == []
    assert engine.tokens("next") == engine.runner.greedy(PROMPT[:3], 10)


# Prefix cache


def test_tenants_with_another_salt_share_nothing() -> None:
    engine = Engine()
    for name, salt in (("a", "x"), ("b", "x"), ("c", "y")):
        engine.add(name, PROMPT, cache_salt=salt)
        engine.run()
    cached = [engine.end(name).metrics.cached_tokens for name in "abc"]  # type: ignore[union-attr]
    assert cached == [0, 8, 0]
    stats = engine.core.stats()
    assert (stats.prefix_hit_tokens, stats.prefix_query_tokens) == (8, 33)


@pytest.mark.parametrize(("share", "found"), [(0.0, 0), (0.5, 16)])
def test_a_tenants_flood_leaves_another_ones_prefix_its_share(share: float, found: int) -> None:
    engine = Engine(num_blocks=16, tenant_cache_share=share)  # of four tokens; a half for two is four blocks each
    mine, flooder = list(range(10, 43)), Tenant("flooder")
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.add("first", mine, one, cache_salt="b", tenant=Tenant("patient"))
    engine.run()
    for at in range(20):
        engine.add(f"flood {at}", [(7 * at + i) % 50 + 5 for i in range(13)], one, cache_salt="a", tenant=flooder)
        engine.run()
    engine.add("again", mine, one, cache_salt="b", tenant=Tenant("patient"))
    engine.run()
    assert engine.end("again").metrics.cached_tokens == found  # type: ignore[union-attr]


def test_events_and_snapshot_tell_the_same_cache() -> None:
    engine = Engine(10)
    told: set[BlockHash] = set()
    for start in range(8):
        engine.add(str(start), (PROMPT * 3)[start : start + 17])
        engine.run()
    for event in engine.events:
        if isinstance(event, BlocksStored):
            told |= set(event.hashes)
        elif isinstance(event, BlocksRemoved):
            told -= set(event.hashes)
    assert told == {block_hash for run in engine.core.snapshot() for block_hash in run.hashes}
    assert len(told) == engine.core.stats().blocks_cached > 0
    assert any(isinstance(event, BlocksRemoved) for event in engine.events)
    assert any(len(event.hashes) > 1 for event in engine.events if isinstance(event, BlocksStored))
    engine.core.clear_cache()
    assert engine.events[-1] == CacheCleared()
    engine.add("again", PROMPT)
    engine.run()
    assert engine.end("again").metrics.cached_tokens == 0  # type: ignore[union-attr]


def test_metrics_come_with_the_first_token_and_the_end() -> None:
    engine = Engine()
    engine.add("a", PROMPT)
    engine.run()
    with_metrics = [i for i, output in enumerate(engine.outputs) if output.metrics is not None]
    assert with_metrics == [0, len(engine.outputs) - 1]
    metrics = engine.outputs[-1].metrics
    assert metrics is not None
    assert (metrics.prompt_tokens, metrics.computed_tokens, metrics.cached_tokens) == (11, 11, 0)
    assert 0 <= metrics.queue_us <= metrics.ttft_us
    stats = engine.core.stats()
    assert (stats.prefill_tokens, stats.decode_tokens) == (11, len(engine.tokens("a")))


def test_requests_with_different_adapters_never_share_blocks() -> None:
    engine = Engine()
    prompt = PROMPT * 2
    hits = []
    for name, adapter in (("a", None), ("b", "lora-1"), ("c", "lora-2"), ("d", "lora-1"), ("e", None), ("f", "lora-2")):
        before = engine.core.stats().prefix_hit_tokens
        engine.add(name, prompt, adapter=adapter)
        engine.run()
        hits.append(engine.core.stats().prefix_hit_tokens - before)
    assert hits == [0, 0, 0, 20, 20, 20]
    stored = [event.hashes[0] for event in engine.events if isinstance(event, BlocksStored) and event.parent is None]
    assert len(set(stored)) == 3


@pytest.mark.parametrize("others", [0, 2])
def test_log_probabilities_of_a_long_prompt_are_computed_in_pieces(others: int) -> None:
    """A step never has more rows of logits than the memory profile counts."""
    rows: list[int] = []

    class CountingRunner(ToyRunner):
        def forward(self, batch: ForwardBatch) -> ForwardOutput:
            rows.append(len(batch.logit_rows))
            return super().forward(batch)

    runner = CountingRunner(max_model_len=512)
    core = EngineCore(EngineConfig(block_size=4, max_num_seqs=4), runner, runner.make_arena(512))
    prompts = [[2 + (i * i + 7 * k) % 60 for i in range(300)] for k in range(1 + others)]
    for k, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1)
        core.add_request(EngineRequest(RequestId(str(k)), prompt, params))
    outputs: dict[str, list[SequenceOutput]] = {}
    while core.has_work():
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert max(rows) <= 4 + PROMPT_LOGPROB_ROWS
    for k, prompt in enumerate(prompts):
        tokens = [token for output in outputs[str(k)] for token in output.token_ids]
        assert tokens == runner.greedy(prompt, 3)
        scores = outputs[str(k)][0].prompt_logprobs
        assert scores is not None
        assert [score.token_id for score in scores[1:] if score is not None] == prompt[1:]
    core.check_integrity()
