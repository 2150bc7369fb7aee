"""The list of what ``make test`` leaves out names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.thorough import EXAMPLES, PATHS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", [*PATHS, *EXAMPLES])
def test_each_entry_names_a_folder_a_file_or_a_test(name: str) -> None:
    path, _, test = name.partition("::")
    assert (ROOT / path).exists()
    assert not test or re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.M)
