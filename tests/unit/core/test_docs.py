"""The documents say what the code does: flags, metrics, headers, trace fields, commands, links."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace

import prometheus_client
import prometheus_client.openmetrics.exposition
import prometheus_client.openmetrics.parser
import pytest
from prometheus_client import CollectorRegistry, openmetrics

from baton.api.v1 import common_pb2
from baton.autoscale.controller import AutoscaleMetrics
from baton.config.kvstore import KVStoreConfig
from baton.config.router import RouterConfig
from baton.engine.executor.base import Quality
from baton.engine.request import EngineStats
from baton.engine.speculation.speculator import SpeculationStats
from baton.kv_transfer.blocks.rests import PipeRests
from baton.kv_transfer.connector.store.backend import StoreUse
from baton.worker.metrics import WorkerMetrics
from baton_kvstore.server import KVStoreServer
from baton_router.app import RouterApp
from baton_router.frontend.openai.generation import route_lines

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(
        part.startswith(".") or part in {"node_modules", "build", "dist"} for part in path.relative_to(ROOT).parts
    )
)
SERVICES = {f"baton-{name}": f"baton_{name}.main" for name in ("router", "prefill", "decode", "kvstore")}
BENCHES = [f"baton bench {name}" for name in ("kv", "serve", "offline", "quality", "router", "prefixes", "store")]
ROUTER = [f"baton {name}" for name in ("status", "chat", "generate", "drain", "scale", "autoscale")]
STORES = ["baton kvstore tenants", "baton kvstore clear"]
ONE = ["baton up", "baton demo", "baton health", "baton explain", "baton completion", "baton quantize"]
CONFIG = ["baton config show", "baton config schema"]
PLANNER = ["baton profile", "baton plan", "baton tune"]
COMMANDS = [*SERVICES, *ONE, *CONFIG, *ROUTER, *STORES, *BENCHES, *PLANNER]
SECTIONS = {
    "baton-router": ["services", "router"],
    "baton-prefill": ["services", "worker", "engine"],
    "baton-decode": ["services", "worker", "engine"],
    "baton-kvstore": ["services", "kvstore"],
    "baton up": ["deployment", "up", "engine", "controller"],
    "baton demo": ["demo"],
    "baton completion": [],
    "baton config show": ["deployment", "configshow", "engine", "controller"],
    "baton config schema": [],
    "baton status": ["status"],
    **{f"baton {name}": ["calls", "secure", name] for name in ("chat", "generate", "drain", "scale")},
    "baton autoscale": ["calls", "secure", "autoscale", "controller"],
    "baton bench serve": ["load", "secure", "serve"],
    "baton bench offline": ["offline", "engine"],
    "baton bench quality": ["quality", "engine"],
    "baton quantize": ["quantize"],
    "baton health": ["health"],
    "baton explain": ["explain"],
    "baton kvstore tenants": ["secure", "storetenants"],
    "baton kvstore clear": ["secure", "storeclear"],
    "baton bench kv": ["bench"],
    "baton bench router": ["replay"],
    "baton bench prefixes": ["prefixes"],
    "baton bench store": ["storebench"],
    "baton profile": ["secure", "profile", "engine"],
    "baton plan": ["plan"],
    "baton tune": ["load", "secure", "tune"],
}
FENCE = re.compile(r"^ *(```+|~~~+)([^\n]*)\n(.*?)^ *\1 *$", re.DOTALL | re.MULTILINE)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Flags


@pytest.fixture
def flags_of(capsys):
    """Return what a command's ``--help`` names."""

    def ask(command: str) -> set[str]:
        module, arguments = SERVICES.get(command, "baton.cli.main"), command.split()[1:]
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(module).main([*arguments, "--help"])
        assert ended.value.code == 0
        return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", capsys.readouterr().out.split("options:")[0])) - {
            "--version"
        }

    return ask


def section_of_configuration(name: str) -> str:
    found = re.search(rf"<!-- flags: {name} -->\n(.*?)<!-- end flags -->", read("docs/configuration.md"), re.DOTALL)
    assert found, name
    return found[1]


def documented_flags(command: str) -> set[str]:
    rows = "\n".join(section_of_configuration(name) for name in SECTIONS[command]).splitlines()
    return {flag for row in rows for flag in re.findall(r"`(--[a-z0-9-]+)[`=]", row.split(": ")[0])}


@pytest.mark.parametrize("command", COMMANDS)
def test_configuration_names_the_flags_of_help(command, flags_of):
    assert documented_flags(command) == flags_of(command)


def load_generator(name: str = "gen_config_docs") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_flag_tables_are_what_the_code_says():
    generator, text = load_generator(), read("docs/configuration.md")
    assert generator.render(text) == text, "run scripts/gen_config_docs.py"
    assert generator.render(text.replace("=4096`", "=4097`")) == text
    with pytest.raises(ValueError, match="kvstore"):
        generator.render(text.replace("<!-- flags: kvstore -->", ""))


