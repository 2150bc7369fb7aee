"""Next-token layers of checkpoints as drafters: the engine's tokens as without, drafts as by transformers' modules."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.equality import mixed_prompts
from tests.support.models.next_token import FORMS, NextToken, change_tensor, write_next_token
from transformers.modeling_layers import MtpModel

from baton.config import EngineConfig
from baton.engine.llm import LLM, RequestOutput
from baton.engine.models.next_token import NEXT_TOKEN_NAMES
from baton.engine.speculation.methods import load_drafter
from baton.errors import ConfigError
from baton.types import SamplingParams

VOCAB, NEW_TOKENS = 512, 12
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=1),
    SamplingParams(seed=2, temperature=1.3, top_p=0.9, max_tokens=NEW_TOKENS),
    SamplingParams(seed=3, temperature=0.7, repetition_penalty=1.3, n=2, max_tokens=NEW_TOKENS, min_tokens=9),
]


def config(target: Path, **options: Any) -> EngineConfig:
    values = {"dtype": "float32", "kv_blocks": 96, "max_num_batched_tokens": 96, "prefill_chunk": 32, **options}
    return EngineConfig(model=str(target), **values)


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


def recorded(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """Have an engine's drafter note each sequence's tokens and the draft for it; returns where."""
    assert llm.core.speculator is not None
    drafter, drafts = llm.core.speculator.drafter, list[tuple[list[int], list[int]]]()
    propose = drafter.propose

    def recording(wanted: Any) -> Any:
        found = propose(wanted)
        for (sequence, _), proposal in zip(wanted, found, strict=True):
            drafts.append((sequence.buffer[: sequence.num_tokens].tolist(), list(proposal.token_ids)))
        return found

    drafter.propose = recording  # type: ignore[method-assign]
    return drafts


def test_all_types_are_tested() -> None:
    assert set(FORMS) == set(NEXT_TOKEN_NAMES)


@pytest.mark.parametrize("kind", sorted(FORMS))
@pytest.mark.filterwarnings("ignore")
def test_answers_are_those_without_and_drafts_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """Over prompts in several chunks, longer than a window, and behind drafts that were refused."""
    made = write_next_token(tmp_path, kind)
    prompts = mixed_prompts(11, VOCAB, count=len(SAMPLINGS), longest=70)
    prompts.sort(key=len, reverse=True)
    with LLM(config(made.folder)) as llm:
        plain = tokens_of(llm.generate(prompts, SAMPLINGS))
    with LLM(config(made.folder, speculative="mtp", speculative_tokens=3)) as llm:
        drafts = recorded(llm)
        assert tokens_of(llm.generate(prompts[:1], SAMPLINGS[:1])) == plain[:1]
        assert len(drafts) > 2
        assert sum(len(draft) for _, draft in drafts[:-2]) > 2 * (len(drafts) - 2)  # an end token ends a draft
        for tokens, draft in drafts:
            assert draft == made.draft(tokens, len(draft))
        assert tokens_of(llm.generate(prompts, SAMPLINGS)) == plain
        assert llm.core.speculator is not None
        assert not llm.core.speculator.stats.faults
        assert llm.core.speculator.stats.drafted.total() > 2 * NEW_TOKENS
        llm.core.check_integrity()


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> NextToken:
    return write_next_token(tmp_path_factory.mktemp("next") / "deepseek_v3", "deepseek_v3")


def test_what_drafts_are_compared_with_is_what_transformers_drafts(deepseek: NextToken) -> None:
    """The order of embedding and state, and that the state behind the last norm goes on, are its conventions."""
    theirs = MtpModel(deepseek.main, 1)
    layer: Any = theirs.layers[0]
    layer.mtp_block.load_state_dict(deepseek.one.model.layers[0].state_dict())
    for module, weight in zip(
        (layer.enorm, layer.hnorm, layer.eh_proj), (*deepseek.norms, deepseek.projection), strict=True
    ):
        module.weight.data = weight
    layer.post_norm.load_state_dict(deepseek.one.model.norm.state_dict())
    prompt = max(mixed_prompts(5, VOCAB, count=2, longest=40), key=len)
    with torch.inference_mode():
        hidden = deepseek.main(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1]
        count = len(prompt) - 1
        states = theirs.eval().forward_layer(
            0, hidden[:, :-1], torch.arange(count)[None], None, input_ids=torch.tensor([prompt[1:]])
        )
    assert torch.allclose(states[0], deepseek.states(prompt[1:], hidden[0, :-1]), atol=1e-4)


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_a_layer_is_quantized_and_packed_as_the_others_are(deepseek: NextToken, options: dict[str, str]) -> None:
    prompts = mixed_prompts(11, VOCAB, count=3, longest=70)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    with LLM(config(deepseek.folder, speculative="mtp", speculative_tokens=2, **options)) as llm:
        drafts = recorded(llm)
        llm.generate(prompts, [greedy] * len(prompts))
        assert llm.core.speculator is not None
        assert not llm.core.speculator.stats.faults
    same = [deepseek.draft(tokens, 1) == draft[:1] for tokens, draft in drafts if draft]
    assert len(same) > 12
    assert sum(same) > 0.5 * len(same)  # of a random model's 512 tokens


@pytest.mark.parametrize(
    ("name", "change", "field", "said"),
    [
        ("model.layers.4.eh_proj.weight", None, "speculative", "has no model.layers.4.eh_proj.weight"),
        ("model.layers.4.enorm.weight", None, "speculative", "has no model.layers.4.enorm.weight"),
        (
            "model.layers.4.shared_head.norm.weight",
            None,
            "model",
            "layer: model.layers.4.shared_head.norm.weight",
        ),
        (
            "model.layers.4.input_layernorm.weight",
            None,
            "model",
            "layer: model.layers.4.input_layernorm.weight",
        ),
        ("model.layers.4.hnorm.weight", lambda t: t * float("nan"), "model", "4.hnorm.weight has values that are not"),
        ("model.layers.4.self_attn.o_proj.weight", lambda t: t / 0, "model", "4.self_attn.o_proj.weight has values"),
        ("model.layers.4.eh_proj.weight", lambda t: t[:, 1:], "model", "4.eh_proj.weight: must be [64, 128]"),
        ("model.layers.4.input_layernorm.weight", lambda t: t[1:], "model", "model.layers.4.input_layernorm.weight"),
        ("model.layers.4.hnorm.weight", lambda t: t.to(torch.int32), "model", "4.hnorm.weight: is int32"),
    ],
)
def test_a_layer_that_lacks_something_or_is_damaged_is_refused(
    deepseek: NextToken, tmp_path: Path, name: str, change: Any, field: str, said: str
) -> None:
    target = tmp_path / "damaged"
    shutil.copytree(deepseek.folder, target)
    change_tensor(target, name, change)
    with pytest.raises(ConfigError) as caught, LLM(config(target, speculative="mtp")):
        pass
    assert (caught.value.field, said in caught.value.message) == (field, True), caught.value.message


def test_a_model_without_such_layers_and_a_divided_one_are_refused(deepseek: NextToken, tmp_path: Path) -> None:
    from tests.support.models.checkpoints import make_checkpoint

    llama = make_checkpoint(tmp_path / "llama", "llama")
    with pytest.raises(ConfigError) as caught, LLM(config(llama, speculative="mtp")):
        pass
    said = "models of type llama have no next-token layers"
    assert (caught.value.field, said in caught.value.message) == ("speculative", True), caught.value.message
    with pytest.raises(ConfigError) as caught:
        load_drafter(config(deepseek.folder, speculative="mtp", tp=2), SimpleNamespace())  # type: ignore[arg-type]
    said = "works with tp 1 and pp 1 only"
    assert (caught.value.field, said in caught.value.message) == ("speculative", True), caught.value.message
    with pytest.raises(ConfigError) as caught:
        config(deepseek.folder, speculative="mtp", speculative_model="x")
    assert caught.value.field == "speculative_model"
