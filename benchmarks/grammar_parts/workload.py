"""What ``benchmarks/grammar.py`` measures with: a vocabulary of 128,000 tokens, schemas and documents of theirs."""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 128_000
END = "<|end|>"
TRAINED_BYTES = 48 << 20
"""Sources that the vocabulary is trained from, at most."""
KINDS = ("person", "company", "robot")
LANGUAGES = ("de", "en", "fr", "pt-BR")


def tokenizer_folder(cache: Path, vocab: int = VOCAB, most_bytes: int = TRAINED_BYTES) -> Path:
    """Return a folder with ``tokenizer.json``: byte-level BPE of installed packages' sources, trained at first use."""
    folder = cache / f"bpe-{vocab}"
    path = folder / "tokenizer.json"
    if not path.exists():
        print(f"training a vocabulary of {vocab} tokens into {folder}", file=sys.stderr, flush=True)
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab - 1, min_frequency=2, initial_alphabet=alphabet, show_progress=False
        )
        core.train_from_iterator(_sources(most_bytes), trainer=trainer)
        core.add_special_tokens([f"<|unused{i}|>" for i in range(vocab - 1 - core.get_vocab_size())])
        core.add_special_tokens([END])
        folder.mkdir(parents=True, exist_ok=True)
        core.save(str(path))
    return folder


def _sources(most_bytes: int) -> Iterator[str]:
    total = 0
    for root in (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]):
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            total += len(text)
            if total > most_bytes:
                return
            yield text


def schema(number: int) -> dict[str, Any]:
    """Return a nested schema with enums and patterns; its names differ by number, so that none is known yet."""
    part = {
        "type": "object",
        "properties": {
            "street": {"type": "string", "maxLength": 40},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,6}$"},
            "country": {"enum": list(LANGUAGES)},
        },
        "required": ["street", "code", "country"],
        "additionalProperties": False,
    }
    item = {
        "type": "object",
        "properties": {
            f"id_{number}": {"type": "integer", "minimum": 1, "maximum": 99999},
            "kind": {"enum": list(KINDS)},
            "name": {"type": "string", "minLength": 1, "maxLength": 60},
            "mail": {"type": "string", "pattern": "^[a-z]+[.][a-z]+@[a-z]+[.]org$"},
            "active": {"type": "boolean"},
            "address": part,
        },
        "required": [f"id_{number}", "kind", "name", "mail", "active", "address"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"records": {"type": "array", "items": item, "minItems": 1}, "total": {"type": "number"}},
        "required": ["records", "total"],
        "additionalProperties": False,
    }


def document(number: int, seed: int, records: int = 3) -> str:
    """Return JSON that follows a schema."""
    rng = random.Random(seed)

    def word() -> str:
        return "".join(rng.choice("abcdefghiklmnoprstuvw") for _ in range(rng.randint(3, 9)))

    results = [
        {
            f"id_{number}": rng.randint(1, 99999),
            "kind": rng.choice(KINDS),
            "name": f"{word().title()} {word().title()}",
            "mail": f"{word()}.{word()}@{word()}.org",
            "active": rng.random() < 0.5,
            "address": {
                "street": f"{word().title()} {rng.randint(1, 99)}",
                "code": f"{rng.choice('ABCD')}{rng.choice('XYZ')}-{rng.randint(1000, 999999)}",
                "country": rng.choice(LANGUAGES),
            },
        }
        for _ in range(records)
    ]
    return json.dumps({"records": results, "total": rng.randint(1, 9)})
