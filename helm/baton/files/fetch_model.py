"""Fetches a model's archive (.tar, .tar.gz, .tgz) and unpacks it.

Several pods may share the volume: what is there already is taken, what is half there has another name.
"""

import argparse
import hashlib
import os
import pathlib
import shutil
import tarfile
import tempfile
from typing import IO, cast

import httpx

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def fetch(url: str, folder: pathlib.Path, sha256: str, no_weights: bool) -> None:
    """Fetch it, unless it is there."""
    if folder.exists():
        return
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
        archive, digest = pathlib.Path(made, "archive"), hashlib.sha256()
        with archive.open("wb") as file, httpx.stream("GET", url, follow_redirects=True, timeout=60) as answer:
            answer.raise_for_status()
            for chunk in answer.iter_bytes(1 << 20):
                digest.update(chunk)
                file.write(chunk)
        if sha256 and digest.hexdigest() != sha256:
            raise SystemExit(f"{url} has the SHA-256 {digest.hexdigest()}, not {sha256}")
        unpacked = pathlib.Path(made, "unpacked")
        with tarfile.open(archive) as tar:
            for member in tar:
                path = (unpacked / member.name).resolve()
                if not path.is_relative_to(unpacked.resolve()):
                    raise SystemExit(f"{url} has {member.name} in it, which leads out of the folder")
                if member.isfile() and not (no_weights and member.name.endswith(WEIGHTS)):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as to, cast("IO[bytes]", tar.extractfile(member)) as part:
                        shutil.copyfileobj(part, to, 1 << 20)
        configs = sorted(unpacked.rglob("config.json"), key=lambda path: len(path.parts))
        if not configs:
            raise SystemExit(f"{url} has no config.json in it")
        try:
            os.rename(configs[0].parent, folder)
        except OSError:  # another pod was faster
            if not folder.exists():
                raise
            shutil.rmtree(unpacked)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--sha256", default="")
    parser.add_argument("--no-weights", action="store_true")
    given = parser.parse_args()
    fetch(given.url, given.folder, given.sha256, given.no_weights)
