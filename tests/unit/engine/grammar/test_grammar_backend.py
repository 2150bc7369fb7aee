"""A backend of another package, found by entry point: the answers are those of the built-in one."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.models.toy_runner import ToyRunner
from tests.support.tiny_grammar import EOS, VOCAB, Language, make_compiler, text_of

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.grammar.base import MatcherFamily
from baton.engine.grammar.constraint import GrammarCompiler, load_compiler
from baton.engine.request import EngineRequest
from baton.errors import ConfigError, InvalidRequestError
from baton.grammar import choice_grammar, regex_grammar
from baton.types import Grammar, RequestId, SamplingParams
from baton_kernels.token_mask import pack_mask

CHOICES = choice_grammar(["abc", "abab", "bca", "c0", "c01"])


class ListMatcher:
    """Follows a list of texts by looking at all of them."""

    def __init__(self, language: Language, taken: Sequence[int] = (), family: MatcherFamily | None = None) -> None:
        self.language, self.taken, self.family = language, list(taken), family or MatcherFamily()
        self.error = ""

    @property
    def allowed(self) -> list[int]:
        return self.language.allowed(text_of(self.taken))

    @property
    def complete(self) -> bool:
        return self.allowed == [EOS]

    def consume(self, token_ids: Sequence[int]) -> bool:
        for token in token_ids:
            if token not in self.allowed:
                self.error = f"{token} is on no list"
                return False
            self.taken.append(token)
        return True

    def try_consume(self, token_id: int) -> bool:
        return self.allows(token_id) and self.consume([token_id])

    def allows(self, token_id: int) -> bool:
        return token_id in self.allowed

    def forced_tokens(self) -> list[int]:
        return []

    def roll_back(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]

    def fork(self) -> ListMatcher:
        return ListMatcher(self.language, self.taken, self.family)


class ListBackend:
    """Knows choices, and nothing else."""

    def __init__(self, model: Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        if vocab_size != VOCAB or eos_token_ids != {EOS}:
            raise ConfigError(f"{model} is another model", field="grammar_backend")

    def compile(self, grammar: Grammar) -> ListMatcher:
        if grammar.kind != "choice":
            raise InvalidRequestError(f"grammar: a {grammar.kind} is no list", field="grammar")
        return ListMatcher(Language("", map(json.loads, re.findall(r'"(?:\\.|[^"\\])+"', grammar.text))))

    def fill_mask(self, matcher: ListMatcher, mask: npt.NDArray[np.uint32]) -> None:
        mask[:] = pack_mask(np.isin(np.arange(VOCAB), matcher.allowed))

    def fill_masks(self, matchers: Sequence[ListMatcher], masks: npt.NDArray[np.uint32]) -> None:
        for matcher, mask in zip(matchers, masks, strict=True):
            self.fill_mask(matcher, mask)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "lists-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lists\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[baton.grammars]\nlists = {__name__}:ListBackend\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or ModuleType(__name__))
    monkeypatch.setattr(sys.modules[__name__], "ListBackend", ListBackend, raising=False)


def answers(compiler: GrammarCompiler) -> list[list[int]]:
    runner = ToyRunner(block_size=4, vocab_size=VOCAB, eos=EOS)
    core = EngineCore(EngineConfig(block_size=4), runner, runner.make_arena(200), grammars=compiler)
    for seed in range(40):
        sampling = SamplingParams(temperature=float(seed % 2), seed=seed, max_tokens=9, grammar=CHOICES)
        request = EngineRequest(RequestId(str(seed)), [5, 9, 14], sampling, constraint=compiler.constraint(CHOICES))
        core.add_request(request)
    found: dict[str, list[int]] = {str(seed): [] for seed in range(40)}
    while core.has_work():
        for output in core.step():
            assert not output.error
            found[output.request_id] += output.token_ids
    return list(found.values())


@pytest.mark.usefixtures("installed")
def test_answers_are_those_of_the_built_in_backend(tmp_path: Path) -> None:
    compiler = load_compiler("lists", tmp_path, vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))
    assert compiler is not None
    found = answers(compiler)
    assert found == answers(make_compiler(tmp_path))
    assert len({text_of(each) for each in found}) > 2
    with pytest.raises(InvalidRequestError, match="a regex is no list"):
        compiler.constraint(regex_grammar("a"))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "words"), [("lists", "another model"), ("nobody", "not known .*lists, llguidance")])
def test_a_backend_that_cannot_work_or_is_not_there_is_refused_at_start(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_compiler(name, tmp_path, vocab_size=VOCAB + 1, eos_token_ids=frozenset({EOS}))
    assert caught.value.field == "grammar_backend"
