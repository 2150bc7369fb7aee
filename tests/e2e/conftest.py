from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.servers.up import Running, running_up

MODEL = Path(__file__).resolve().parents[2] / "models" / "baton-tiny"


@pytest.fixture(scope="session")
def model() -> str:
    return str(MODEL)


@pytest.fixture(scope="package")
def up(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A deployment for what changes nothing of it, in ``test_up*.py``: their names keep them together."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_bytes(b"0123456789abcdef")
    key.chmod(0o600)
    ticket = f"--ticket-key-file {key}"
    with running_up(
        "--ratio", "1P1D", "--dtype", "float32", "--model", model, "--decode-args", f"--log-level debug {ticket}",
        "--router-args", f"--remote-prefill-threshold 64 {ticket}",  # else decode may compute what prefill is to do
    ) as running:  # fmt: skip
        yield running


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
