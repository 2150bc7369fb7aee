"""Faults by the thousand: ``python -m tests.chaos.run --seeds 0-9999``, or one that failed: ``--seeds 4711``.

A seed is a schedule of requests and faults; a hundred in a row share a deployment, whose shape their group decides.
After each seed every answer is compared with ``generate``'s and everything must be as before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from tests.chaos.credentials import Credentials
from tests.chaos.deployment import PEERS, SHAPES, Clocks, Deployment
from tests.chaos.faults import NETWORK, SHM, WEIGHTS, Fault
from tests.chaos.workload import MODEL, ROOT, Case, Request, cases
from tests.support.servers.warm import WarmStarter

import baton
from baton.client import AsyncClient, Choice, Generation
from baton.config.deployment import LOOPBACK as HOST
from baton.errors import BatonError, DeadlineError, UnavailableError, all_errors

LOG = Path(__file__).with_name("log.jsonl")
GROUP = 100
ANSWER_S = 150.0
"""A request that takes longer hangs: a process may be stopped for 60 s."""
_INSIDE = "BATON_CHAOS_INSIDE"
_UNSHARE = ("unshare", "--mount", "--propagation", "private")
_COMMON = (
    "requests",
    "answered",
    "remote",
    "tokens from the store",
    "blocks from tiers behind",
    "blocks to tiers behind",
    "blocks from disk to Redis",
    "preemptions",
)
"""Counts that are no sign of a fault."""
_WARM = ("tests.support.servers.cluster", "baton_router.main", "baton_kvstore.main",
         "transformers.models.llama.modeling_llama")  # fmt: skip


@dataclass
class Outcome:
    """What came of a seed."""

    seed: int
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


class Seed:
    """One seed on a deployment."""

    def __init__(
        self,
        seed: int,
        deployment: Deployment,
        catalogue: Sequence[Case],
        *,
        longest_s: float,
        only: Sequence[str] = (),
    ) -> None:
        self.outcome = Outcome(seed)
        self._deployment = deployment
        self._rng = rng = random.Random(f"chaos {seed}")
        many = rng.randint(3, 8) if seed >= 0 else 20
        self.outcome.requests = [Request.drawn(rng, catalogue, f"chaos-{seed}-{i}") for i in range(many)]
        many = rng.choices((1, 2, 3, 4), (5, 3, 1, 1))[0]
        self.outcome.faults = [Fault.drawn(rng, deployment, longest_s=longest_s, only=only) for _ in range(many)]
        self._tokens, self._ended = 0, 0
        self._moved, self._over = asyncio.Event(), asyncio.Event()

    async def run(self) -> Outcome:
        """Run it and look at what is left."""
        outcome, begun = self.outcome, time.monotonic()
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            clients: dict[tuple[int, str], AsyncClient] = {}
            for request in outcome.requests:
                own = self._rng.random() < 0.3  # whoever comes connects, whatever is filled just then
                client = self._client(request) if own else clients.get(key := (request.router, self._account(request)))
                if client is None:
                    client = clients[key] = await stack.enter_async_context(self._client(request))
                delay = self._rng.uniform(0.0, 0.3)
                group.create_task(self._ask(client, request, delay, close=own))
            for fault in outcome.faults:
                group.create_task(self._strike(fault))
        for request in outcome.requests:
            self._judge(request)
        left = await self._deployment.settle()
        outcome.counts += self._deployment.counted()
        if left:
            outcome.wrong.append(f"not idle afterwards: {left}")
        else:
            leaked = self._deployment.leaks()
            if leaked:
                outcome.wrong.append(f"leaked: {leaked}")
        outcome.seconds = time.monotonic() - begun
        return outcome

    def _account(self, request: Request) -> str:
        """Whose key a request shows."""
        return "" if self._deployment.credentials is None else str(request.options["user"])

    def _client(self, request: Request) -> AsyncClient:
        return self._deployment.client(request.router, self._account(request), ANSWER_S)

    async def _ask(self, client: AsyncClient, request: Request, delay: float, *, close: bool) -> None:
        """Send a request; note its answer or its error."""
        await asyncio.sleep(delay)
        try:
            if request.kind == "http":
                request.answer = await self._ask_http(request)
                return
            stream = await client.generate(request.case.prompt, stream=True, **request.options)
            seen = 0
            async for chunk in stream:
                seen += len(chunk.token_ids)
                self._tokens += len(chunk.token_ids)
                self._moved.set()
                if request.leave_after and seen >= request.leave_after:
                    stream.cancel()
                    break
            request.answer = stream.result()
        except BatonError as error:
            request.error = error
        finally:
            self._ended += 1
            self._moved.set()
            if self._ended == len(self.outcome.requests):
                self._over.set()
            if close:
                await client.close()

    async def _ask_http(self, request: Request) -> Generation:
        """Send a request to ``/v1/completions`` as clients of OpenAI's do, and read its events."""
        options = {name: value for name, value in request.options.items() if name not in ("request_id",)}
        body = {"model": MODEL.name, "prompt": request.case.prompt, "stream": True, "return_token_ids": True, **options}
        url, headers = self._deployment.http(request.router, request.options["user"])
        choices = {i: Choice(i, "", [], None) for i in range(len(request.expected))}
        headers["x-request-id"] = request.options["request_id"]
        try:
            async with (
                httpx.AsyncClient(timeout=ANSWER_S, verify=self._deployment.verify) as http,
                http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer,
            ):
                if answer.status_code != 200:
                    raise _http_error(json.loads(await answer.aread()))
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise _http_error(event)
                    for part in event["choices"]:
                        choice = choices[part["index"]]
                        token_ids = part.get("token_ids", [])
                        choice.token_ids.extend(token_ids)
                        self._tokens += len(token_ids)
                        self._moved.set()
                        choices[part["index"]] = replace(choice, finish_reason=part["finish_reason"])
        except httpx.TimeoutException as error:
            raise DeadlineError(f"HTTP: {error!r}") from error
        except httpx.TransportError as error:
            raise UnavailableError(f"HTTP: {error!r}") from error
        if any(choice.finish_reason is None for choice in choices.values()):
            raise UnavailableError("HTTP: the events ended before the answer did")
        return Generation(request.options["request_id"], list(choices.values()))

    async def _strike(self, fault: Fault) -> None:
        total = sum(len(tokens) for request in self.outcome.requests for tokens in request.expected)
        while self._tokens < fault.at * total and self._ended < len(self.outcome.requests):
            self._moved.clear()
            await self._moved.wait()
        await asyncio.sleep(fault.delay_s)
        async with fault.struck_at(self._deployment):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(fault.hold_s):
                    await self._over.wait()
                    await asyncio.sleep(fault.afterwards_s)

    def _judge(self, request: Request) -> None:
        outcome, counts = self.outcome, self.outcome.counts
        counts["requests"] += 1
        about = f"{request.options['request_id']} ({request.kind}, router {request.router})"
        wrong = request.wrong()
        if wrong:
            outcome.wrong.append(f"{about}: {wrong}")
        trace = None if request.answer is None else request.answer.trace
        if trace is not None:
            counts["migrated"] += trace.num_migrations > 0
            counts["refetched"] += len(trace.failed_prefills) > 0
            counts["remote"] += trace.pipe != ""
            if trace.pipe:
                counts[f"pipe {trace.pipe}"] += 1
        if request.error is None:
            counts["answered"] += not wrong
            return
        counts["refused"] += 1
        said, why = f"{about}: {type(request.error).__name__}: {request.error}", self._explained(request)
        if why:
            counts[f"refused: {why}"] += 1
            outcome.refused.append(f"{said} ({why})")
        else:
            outcome.wrong.append(f"{said}, which no fault explains")

    def _explained(self, request: Request) -> str:
        """Say what of the faults allows a request's failure: its router, or all decode instances, did not serve."""
        assert request.error is not None
        if request.error.code not in ("unavailable", "overloaded", "deadline_exceeded", "cancelled", "internal"):
            return ""
        deployment, router = self._deployment, self._deployment.routers[request.router].name
        of_router = sorted(fault.kind for fault in self.outcome.faults if fault.process == router and fault.is_death)
        if of_router:
            return f"{of_router[0]} of its router"
        dead = {fault.process for fault in self.outcome.faults if fault.is_death}
        cut = {fault.process for fault in self.outcome.faults if fault.kind in NETWORK}
        decodes = {name for name in deployment.names if deployment.role(name) == "decode"}
        gone = decodes <= dead | cut and request.error.code in ("unavailable", "overloaded")
        return "no decode instance" if gone else ""


