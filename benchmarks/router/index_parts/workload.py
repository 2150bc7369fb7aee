"""What both indexes are fed and asked; standard library only, because the rival lives in an environment of its own.

The chains come as a file of hashes, 32 bytes each, ``CHAIN`` blocks per chain; all begin with the same system prompt.
Chain ``c`` is stored whole on instance ``c % 16``, its first half on a second one and its first quarter on a third one.
Sixteen chains grow at a time, an event each in turns, as instances that work at the same time send them.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CHAIN = 2048
SYSTEM = 20
INSTANCES = 16
TOGETHER = 16
HASH = 32


def read_chains(path: str) -> list[bytes]:
    """Return the chains, each one string of hashes."""
    data = Path(path).read_bytes()
    return [data[at : at + CHAIN * HASH] for at in range(0, len(data), CHAIN * HASH)]


def stores(number: int, per_event: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yield groups of events: instance, chain, first block, end."""
    for begin in range(0, number, TOGETHER):
        group = []
        for at in range(0, CHAIN, per_event):
            for c in range(begin, min(number, begin + TOGETHER)):
                for shift, length in ((0, CHAIN), (5, CHAIN // 2), (11, CHAIN // 4)):
                    if at < length:
                        group.append(((c + shift) % INSTANCES, c, at, min(at + per_event, length)))
        yield group


def resident_bytes() -> int:
    """Memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def summary(times: list[float]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    ordered = sorted(times)
    return {"p50_us": statistics.median(ordered) * 1e6, "p99_us": ordered[len(ordered) * 99 // 100] * 1e6}


class Side:
    """One index; a subclass says how it is fed and asked."""

    def __init__(self, chains: list[bytes]) -> None:
        self.chains = chains

    def message(self, instance: int, chain: int, begin: int, end: int) -> bytes:
        """Return an event as it comes over the wire."""
        raise NotImplementedError

    def apply(self, instance: int, message: bytes) -> None:
        raise NotImplementedError

    def question(self, chain: int, blocks: int) -> object:
        raise NotImplementedError

    def find(self, question: object) -> object:
        raise NotImplementedError

    def answer(self, result: object) -> dict[int, int]:
        """Return what was found as leading blocks per instance."""
        raise NotImplementedError

    def store(self, per_event: int) -> dict[str, float]:
        """Fill the index and say how long it took and how much memory it has since."""
        times = []
        blocks = 0
        gc.collect()
        before = resident_bytes()
        for group in stores(len(self.chains), per_event):
            messages = []
            for instance, chain, begin, end in group:
                blocks += end - begin
                messages.append((instance, self.message(instance, chain, begin, end)))
            for instance, message in messages:
                began = time.perf_counter()
                self.apply(instance, message)
                times.append(time.perf_counter() - began)
        gc.collect()
        distinct = len(self.chains) * (CHAIN - SYSTEM) + SYSTEM
        taken = resident_bytes() - before - sys.getsizeof(times) - 24 * len(times)
        return {**summary(times), "blocks_per_s": blocks / sum(times), "bytes_per_block": taken / distinct}

    def ask(self, blocks: int, count: int, seed: int) -> dict[str, object]:
        """Ask for prefixes of random chains; ``answers`` is a digest of what came."""
        rng = random.Random(seed)
        times = []
        digest = hashlib.sha256()
        questions = [self.question(rng.randrange(len(self.chains)), blocks) for _ in range(count)]
        for question in questions:
            began = time.perf_counter()
            result = self.find(question)
            times.append(time.perf_counter() - began)
            digest.update(json.dumps(sorted(self.answer(result).items())).encode())
        return {**summary(times), "answers": digest.hexdigest()}

    def check(self, per_event: int) -> None:
        """Compare some answers with what was stored."""
        for chain in range(0, len(self.chains), 1 + len(self.chains) // 20):
            expected = dict.fromkeys(range(INSTANCES), SYSTEM) if len(self.chains) >= INSTANCES else {}
            for shift, length in ((11, CHAIN // 4), (5, CHAIN // 2), (0, CHAIN)):
                expected[(chain + shift) % INSTANCES] = length
            result = self.answer(self.find(self.question(chain, CHAIN)))
            if expected != result and len(self.chains) >= INSTANCES:
                raise SystemExit(f"wrong answer with {per_event} blocks per event: {result} instead of {expected}")


def serve(make: Callable[[list[bytes]], Side]) -> None:
    """Answer the driver's commands, a line of JSON each, until its end of the pipe is closed."""
    side = make(read_chains(sys.argv[1]))
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "store":
            side = make(side.chains)
            answer = side.store(command["per_event"])
            side.check(command["per_event"])
        else:
            answer = side.ask(command["blocks"], command["count"], command["seed"])
        print(json.dumps(answer), flush=True)
