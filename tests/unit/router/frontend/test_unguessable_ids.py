"""Ids and seeds that one tenant sees tell nothing of the next tenant's: a Mersenne Twister is read off 156 ids."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry
from tests.support.scripted import ScriptedDispatcher

from baton.tokenizer import TextModelCache
from baton.tracing import Span
from baton.types import SamplingParams
from baton_router.frontend.http.middleware import request_id
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.output_processor import GenerationMetrics
from baton_router.processor.text_request import TextRequest

WORDS, IDS = 624, 156


class Exporter:
    def export(self, span: Span) -> None:
        """Nothing is kept."""


def untempered(word: int) -> int:
    """Return the word of a Mersenne Twister's state of which an output was made."""
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    low = word
    for _ in range(5):
        low = word ^ ((low << 7) & 0x9D2C5680)
    high = low
    for _ in range(3):
        high = low ^ (high >> 11)
    return high


def generator_behind(numbers: list[int], bits: int) -> random.Random:
    """Return the ``random.Random`` that would have made these numbers, as it is after the last of them."""
    words = [untempered(number >> 32 * at & 0xFFFFFFFF) for number in numbers for at in range(bits // 32)]
    guess = random.Random()
    guess.setstate((3, (*words[-WORDS:], WORDS), None))
    return guess


def test_a_request_id_is_not_computed_from_those_before() -> None:
    guess = generator_behind([int(request_id([]), 16) for _ in range(IDS)], 128)
    assert int(request_id([]), 16) != guess.getrandbits(128)


def test_the_ids_of_a_span_are_not_computed_from_those_before() -> None:
    numbers = []
    for trace_id, span_id in (span_ids() for _ in range(WORDS // 6)):
        numbers += [trace_id >> 32 * at & 0xFFFFFFFF for at in range(4)] + [span_id & 0xFFFFFFFF, span_id >> 32]
    guess = generator_behind(numbers, 32)
    assert span_ids() != (guess.getrandbits(128), guess.getrandbits(64))


def span_ids() -> tuple[int, int]:
    context = Span("request", exporter=Exporter()).context
    assert context is not None
    return int(context.trace_id, 16), int(context.span_id, 16)


async def test_anothers_id_and_seed_are_not_computed_from_ones_own_ids() -> None:
    text = InputProcessor(ScriptedDispatcher(), TextModelCache(), GenerationMetrics(CollectorRegistry()))
    mine = []
    for _ in range(IDS):  # with a seed of one's own, ids alone are drawn
        request = TextRequest("def", SamplingParams(max_tokens=1, seed=1))
        mine.append(int((await text.prepare(request)).routed.request_id.rsplit("-", 1)[1], 16))
    guess = generator_behind(mine, 128)
    guesses = {guess.getrandbits(63), guess.getrandbits(128)}
    other = (await text.prepare(TextRequest("def", SamplingParams(max_tokens=1)))).routed
    assert other.sampling.seed not in guesses
    assert int(other.request_id.rsplit("-", 1)[1], 16) not in guesses