def _http_error(body: dict[str, Any]) -> BatonError:
    said = body["error"]
    return all_errors().get(said["code"], BatonError)(said["message"])


def groups(seeds: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield groups of seeds that share a deployment."""
    found: dict[int, list[int]] = defaultdict(list)
    for seed in seeds:
        found[seed // GROUP].append(seed)
    yield from found.items()


class Tally:
    """What the seeds of a run came to."""

    def __init__(self) -> None:
        self.version = _version()
        self.seeds: list[int] = []
        self.failed: list[int] = []
        self.counts: Counter[str] = Counter()
        self.by_kind: dict[str, Counter[str]] = defaultdict(Counter)
        self.by_shape: Counter[str] = Counter()
        self.seconds = 0.0

    def add(self, outcome: Outcome, shape: str) -> None:
        """Count a seed."""
        self.seeds.append(outcome.seed)
        if outcome.wrong:
            self.failed.append(outcome.seed)
        self.counts += outcome.counts
        self.by_shape[shape] += 1
        self.seconds += outcome.seconds
        for fault in outcome.faults:
            counts = self.by_kind[fault.kind]
            counts["drawn"] += 1
            counts["struck"] += fault.struck > 0
            counts["times"] += fault.struck
            if fault.struck and len(outcome.faults) == 1:
                for what, count in outcome.counts.items():
                    if what not in _COMMON and not what.startswith("pipe"):
                        counts[what] += count

    def record(self) -> dict[str, object]:
        """Return a line for the log."""
        return {
            "version": self.version,
            "seeds": _ranges(self.seeds),
            "count": len(self.seeds),
            "failed": self.failed,
            "shapes": dict(self.by_shape),
            "requests": dict(sorted(self.counts.items())),
            "faults": {kind: dict(counts) for kind, counts in sorted(self.by_kind.items())},
            "seconds": round(self.seconds),
        }


def _ranges(seeds: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and seed == parts[-1][1] + 1:
            parts[-1][1] = seed
        else:
            parts.append([seed, seed])
    return ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in parts)


def _version() -> str:
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    parts = ["src", "services", "kernels", "native", "tests/chaos/*.py"]
    changed = subprocess.run([*git, "status", "--porcelain", *parts], capture_output=True, text=True, check=False)
    return (commit.stdout.strip() or "unknown") + ("-dirty" if changed.stdout else "")


async def run(
    seeds: Sequence[int],
    folder: Path,
    tally: Tally,
    *,
    private: bool,
    limit_s: float,
    longest_s: float,
    only: Sequence[str] = (),
) -> None:
    """Run seeds, group by group, until the time is up."""
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)  # Redis would outlive us
    begun, catalogue = time.monotonic(), cases()
    clocks, credentials = Clocks(folder), Credentials(folder / "credentials", HOST, PEERS)
    os.environ.update(clocks.env)
    starter = WarmStarter(*_WARM)
    try:
        for number, (group, members) in enumerate(groups(seeds)):
            shape = SHAPES[group % len(SHAPES)].possible()
            left = deque(members)
            while left:  # after a seed that failed the others get a deployment that is whole
                with _own_disk(folder / f"{number}-{len(left)}", mounted=private) as own:
                    deployment = Deployment(shape, own, clocks, starter, credentials, private=private)
                    async with deployment.shown():
                        await _warm_up(deployment, catalogue)
                        while left:
                            if time.monotonic() - begun > limit_s and tally.seeds:
                                return
                            seed = Seed(left.popleft(), deployment, catalogue, longest_s=longest_s, only=only)
                            outcome = await seed.run()
                            tally.add(outcome, shape.name)
                            _tell(outcome, shape.name)
                            if outcome.wrong:
                                path = folder / f"seed-{outcome.seed}.log"
                                path.write_text("\n".join(deployment.lines), encoding="utf-8")
                                _say(f"  log lines: {path}")
                                break
    finally:
        starter.close()


@contextlib.contextmanager
def _own_disk(path: Path, *, mounted: bool) -> Iterator[Path]:
    """Make a folder, in a small file system of its own if we may."""
    path.mkdir()
    if mounted:
        _mount(path)
    try:
        yield path
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=False)


def _mount(path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", str(path)], check=True)


def _may_unshare() -> bool:
    """Whether we get a mount namespace of our own: /dev/shm and disks that nobody else sees filled."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    probe = [*_UNSHARE, "mount", "-t", "tmpfs", "none", str(SHM)]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


async def _warm_up(deployment: Deployment, catalogue: Sequence[Case]) -> None:
    """Have everybody do some work, and note what they hold afterwards.

    Raises:
        SystemExit: It does not come to rest, or an answer is wrong without any fault.
    """
    for i in range(2):
        calm = Seed(-1 - i, deployment, catalogue, longest_s=0.0)
        calm.outcome.faults.clear()
        outcome = await calm.run()
        if outcome.wrong:
            raise SystemExit(f"wrong without any fault: {outcome.wrong}")
        deployment.first_idle.clear()
    deployment.leaks()


def _tell(outcome: Outcome, shape: str) -> None:
    faults = "; ".join(map(str, outcome.faults))
    _say(f"seed {outcome.seed} ({shape}) {outcome.seconds:.1f} s: {dict(outcome.counts)} | {faults}")
    for line in outcome.refused:
        _say(f"  refused {line}")
    for line in outcome.wrong:
        _say(f"  WRONG {line}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; status 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", default="0-99", help="such as 0-99,4711")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no seed after so many seconds")
    parser.add_argument("--longest-s", type=float, default=60.0, help="longest time that a fault lasts")
    parser.add_argument("--only", default="", help=f"kinds of faults: some of {', '.join(WEIGHTS)}")
    parser.add_argument("--log", action="store_true", help=f"add a line to {LOG.name}")
    options = parser.parse_args(argv)
    private = os.environ.get(_INSIDE) == "1"
    if not private and _may_unshare():
        os.environ[_INSIDE] = "1"
        own = [*_UNSHARE, sys.executable, "-m", "tests.chaos.run"]
        os.execvp(own[0], [*own, *(sys.argv[1:] if argv is None else argv)])
    if ROOT not in Path(baton.__file__).parents:
        parser.error(f"baton is that of {Path(baton.__file__).parent}: not this version would be tested")
    seeds: list[int] = []
    for part in options.seeds.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    if private:
        _mount(SHM)
    folder = Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    tally, only = Tally(), tuple(filter(None, options.only.split(",")))
    bounds = {"limit_s": options.limit_s, "longest_s": options.longest_s}
    try:
        asyncio.run(run(seeds, folder, tally, private=private, only=only, **bounds))
    finally:  # when it is broken off, too: what was run counts
        record = tally.record()
        _say(json.dumps(record))
        if options.log and tally.seeds:
            with LOG.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    if not tally.failed:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
