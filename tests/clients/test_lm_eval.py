"""lm-evaluation-harness over ``/v1/completions``: its log probabilities and texts are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tests.clients.conftest import MODEL, Server, compared
from tests.clients.environment import python
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS = 24
STARTS = (
    "import os\nimport ",
    "def add(a, b):\n    return ",
    "class Reader:\n    def ",
    "for i in range(",
    "try:\n    ",
)
ENDS = ("sys", "a + b", "__init__(self):\n        pass", "x = 3")


def _task(folder: Path, name: str, **fields: object) -> None:
    common = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
        "test_split": "test", "target_delimiter": "",
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps({**common, **fields}))


def test_logprobs_and_texts(server: Server, tmp_path: Path) -> None:
    client = python("lm-eval", "lm-eval[api]==0.4.13", "transformers")
    rows = [{"start": start, "ends": ENDS, "answer": 0} for start in STARTS]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _task(
        tmp_path, "baton_choice", output_type="multiple_choice", doc_to_text="{{start}}", doc_to_choice="{{ends}}",
        doc_to_target="{{answer}}", metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    _task(
        tmp_path, "baton_text", output_type="generate_until", doc_to_text="{{start}}", doc_to_target="x",
        generation_kwargs={"until": ["\n\n\n\n\n\n\n\n"], "do_sample": False, "max_gen_toks": NEW_TOKENS},
        metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip
    where = f"base_url={server.url}/v1/completions,num_concurrent=4"  # its tokenizer is the server's, /tokenizer_info
    client.run(
        "lm_eval", "run", "--model", "local-completions", "--model_args", f"model={server.model},{where}",
        "--tasks", "baton_choice", "baton_text", "--include_path", str(tmp_path), "--log_samples",
        "--output_path", str(tmp_path / "out"), cwd=tmp_path, HF_HOME=str(tmp_path / "hf"),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    worst, checked = 0.0, 0
    for sample in _samples(tmp_path, "baton_choice"):
        for arguments, (answer,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            start, end = (arguments[name] for name in ("arg_0", "arg_1"))
            got, greedy = float(answer[0]), answer[1] == "True"
            want, is_greedy = _logprob(model, tokenizer, start, end)
            worst, checked = max(worst, abs(got - want)), checked + 1
            assert greedy == is_greedy
    assert checked == len(STARTS) * len(ENDS)
    compared("lm-eval", worst_difference_of_logprobs=(worst, 0.0))
    assert worst < 5e-4
    texts = 0
    for sample in _samples(tmp_path, "baton_text"):
        prompt = tokenizer(sample["arguments"]["gen_args_0"]["arg_0"], return_tensors="pt", add_special_tokens=False)
        output = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0, prompt.input_ids.shape[1] :]
        assert sample["resps"][0][0] == tokenizer.decode(output, skip_special_tokens=True)
        texts += 1
    assert texts == len(STARTS)


def _samples(folder: Path, task: str) -> list[dict[str, dict[str, dict[str, str]]]]:
    (path,) = (folder / "out").glob(f"**/samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@torch.inference_mode()
def _logprob(model: torch.nn.Module, tokenizer: object, start: str, end: str) -> tuple[float, bool]:
    """Return the log probability of ``end`` after ``start``, and whether each of its tokens is the likeliest one."""
    whole = tokenizer(start + end, add_special_tokens=False).input_ids  # type: ignore[operator]
    # As the harness puts them together: blanks at the end of the context belong to the continuation, whose tokens are
    # those of the whole text from the length of the context's tokens on.
    context = tokenizer(start.rstrip(), add_special_tokens=False).input_ids  # type: ignore[operator]
    tokens = context + whole[len(context) :]
    logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    at = range(len(context), len(tokens))
    total = sum(float(logprobs[i - 1, tokens[i]]) for i in at)
    return total, all(int(logprobs[i - 1].argmax()) == tokens[i] for i in at)
