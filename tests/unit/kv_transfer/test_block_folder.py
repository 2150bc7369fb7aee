"""Block files: safetensors that anybody can read, damage of every kind is a miss, and the directory stays bounded."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.transport.named_blocks import name_of

from baton.errors import ConfigError, TransferError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.connector.store.files import BlockFolder, BlockFormat

LAYOUT = KVLayout((LayerShape(2, 4, 6), LayerShape(1, 8, 0), LayerShape(1, 3, 3)), 4, "float32")
KIND = Fingerprint.of(model="m", model_digest="d", rope="", layout=LAYOUT)
FILE = BlockFormat(KIND).file_bytes


def block(label: object) -> np.ndarray:
    return np.random.default_rng(list(name_of(label))).integers(0, 256, KIND.block_bytes, np.uint8)


def folder(path: Path, *, files: float = 100, sync: bool = False) -> BlockFolder:
    return BlockFolder(path, KIND, max_bytes=int(files * FILE), sync=sync)


def files_in(path: Path) -> list[Path]:
    return sorted(path.glob("**/*.safetensors"))


def read(found: BlockFolder, label: object) -> bool:
    into = np.zeros(KIND.block_bytes, np.uint8)
    there = found.read(name_of(label), into)
    assert not there or np.array_equal(into[: found.num_bytes], block(label)[: found.num_bytes])
    return there


@pytest.mark.parametrize("sync", [False, True])
def test_files_are_safetensors_that_anybody_can_read(tmp_path: Path, sync: bool) -> None:
    mine = folder(tmp_path, sync=sync)
    assert not mine.holds(name_of("a"))
    assert mine.write(name_of("a"), block("a")) == FILE
    assert mine.holds(name_of("a"))
    assert read(mine, "a")
    (file,) = files_in(tmp_path)
    assert file.stem == name_of("a").hex()
    assert file.stat().st_size == FILE
    with safetensors.safe_open(file, framework="np") as opened:
        assert opened.metadata()["block_hash"] == name_of("a").hex()
        assert opened.metadata()["fingerprint"] == KIND.digest().hex()
        values = block("a").view(np.float32)
        assert set(opened.keys()) == {"layers.0.k", "layers.0.v", "layers.1.k", "layers.2.k", "layers.2.v"}
        v = values[LAYOUT.places[0].v // 4 :][: 2 * 4 * 6].reshape(2, 4, 6)
        assert np.array_equal(opened.get_tensor("layers.0.v").view(np.uint8), v.view(np.uint8))


def test_another_process_and_another_kind(tmp_path: Path) -> None:
    folder(tmp_path).write(name_of("a"), block("a"))
    assert read(folder(tmp_path), "a")
    other = Fingerprint.of(model="m", model_digest="other", rope="", layout=LAYOUT)
    assert not BlockFolder(tmp_path, other, max_bytes=100 * FILE, sync=False).holds(name_of("a"))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_damage_is_a_miss_and_removed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("kv")
    mine = folder(path)
    mine.write(name_of("a"), block("a"))
    (file,) = files_in(path)
    content = bytearray(file.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "other", "zeros"]))
    if kind == "flip":
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    elif kind == "longer":
        content += data.draw(st.binary(min_size=1, max_size=9))
    elif kind == "other":
        mine.write(name_of("b"), block("b"))
        content = bytearray(next(f for f in files_in(path) if f != file).read_bytes())
    else:
        content = bytearray(len(content))
    file.write_bytes(content)
    assert not read(mine, "a")
    assert mine.num_damaged == 1
    assert not file.exists()
    mine.write(name_of("a"), block("a"))
    assert read(mine, "a")


def test_the_directory_stays_bounded_and_the_latest_used_stay(tmp_path: Path) -> None:
    mine = folder(tmp_path, files=10)
    for label in range(40):
        mine.write(name_of(label), block(label))
        file = next(f for f in files_in(tmp_path) if f.stem == name_of(label).hex())
        os.utime(file, (1000 + label, 1000 + label))  # as if a second apart
        if mine.holds(name_of(0)):  # used again and again: it gets today's time
            assert read(mine, 0)
    assert len(files_in(tmp_path)) <= 10
    assert mine.num_evicted >= 30
    assert mine.used_bytes <= 10 * FILE
    assert mine.holds(name_of(39))
    assert mine.holds(name_of(0))
    assert not mine.holds(name_of(1))


def test_what_others_wrote_counts_and_their_lost_parts_go(tmp_path: Path) -> None:
    ours, theirs = folder(tmp_path, files=10), folder(tmp_path, files=1000)
    for label in range(30):
        theirs.write(name_of(label), block(label))
        os.utime(next(f for f in files_in(tmp_path) if f.stem == name_of(label).hex()), (1000 + label, 1000 + label))
    old, new = files_in(tmp_path)[0].with_suffix(".x.part"), files_in(tmp_path)[0].with_suffix(".y.part")
    for part in (old, new):
        part.write_bytes(b"half a block")
    os.utime(old, (1000, 1000))
    ours.write(name_of("ours"), block("ours"))
    assert len(files_in(tmp_path)) <= 10
    assert ours.holds(name_of("ours"))
    assert (old.exists(), new.exists()) == (False, True)


def test_several_threads_write_and_read_the_same_blocks(tmp_path: Path) -> None:
    found = [folder(tmp_path, files=12) for _ in range(2)]
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        draw = np.random.default_rng(seed)
        try:
            for _ in range(60):
                label = int(draw.integers(20))
                mine = found[int(draw.integers(2))]
                if not read(mine, label):
                    mine.write(name_of(label), block(label))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(mine.num_damaged for mine in found) == 0
    assert not list(tmp_path.glob("**/*.part"))
    for mine in found:
        mine.sweep()
    assert len(files_in(tmp_path)) <= 12


def test_what_cannot_be_used_is_refused_and_what_fails_later_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        folder(tmp_path, files=1)
    with pytest.raises(ConfigError):
        folder(Path("/proc/nothing"))
    mine = folder(tmp_path / "kv")
    group = mine._file(name_of("a")).parent
    group.write_bytes(b"a file where a directory should be")
    with pytest.raises(TransferError):
        mine.write(name_of("a"), block("a"))
    with pytest.raises(TransferError):
        mine.read(name_of("a"), np.zeros(KIND.block_bytes, np.uint8))


@pytest.mark.usefixtures("open_umask")
def test_files_and_folders_are_their_owners_alone(tmp_path: Path) -> None:
    mine = folder(tmp_path / "deep" / "kv")
    mine.write(name_of("a"), block("a"))
    made = [tmp_path / "deep" / "kv", *(tmp_path / "deep" / "kv").glob("**/*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert [path.stat().st_mode & 0o777 for path in made if path.is_file()] == [0o600]
    mine._folder.chmod(0o755)  # as an earlier version made it
    assert read(folder(tmp_path / "deep" / "kv"), "a")
    assert mine._folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders away")
def test_a_folder_that_another_user_made_first_is_not_used(tmp_path: Path) -> None:
    whole = folder(tmp_path)
    whole.write(name_of("a"), block("a"))
    (made,) = tmp_path.iterdir()
    made.chmod(0o777)
    os.chown(made, 12345, 12345)
    with pytest.raises(ConfigError, match="another user") as caught:
        folder(tmp_path)
    assert caught.value.field == "kv_connector_options"
    made.rename(tmp_path / "theirs")
    made.symlink_to(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="no folder"):
        folder(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["fifo", "device"])
def test_what_is_no_file_is_no_block_and_waited_for_by_nobody(tmp_path: Path, make: Callable[[Path], None]) -> None:
    mine = folder(tmp_path)
    mine.write(name_of("a"), block("a"))
    (file,) = files_in(tmp_path)
    file.unlink()
    make(file)
    reader = threading.Thread(target=lambda: found.append(read(mine, "a")), daemon=True)
    found: list[bool] = []
    reader.start()
    reader.join(60)
    assert found == [False]
    assert not os.path.lexists(file)
    assert mine.num_damaged == 1
    mine.write(name_of("a"), block("a"))
    assert read(mine, "a")
