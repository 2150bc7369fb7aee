"""A hundred times: a process that writes is killed, what was not synced is damaged, and the rest must be right.

SIGKILL alone loses nothing that reached the page cache. So after it, as after a loss of power, whatever lies behind a
file's last synced byte is cut off or overwritten at random.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.transport.disk_crash_writer import (
    BLOCK,
    KINDS,
    LABELS,
    content,
    name_of,
    open_log,
    write_until_killed,
)

ROUNDS = 100
WAIT_S = 240.0


@dataclass
class Model:
    """What was acknowledged; blocks that are in neither set may be there or not."""

    there: set[tuple[int, int]] = field(default_factory=set)
    gone: set[tuple[int, int]] = field(
        default_factory=lambda: {(k, n) for k in range(len(KINDS)) for n in range(LABELS)}
    )
    puts: int = 0
    deletions: int = 0

    def learn(self, word: str, kind: int, labels: list[int]) -> None:
        names = {(kind, label) for label in labels}
        if word == "deleting":
            self.there -= names
        elif word == "putting":
            self.gone -= names
        elif word == "put":
            self.there |= names
            self.puts += 1
        elif word == "deleted":
            self.gone |= names
            self.deletions += 1


def run_and_kill(path: Path, seed: int, model: Model, rng: random.Random) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.transport.disk_crash_writer"])
    news, writer_end = context.Pipe(duplex=False)
    notes = path.parent / f"synced-{seed}"
    notes.write_text("".join(f"{p.name} {p.stat().st_size}\n" for p in path.glob("segment-*")))
    process = context.Process(target=write_until_killed, args=(str(path), seed, writer_end, str(notes)))
    process.start()
    writer_end.close()
    if rng.random() < 0.9:  # else: killed while it starts
        for _ in range(rng.randint(1, 16)):  # however slow the machine is
            assert news.poll(WAIT_S)
            learn(news.recv_bytes(), model)
    time.sleep(rng.uniform(0.0, 0.01))  # the random moment
    process.kill()
    process.join(WAIT_S)
    assert process.exitcode == -9
    while True:
        try:
            learn(news.recv_bytes(), model)
        except EOFError:
            break
    news.close()
    lose_power(path, notes, rng)


def learn(message: bytes, model: Model) -> None:
    word, *rest = json.loads(message)
    if rest:
        model.learn(word, *rest)


def lose_power(path: Path, notes: Path, rng: random.Random) -> None:
    """Damage what was not synced."""
    synced = {name: int(size) for name, size in (line.split() for line in notes.read_text().splitlines())}
    for segment in path.glob("segment-*"):
        kept, size = synced.get(segment.name, 0), segment.stat().st_size
        if size <= kept:
            continue
        with segment.open("r+b") as file:
            if rng.random() < 0.5:
                file.truncate(rng.randint(kept, size))
            else:
                file.seek(rng.randrange(kept, size))
                file.write(rng.randbytes(min(5000, size - file.tell())))


def check(path: Path, model: Model) -> tuple[int, int]:
    """Open as a restart does; returns how many blocks were served, and bytes cut."""
    log = open_log(str(path))
    try:
        with memoryview(mmap.mmap(-1, BLOCK)) as buffer:
            served = set()
            for number, kind in enumerate(KINDS):
                for label in range(LABELS):
                    name = name_of(label)
                    if log.index.read(kind, [name], [buffer]) == [True]:
                        assert bytes(buffer) == content(kind, name)
                        served.add((number, label))
        assert not model.there - served, "acknowledged as synced, and lost"
        assert not model.gone & served, "deleted, and found again"
        assert log.index.counters.checksum_failures == 0  # torn ends are found at the start
        return len(served), log.index.counters.cut_bytes
    finally:
        log.close()


def test_nothing_that_was_synced_is_lost_in_a_hundred_kills(tmp_path: Path) -> None:
    path, rng, model = tmp_path / "kv", random.Random(5), Model()
    served = cut = 0
    for seed in range(ROUNDS):
        run_and_kill(path, seed, model, rng)
        found, torn = check(path, model)
        served, cut = served + found, cut + torn
    assert model.puts > ROUNDS  # it was a load, and kills fell in the middle of it
    assert model.deletions > ROUNDS // 10
    assert served > ROUNDS
    assert cut > 0
