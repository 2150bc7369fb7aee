"""EAGLE and Medusa heads: the engine's tokens as without them, and what heads draft as they would by plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.equality import References, mixed_prompts
from tests.support.models.draft_heads import as_vllm, eagle_hidden, write_eagle, write_medusa
from transformers import AutoConfig, AutoModelForCausalLM

from baton.config import EngineConfig
from baton.engine.llm import LLM, RequestOutput
from baton.engine.speculation.eagle import EagleDrafter
from baton.engine.speculation.heads import HeadFiles
from baton.engine.speculation.medusa import MedusaHeads
from baton.errors import ConfigError
from baton.types import SamplingParams

VOCAB, NEW_TOKENS = 512, 20
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS),
    SamplingParams(seed=2, temperature=1.3, top_p=0.9, max_tokens=NEW_TOKENS),
    SamplingParams(seed=3, temperature=0.7, repetition_penalty=1.3, n=2, max_tokens=NEW_TOKENS, min_tokens=9),
    SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=1),
]
METHODS = ["eagle", "eagle3", "medusa"]


def write_head(folder: Path, method: str, target: Path) -> Path:
    if method == "medusa":
        return write_medusa(folder, target)
    return write_eagle(folder, target, third=method == "eagle3", drafted=200 if method == "eagle3" else None)


def config(target: Path, **options: Any) -> EngineConfig:
    values = {"dtype": "float32", "kv_blocks": 128, "max_num_batched_tokens": 128, "prefill_chunk": 32, **options}
    return EngineConfig(model=str(target), **values)


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_without_a_head(
    references: References, tmp_path: Path, method: str, architecture: str
) -> None:
    target = references.checkpoint(architecture)
    head = write_head(tmp_path / "head", method, target)
    prompts = mixed_prompts(11, VOCAB, count=len(SAMPLINGS), longest=90)
    with LLM(config(target)) as llm:
        plain = tokens_of(llm.generate(prompts, SAMPLINGS))
    with LLM(config(target, speculative=method, speculative_model=str(head), speculative_tokens=3)) as llm:
        assert tokens_of(llm.generate(prompts, SAMPLINGS)) == plain
        # Again: prompts come from the prefix cache now, so that heads never see most of their hidden states.
        assert tokens_of(llm.generate(prompts, SAMPLINGS)) == plain
        assert llm.core.speculator is not None
        assert not llm.core.speculator.stats.faults
        assert llm.core.speculator.stats.drafted.total() > NEW_TOKENS
        llm.core.check_integrity()
        drafter = llm.core.speculator.drafter
        if isinstance(drafter, EagleDrafter):
            assert not drafter._states
            assert len(drafter._free) == len(set(drafter._free)) == drafter._pool.k.shape[0]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_an_eagle_head_drafts_what_plain_torch_would(references: References, tmp_path: Path, method: str) -> None:
    """Also behind drafts that were refused, and over a prompt that comes in several chunks."""
    target, third = references.checkpoint("llama"), method == "eagle3"
    head = write_head(tmp_path / "head", method, target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tensors = load_file(head / "model.safetensors")
    prompt = max(mixed_prompts(5, VOCAB, count=4, longest=80), key=len)
    assert len(prompt) > 40
    drafts: list[tuple[list[int], list[int]]] = []
    with LLM(config(target, speculative=method, speculative_model=str(head), speculative_tokens=3)) as llm:
        speculator = llm.core.speculator
        assert speculator is not None
        propose = speculator.drafter.propose

        def recording(wanted: Any) -> Any:
            found = propose(wanted)
            for (sequence, _), proposal in zip(wanted, found, strict=True):
                drafts.append((sequence.buffer[: sequence.num_tokens].tolist(), list(proposal.token_ids)))
            return found

        speculator.drafter.propose = recording  # type: ignore[method-assign]
        llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=12))
    assert len(drafts) > 5
    assert all(len(draft) >= 2 for _, draft in drafts[:-2])

    def expected(tokens: list[int], count: int) -> list[int]:
        with torch.inference_mode():
            states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            layers = len(states) - 1
            chosen = (
                [states[i][0] for i in (min(2, layers - 1), layers // 2, max(layers - 3, 0))]
                if third
                else [states[-1][0]]
            )
            known = torch.cat(chosen, -1) @ tensors["fc.weight"].T if third else chosen[0]
            hidden, slots, found = list(known[: len(tokens) - 1]), tokens[1:], list[int]()
            for _ in range(count):
                embedded = model.get_input_embeddings()(torch.tensor(slots))
                out = eagle_hidden(head, embedded, torch.stack(hidden), third=third)[-1]
                if third:
                    x = out * torch.rsqrt(out.pow(2).mean() + 1e-6) * tensors["norm.weight"]
                    best = int((x @ tensors["lm_head.weight"].T).argmax())
                    best += int(tensors["d2t"][best])
                else:
                    best = int((out @ model.get_output_embeddings().weight.T).argmax())
                found.append(best)
                slots = [*slots, best]
                hidden.append(out)
        return found

    for tokens, draft in drafts:
        assert draft == expected(tokens, len(draft))


def test_medusa_heads_in_vllms_form_say_the_same(references: References, tmp_path: Path) -> None:
    target = references.checkpoint("llama")
    plain = write_medusa(tmp_path / "plain", target)
    drafted = torch.arange(1, VOCAB, 3)
    model: Any = SimpleNamespace(text_config=AutoConfig.from_pretrained(target), dtype="float32")

    def load(folder: Path) -> MedusaHeads:
        options = config(target, speculative="medusa", speculative_model=str(folder))
        return MedusaHeads(HeadFiles(options, torch.device("cpu")), model)

    own, hidden = load(plain), torch.randn(5, model.text_config.hidden_size, generator=torch.manual_seed(1))
    same = load(as_vllm(tmp_path / "same", plain))
    fewer = load(as_vllm(tmp_path / "fewer", plain, drafted))
    shared = load(as_vllm(tmp_path / "shared", plain, drafted, shared=True))
    assert len(own) == len(same) == len(fewer) == len(shared) == 3
    for head in range(3):
        logits = own.logits(head, hidden)
        assert torch.equal(same.logits(head, hidden), logits)
        assert torch.allclose(fewer.logits(head, hidden)[:, drafted], logits[:, drafted], atol=1e-5)
        others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, drafted, value=False)
        assert bool((fewer.logits(head, hidden)[:, others] == -torch.inf).all())
        equal = torch.allclose(shared.logits(head, hidden)[:, drafted], logits[:, drafted], atol=1e-3)
        assert equal == (head == 0)  # the others have the first one's output layer
    damaged = as_vllm(tmp_path / "damaged", plain, drafted)
    damage(damaged, "token_map", lambda tokens: tokens + VOCAB)
    with pytest.raises(ConfigError, match="token_map leads out of the vocabulary") as caught:
        load(damaged)
    assert caught.value.field == "speculative_model"


def damage(folder: Path, name: str, change: Any) -> None:
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path)


def setting(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("method", "wrong", "said"),
    [
        ("eagle", lambda f: setting(f, hidden_size=7), "hidden_size is 7"),
        ("eagle", lambda f: setting(f, vocab_size=511), "vocab_size is 511"),
        ("eagle", lambda f: setting(f, num_key_value_heads=3), "KV heads"),
        ("eagle3", lambda f: setting(f, num_attention_heads="many"), "num_attention_heads is 'many'"),
        ("eagle3", lambda f: setting(f, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 99]}), "99"),
        ("eagle3", lambda f: damage(f, "d2t", lambda t: t + VOCAB), "d2t leads out of the vocabulary"),
        (
            "eagle3",
            lambda f: damage(f, "norm.weight", lambda t: t * float("nan")),
            "norm.weight has values that are not",
        ),
        ("eagle3", lambda f: damage(f, "fc.weight", lambda t: t[:, :-1].contiguous()), "fc.weight has shape"),
        ("medusa", lambda f: setting(f, medusa_num_heads=4), "has no 3.0.linear.weight"),
        ("medusa", lambda f: setting(f, medusa_num_heads=400), "400 heads"),
        ("medusa", lambda f: next(f.glob("*.safetensors")).write_bytes(b"\0" * 100), "cannot be read"),
        ("medusa", lambda f: next(f.glob("*.safetensors")).unlink(), "has none of"),
        ("medusa", lambda f: (f / "config.json").unlink(), "no config.json"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    references: References, tmp_path: Path, method: str, wrong: Any, said: str
) -> None:
    target = references.checkpoint("llama")
    head = write_head(tmp_path / "head", method, target)
    wrong(head)
    with pytest.raises(ConfigError) as caught, LLM(config(target, speculative=method, speculative_model=str(head))):
        pass
    assert caught.value.field == "speculative_model"
    assert said in caught.value.message


def test_heads_need_a_model_in_one_process(references: References) -> None:
    from baton.engine.speculation.methods import load_drafter

    target = references.checkpoint("llama")
    for method in METHODS:
        with pytest.raises(ConfigError) as caught:
            load_drafter(config(target, speculative=method, speculative_model="x", tp=2), SimpleNamespace())  # type: ignore[arg-type]
        assert caught.value.field == "speculative"
        with pytest.raises(ConfigError) as caught, LLM(config(target, speculative=method)):
            pass
        assert (caught.value.field, "needs" in caught.value.message) == ("speculative_model", True)
