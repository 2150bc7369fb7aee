"""What formats cost in quality: KL divergence of a trained model's next tokens from those of its plain weights.

The bounds are 1.1 times what was measured once of the same formats, with other packages' own weights and computation.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.models.engine_logits import engine_logits, plain_logits
from tests.support.models.quantized_checkpoints import (
    FORMATS,
    Format,
    bnb_4bit,
    ct,
    ct_integers,
    ct_weights,
    fp8,
    quantize_checkpoint,
)
from transformers import AutoTokenizer

from baton.config import EngineConfig

ROOT = Path(__file__).resolve().parents[4]
MODEL = ROOT / "models" / "baton-tiny"
NUM_TOKENS = 1024
CASES: dict[str, tuple[Format, float]] = {
    "W8A16": (FORMATS["ct-w8a16"], 0.00012),
    "W8A8": (FORMATS["ct-w8a8"], 0.00044),
    "W4A16 g64": (
        Format(ct("pack-quantized", ct_weights(4, "int", "group", group_size=64)), ct_integers(4, 64, packed=True)),
        0.0068,
    ),
    "fp8 dynamic": (FORMATS["ct-fp8"], 0.0013),
    "fp8 block 128": (
        Format({**FORMATS["fp8-block"].config, "weight_block_size": [128, 128]}, fp8((128, 128), "weight_scale_inv")),
        0.0044,
    ),
    "nf4 double": (Format(FORMATS["bnb-nf4-nested"].config, bnb_4bit("nf4", nested=True)), 0.0051),
    "bitsandbytes int8": (FORMATS["bnb-int8"], 0.00016),
    "torchao int8": (FORMATS["torchao-int8"], 0.00012),
    "torchao int8 dynamic": (FORMATS["torchao-int8-dynamic"], 0.00034),
    "torchao fp8": (FORMATS["torchao-fp8"], 0.00053),
}


@cache
def tokens() -> list[int]:
    """The beginning of a text that changes seldom."""
    ids: list[int] = AutoTokenizer.from_pretrained(MODEL)((MODEL / "README.md").read_text())["input_ids"]
    return ids[:NUM_TOKENS]


@cache
def expected() -> torch.Tensor:
    return F.log_softmax(plain_logits(MODEL, tokens()), dim=-1)


@pytest.mark.parametrize("name", CASES)
def test_divergence_from_the_plain_model(tmp_path: Path, name: str) -> None:
    form, known = CASES[name]
    made = quantize_checkpoint(MODEL, tmp_path, form)
    config = EngineConfig(model=str(made.folder), dtype="float32", kv_blocks=80)
    logits, _ = engine_logits(config, tokens())
    divergence = F.kl_div(F.log_softmax(logits, dim=-1), expected(), log_target=True, reduction="batchmean").item()
    print(f"{name}: {divergence:.2g}")  # noqa: T201  pytest shows it with a failure
    assert divergence <= 1.1 * known