def test_the_charts_schema_and_its_table_of_values_are_what_the_code_says():
    generator, text = load_generator("gen_helm"), read("helm/baton/README.md")
    assert json.loads(read("helm/baton/values.schema.json")) == generator.schema(), "run scripts/gen_helm.py"
    assert generator.readme(text) == text, "run scripts/gen_helm.py"
    with pytest.raises(ValueError, match="no place"):
        generator.readme("")


def shell_commands(text: str) -> list[list[str]]:
    """Baton's own commands in a document's shell blocks, as words."""
    found = []
    for _, language, body in FENCE.findall(text):
        if language.strip() not in {"", "bash", "sh", "console"}:
            continue
        for line in body.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            except ValueError:  # a picture, or a quote that goes on in the next line
                continue
            if words and re.fullmatch(r"baton(-[a-z]+)?", words[0]):
                found.append(words)
    return found


def test_commands_in_documents_exist(flags_of):
    known = {command: flags_of(command) for command in COMMANDS}
    seen = 0
    for path in DOCUMENTS:
        for words in shell_commands(path.read_text(encoding="utf-8")):
            nested = words[1:2] in (["bench"], ["kvstore"], ["config"])
            command = words[0] if words[0] in SERVICES else " ".join(words[: 3 if nested else 2])
            if command == "baton --version":
                continue
            assert command in known, f"{name_of(path)}: {words}"
            used = {word.split("=")[0] for word in words if re.fullmatch(r"--[a-z][^ ]*", word)}
            assert used - {"--help"} <= known[command], f"{name_of(path)}: {words}"
            seen += 1
    assert seen > 5


def test_make_targets_in_documents_exist():
    targets = set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), re.MULTILINE))
    assert targets >= {"demo", "test"}
    for path in DOCUMENTS:
        used = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", path.read_text(encoding="utf-8"), re.MULTILINE))
        assert used <= targets, name_of(path)


def test_python_in_documents_is_python():
    for path in DOCUMENTS:
        for _, language, body in FENCE.findall(path.read_text(encoding="utf-8")):
            if language.strip() == "python" and path.parts[-3] != "models":
                ast.parse(textwrap.dedent(body), filename=name_of(path))


# Metrics


def families(registry: CollectorRegistry) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name to type and labels of everything in a registry, also of what has no series yet."""
    found = {}
    for collector in set(registry._collector_to_names):
        for family in collector.collect():
            labels = getattr(collector, "_labelnames", None)
            if labels is None:
                labels = getattr(family, "_labelnames", ())
            name = family.name + ("_total" if family.type == "counter" else "")
            found[name] = (family.type, tuple(labels))
    return found


@pytest.fixture
async def registries() -> dict[str, CollectorRegistry]:
    """Each process's registry, built as the process builds it."""
    router = RouterApp(
        RouterConfig(port=0, grpc_port=0, redis="redis://127.0.0.1:1", batch_store="redis", speculative_prefill=True)
    )
    store = KVStoreServer(KVStoreConfig())
    worker = WorkerMetrics()
    stats = EngineStats(*[0] * len(EngineStats.__dataclass_fields__))
    drafts = SpeculationStats("ngram")
    drafts.drafted.update(range(3))
    drafts.accepted.update(range(2))
    drafts.faults["raised"] += 1
    core = SimpleNamespace(
        speculator=SimpleNamespace(stats=drafts),
        grammars=SimpleNamespace(compiled=0, compile_seconds=0.0, cache_hits=0, refused=0),
        masks=SimpleNamespace(
            masks=0, tried_tokens=0, refused_tokens=0, forced_tokens=0, mask_seconds=0.0, mask_wait_seconds=0.0
        ),
        executor=SimpleNamespace(description="toy", quality=Quality(1e-4, 0.99, 128)),
    )
    engine = SimpleNamespace(stats=stats, steps=0, step_seconds=0.0, core=core)
    worker.watch_pipes(PipeRests())
    worker.watch(engine, lambda: 0, StoreUse(), {"offload": StoreUse()})
    try:
        return {
            "router": router.metrics,
            "worker": worker.registry,
            "kvstore": store.metrics.registry,
            "autoscale": AutoscaleMetrics().registry,
        }
    finally:
        store.store.close()


