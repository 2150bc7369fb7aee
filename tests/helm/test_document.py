"""The commands of docs/kubernetes.md, as they stand there, run in order: they bring up 2P3D, which answers.

``helm`` is Helm's own engine, ``kubectl`` the unmodified program, the API server that of ``tests/support/kube``; pods
are processes. ``docker`` notes what it is asked for, which must be what the Dockerfile can build and the pods want.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install")
from tests.support.chart import ROOT, pods
from tests.support.equality import hf_greedy
from tests.support.kube.controllers import Controllers
from tests.support.kube.helm_command import helm
from tests.support.kube.kinds import BY_NAME, KINDS
from tests.support.servers.pods import LocalKubernetes
from tests.support.servers.warm import WarmStarter

from baton.client import AsyncClient
from baton.tokenizer.tokenizer import Tokenizer
from baton.types import SamplingParams

TEXT = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
MODEL, NEW_TOKENS = ROOT / "models/baton-tiny", 24
DOCKER = """#!{python}
import json, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
"""


def blocks() -> list[list[str]]:
    """Return the commands of each block."""
    found = re.findall(r"^```bash\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    return [[line for line in block.splitlines() if line and not line.startswith("#")] for block in found]


def test_it_takes_five_commands_from_nothing_to_2p3d() -> None:
    first, after = blocks()
    assert len(first) == 5
    assert [line.split()[:2] for line in after] == [["helm", "upgrade"], ["helm", "rollback"], ["helm", "uninstall"]]


@dataclass
class Shell:
    """Runs commands of the document."""

    cluster: LocalKubernetes
    folder: Path

    async def __call__(self, line: str) -> str:
        if line.startswith("helm "):
            return await asyncio.to_thread(helm, self.cluster.api.kubeconfig, ROOT, line)
        (self.folder / "kubeconfig").write_text(self.cluster.api.kubeconfig)
        env = os.environ | {"KUBECONFIG": str(self.folder / "kubeconfig"), "HOME": str(self.folder)}
        env |= {"PATH": f"{self.folder}:{os.environ['PATH']}", "BASE": "python:3.11@sha256:" + "0" * 64}
        process = await asyncio.create_subprocess_exec("bash", "-ec", line, cwd=ROOT, env=env, stdout=-1, stderr=-2)
        output, _ = await process.communicate()
        assert process.returncode == 0, f"{line}: {output.decode()}"
        return output.decode()

    def install_docker(self) -> None:
        program = self.folder / "docker"
        program.write_text(DOCKER.format(python=sys.executable, log=str(self.folder / "docker.log")))
        program.chmod(0o700)

    def pushed(self) -> set[str]:
        """Return the images that were built, then pushed."""
        dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
        stages = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
        built, pushed = set(), set()
        for words in map(json.loads, (self.folder / "docker.log").read_text().splitlines()):
            if words[0] == "push":
                assert words[1] in built
                pushed.add(words[1])
                continue
            flags = dict(zip(words[1:-1:2], words[2:-1:2], strict=True))
            assert set(flags) == {"--target", "-t", "--build-arg"}
            assert words[-1] == "."
            assert flags["--target"] in stages
            name, _, value = flags["--build-arg"].partition("=")
            assert re.search(rf"^ARG {name}$", dockerfile, re.MULTILINE)
            assert "@sha256:" in value
            built.add(flags["-t"])
        return pushed


async def answer(cluster: LocalKubernetes, prompt: list[int]) -> tuple[list[int], Any]:
    key = cluster.secret("baton-auth", "api-key")
    async with AsyncClient(cluster.endpoint("baton", "grpc"), token=key) as client:
        sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
        done = await client.generate(prompt, sampling=sampling)
        return list(done.token_ids), done.trace


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on the path")
async def test_its_commands_bring_up_2p3d_which_answers_as_generate(starter: WarmStarter, tmp_path: Path) -> None:
    prompt = Tokenizer.load(str(MODEL)).encode(TEXT)[:100]
    (expected,) = hf_greedy(MODEL, [prompt], NEW_TOKENS)
    node = {"BATON_KV_BLOCKS": "256", "BATON_DTYPE": "float32"}  # for the memory limit, and so that tokens compare
    async with LocalKubernetes([], tmp_path, starter, namespace="llm", env=node) as cluster:
        shell = Shell(cluster, tmp_path)
        shell.install_docker()
        async with Controllers(cluster.api, cluster):
            first, (upgrade, rollback, uninstall) = blocks()
            said = [await shell(line) for line in first]
            assert "successfully rolled out" in said[3]
            assert [len(cluster.of(f"baton-{role}")) for role in ("router", "prefill", "decode")] == [1, 2, 3]
            deployments = cluster.api.store.find(BY_NAME["apps/v1", "Deployment"], "llm")
            images = {pod["spec"]["containers"][0]["image"] for _, pod in pods(deployments)}
            assert shell.pushed() == images
            tokens, trace = await answer(cluster, prompt)
            assert (tokens, trace.path) == (expected, "remote")

            # What the notes of the release and the text say to look at.
            listed = await shell("kubectl -n llm get pods -o name")
            assert len(listed.split()) == 6
            key = "kubectl -n llm get secret baton-auth -o jsonpath='{.data.api-key}' | base64 -d"
            assert await shell(key) == cluster.secret("baton-auth", "api-key")

            await shell(upgrade)
            async with asyncio.timeout(240):
                while len(cluster.addresses(deployments[0])) != 4:
                    await asyncio.sleep(0.05)
            assert (await answer(cluster, prompt))[0] == expected
            await shell(rollback)
            await shell(uninstall)
            async with asyncio.timeout(240):
                while cluster.pods:
                    await asyncio.sleep(0.05)
            assert not [pod.name for pod in cluster.ended if pod.killed or pod.process.poll() != 0]
            left = [each["metadata"]["name"] for kind in KINDS for each in cluster.api.store.find(kind, "llm")]
            assert left == []


def test_every_other_command_of_the_text_exists() -> None:
    """Commands in the text, outside of the blocks: those of this project, and verbs that Helm and kubectl have."""
    inside = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    commands = [shlex.split(each) for each in re.findall(r"`((?:helm|kubectl|make|docker|baton) [^`]+)`", inside)]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    verbs = {
        "helm": {"install", "upgrade", "test", "template", "rollback", "uninstall"},
        "kubectl": {"get", "scale", "rollout"},
        "make": targets,
        "baton": {"health", "up"},
    }
    assert len(commands) > 5
    assert [words for words in commands if words[1] not in verbs[words[0]]] == []
