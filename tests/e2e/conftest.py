from __future__ import annotations

from pathlib import Path

import pytest

MODEL = Path(__file__).resolve().parents[2] / "models" / "baton-tiny"


@pytest.fixture(scope="session")
def model() -> str:
    return str(MODEL)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Prompts of mixed lengths, some with a shared beginning."""
    source = Path(pytest.__file__).read_text(encoding="utf-8") + Path(__file__).read_text(encoding="utf-8")
    shared = source[:900]
    return [
        "def main():\n",
        shared,
        shared + "\n\ndef parse(text):\n",
        source[200:3200],
        shared + source[1500:2300],
        "import os\nimport sys\n\n\nclass Reader:\n",
    ]
