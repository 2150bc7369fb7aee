"""``README.md`` of what drafts for the demo model, from its training log."""

from __future__ import annotations

from typing import Any

WHAT = {
    "draft": "A model of one layer with baton-tiny's tokenizer (`LlamaForCausalLM`)",
    "eagle": "An EAGLE head",
    "eagle3": "An EAGLE-3 head",
    "medusa": "Four Medusa heads that share one output layer, in vLLM's form",
}


def render_card(log: list[dict[str, Any]]) -> str:
    """Return the card of a run: the first line of its log, and the last."""
    facts, results = log[0], log[-1]
    method, engine = facts["method"], results["engine"]
    rows = {
        "Parameters, bytes of weights (bfloat16)": f"{results['parameters']:,}, {results['bytes']:,}",
        "Vocabulary": f"{facts['vocabulary']} tokens, {facts['vocabulary_share']:.1%} of the training text",
        "Trained": f"{results['steps']} steps, {results['tokens']:,} tokens, {log[-2]['minutes']:.1f} minutes",
        "Command": f"`{facts['command']}`",
        "Right on held-out text, place by place (given the text before)": _shares(results["held_out_right"]),
        "Tokens per step in the engine, greedy": f"{engine['tokens_per_step']:.2f}",
        "Accepted of drafted": f"{engine['accepted_of_drafted']:.1%}",
        "Accepted, place by place": _shares(engine["accepted_at_position"]),
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return f"""# baton-tiny-{method}

{WHAT[method]} that drafts for `models/baton-tiny`.
It says what that model would say next, and changes no token of its answers:

```bash
baton demo --speculative {method}
```

| | |
|---|---|
{table}
In the engine: {engine["prompts"]} beginnings of held-out modules of the Python standard library, of
{engine["prompt_tokens"]} tokens, {engine["new_tokens"]} new tokens each, {engine["draft_tokens"]} drafted in a step,
float32. Baton-tiny repeats itself when greedy, which flatters.
Everything here was made by `scripts/train_draft.py`; the figures are in `training_log.jsonl` too.

It learnt from baton-tiny's probabilities over the sources of the Python standard library, and over its own answers; it
contains no text of either. The weights are offered under the licence of this repository.
"""


def _shares(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
