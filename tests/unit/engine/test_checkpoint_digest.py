"""Which checkpoint it is: KV of another one must never be taken, and a start must not read all weights for that."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.models import checkpoint
from baton.engine.models.checkpoint import DIGESTS_NAME, WHOLE_BYTES, model_digest
from baton.tokenizer.weight_files import weight_files

LARGE = 4 * 3 * WHOLE_BYTES // 4
TENSORS = {
    "model.norm.weight": torch.ones(64),
    "model.layers.0.self_attn.q_proj.bias": torch.zeros(64),
    "model.layers.0.mlp.up_proj.weight": torch.arange(LARGE, dtype=torch.float32),
    "model.layers.1.mlp.up_proj.weight": torch.arange(LARGE, dtype=torch.float32).flip(0),
    "scale": torch.tensor(1.0),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "_name_or_path": "here"}))
    write(tmp_path, TENSORS)
    return tmp_path


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def digest(folder: Path) -> str:
    return model_digest(folder, weight_files(folder))


def changed(name: str, at: int) -> dict[str, torch.Tensor]:
    tensor = TENSORS[name].clone()
    tensor.view(-1)[at] += 1
    return {**TENSORS, name: tensor}


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_proj.bias", "scale"])
def test_a_fine_tune_of_small_tensors_alone_is_another_model(folder: Path, name: str) -> None:
    before = digest(folder)
    for at in range(TENSORS[name].numel()):
        write(folder, changed(name, at))
        assert digest(folder) != before, at


def test_ends_of_large_tensors_and_changes_all_over_them_are_seen(folder: Path) -> None:
    before = digest(folder)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        for tensors in (changed(name, 0), changed(name, -1), {**TENSORS, name: TENSORS[name] + 0.5}):
            write(folder, tensors)
            assert digest(folder) != before
    write(folder, TENSORS)
    assert digest(folder) == before


def test_the_name_of_the_folder_and_of_who_saved_it_does_not_count(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "config.json").write_text(json.dumps({"_name_or_path": "there", "model_type": "llama"}))
    write(other, TENSORS)
    assert digest(other) == digest(folder)
    (other / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1.0}))
    assert digest(other) != digest(folder)


class TestKeptDigests:
    @pytest.fixture(autouse=True)
    def all_are_large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoint, "STORED_FROM_BYTES", 1)

    def test_a_start_reads_no_weights_that_are_known(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = digest(folder)
        monkeypatch.setattr(checkpoint, "_file_digest", lambda file: pytest.fail(f"{file.path} was read"))
        assert digest(folder) == first

    def test_another_file_of_the_same_size_and_time_is_read(self, folder: Path) -> None:
        first, path = digest(folder), folder / "model.safetensors"
        status = path.stat()
        write(folder, changed("model.norm.weight", 3))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
        assert digest(folder) != first

    @pytest.mark.parametrize("kept", [b"", b"{", b"[]", b'{"scheme": 2, "files": 3}', b'{"scheme": 1, "files": {}}'])
    def test_what_cannot_be_read_is_made_anew(self, folder: Path, kept: bytes) -> None:
        first = digest(folder)
        whole = (folder / DIGESTS_NAME).read_bytes()
        (folder / DIGESTS_NAME).write_bytes(kept)
        assert digest(folder) == first
        assert (folder / DIGESTS_NAME).read_bytes() == whole

    def test_a_digest_that_is_none_is_made_anew(self, folder: Path) -> None:
        first = digest(folder)
        kept = json.loads((folder / DIGESTS_NAME).read_text())
        kept["files"]["model.safetensors"]["digest"] = "x" * 64
        (folder / DIGESTS_NAME).write_text(json.dumps(kept))
        assert digest(folder) == first

    def test_a_folder_that_may_not_be_written_is_no_error(self, folder: Path) -> None:
        (folder / DIGESTS_NAME).mkdir()  # root may write anywhere: what stands in the way does it as well
        assert digest(folder) == digest(folder)
        assert sorted(x.name for x in folder.iterdir()) == [DIGESTS_NAME, "config.json", "model.safetensors"]


def test_small_checkpoints_are_left_as_they_are(folder: Path) -> None:
    digest(folder)
    assert not (folder / DIGESTS_NAME).exists()