def documented_metrics(text: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Type and labels by name, of rows as ``| `name`, `name{label,label}` | type | meaning |``."""
    metrics = {}
    for cell, kind in re.findall(r"^\| (`baton_.+?) \| (\w+) \| .+ \|$", text, re.MULTILINE):
        for name, labels in re.findall(r"`(baton_\w+)(?:\{([\w,]+)\})?`", cell):
            assert name not in metrics, f"{name} is there twice"
            metrics[name] = (kind, tuple(labels.split(",")) if labels else ())
    return metrics


async def test_metrics_document_names_every_metric_and_no_other(registries):
    real = {}
    for registry in registries.values():
        found = families(registry)
        assert {"process_cpu_seconds_total", "process_open_fds", "baton_build_info"} <= set(found)
        real |= {name: kind for name, kind in found.items() if name.startswith("baton_")}
    assert len(real) > 60
    assert not [name for name, (kind, _) in real.items() if kind == "gauge" and name.endswith("_total")]
    assert documented_metrics(read("docs/metrics.md")) == real


async def test_every_metric_is_valid_openmetrics_whatever_its_labels(registries):
    for registry in registries.values():
        for collector in set(registry._collector_to_names):
            names = getattr(collector, "_labels", getattr(collector, "_labelnames", None))
            if names:
                collector.labels(*['odd "value" \\ \n\u2028'] * len(names))
        text = openmetrics.exposition.generate_latest(registry).decode()
        seen = {family.name for family in openmetrics.parser.text_string_to_metric_families(text)}
        assert seen == {name.removesuffix("_total") for name in families(registry)}


def test_nothing_counts_outside_of_these_registries():
    assert not [name for name in families(prometheus_client.REGISTRY) if name.startswith("baton_")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
async def test_metrics_named_in_other_documents_exist(path, registries):
    names = {name for registry in registries.values() for name in families(registry)}
    used = re.findall(
        r"`(baton_(?:router|request|http|worker|kv|engine|kvstore|autoscale)_[a-z_]*[a-z])[`{]", path.read_text("utf-8")
    )
    modules = {"baton_router_core"}
    assert set(used) - modules <= names


def test_headers_and_trace_fields_are_documented():
    headers = {
        *re.findall(r"^(\S+):", route_lines([]).decode(), re.MULTILINE),
        "x-baton-ignored-fields",
        "x-baton-clipped",
    }
    rows = [row.split(" | ")[0] for row in read("docs/metrics.md").splitlines() if row.startswith("| `x-baton-")]
    assert {header for row in rows for header in re.findall(r"`(x-baton-[a-z-]+)`", row)} == headers
    text = read("docs/metrics.md").split("## RequestTrace")[1].split("\n### ")[0]
    fields = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert fields == {field.name for field in common_pb2.RequestTrace.DESCRIPTOR.fields}


# The tree


def test_architecture_names_every_package_and_no_file_that_is_gone():
    text = read("docs/architecture.md")
    roots = [ROOT / "src/baton", *(ROOT / "services").glob("*/baton_*")]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text.split("## The tree")[1].split("\n## ")[0], re.MULTILINE)
    folders = {path.strip("/") for row in rows for path in re.findall(r"`([^`]+/[^`]*)`", row[0] + row[1])}
    for root in roots:
        assert f"`{name_of(root).split('/baton_')[0]}" in text, root
        for package in root.glob("*/__init__.py"):
            name = package.parent.name
            known = {word for folder in folders for word in folder.split("/")} | set(re.findall(r"`(\w+)/", text))
            assert name in known or f"{name}/v1" in text, (
                f"docs/architecture.md does not name {name_of(package.parent)}"
            )
    tree = [
        name_of(path)
        for top in ("src", "services", "kernels", "tests", "benchmarks", "scripts")
        for path in (ROOT / top).rglob("*.py")
    ]
    for row in rows:
        for file in re.findall(r"`([\w./-]+\.py)`", row[1]):
            assert any(f"/{path}".endswith(f"/{file}") for path in tree), f"docs/architecture.md names {file}"


# Links


def anchors(text: str) -> set[str]:
    """Anchors of a document's headings, as they are made by GitHub."""
    titles = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(text: str) -> list[str]:
    plain = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    found = re.findall(r"\]\(<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]: +(\S+)", plain, re.MULTILINE)
    return [inline or reference for inline, reference in found]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path):
    for link in links(path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target) if target else path
        assert file.exists(), link
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), link


def test_documents_are_found():
    names = {name_of(path) for path in DOCUMENTS}
    assert names >= {"README.md", "docs/api.md", "docs/metrics.md", "services/router/README.md", "kernels/README.md"}
    assert {"docs/api.md", "docs/operations.md"} <= set(links(read("README.md")))


# Images


@pytest.mark.parametrize("module", ["baton_router.main", "baton_kvstore.main", "baton.cli.main"])
def test_light_images_need_not_have_what_they_leave_out(module):
    """The images of router and KV store are built without these."""
    code = f"import sys; sys.modules.update(torch=None, transformers=None); import {module}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_images_take_what_is_there():
    text = read("Dockerfile")
    allowed = [
        line.removeprefix("!").rstrip("/") for line in read(".dockerignore").splitlines() if line.startswith("!")
    ]
    copied = {
        source for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for source in line.split()[:-1]
    }
    assert copied == set(allowed)
    assert all((ROOT / source).exists() for source in copied)
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    targets = dict(re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE))
    for service in ("router", "prefill", "decode", "kvstore"):
        assert re.search(rf"^FROM \S+ AS {service}$", text, re.MULTILINE)
        assert f'ENTRYPOINT ["baton-{service}"]' in text
    assert {"base", "dependencies", "worker"} <= set(targets)
