"""What ``make test`` leaves to ``make test-all``, and why: paths of tests, and parameters of tests.

``make test`` has to take 15 minutes on two cores and give the same result every time. So what happens at random
moments, waits for time-outs, runs in emulators, under sanitizers or on another instruction set than this processor's
best, and what repeats one check for a hundred models, runs in ``make test-all``, which has everything.
"""

from __future__ import annotations

import pytest

from baton_kernels.cpu.variants import Variant, runnable_variants

RANDOM = "kills or faults at random moments"
EMULATED = "emulators, sanitizers, or a scanner of its own"
WAITS = "waits for time-outs, retries or processes that start again"
SMOKE = "a smoke run of a benchmark or of a tool beside the serving part"
MANY = "a whole deployment for each of many examples"

PATHS = {
    "tests/chaos": RANDOM,
    "tests/e2e/faults": RANDOM,
    "tests/integration/handover/faults": RANDOM,
    "tests/integration/router/dispatch/test_router_recovery.py": RANDOM,
    "tests/integration/router/test_index_recovery.py": RANDOM,
    "tests/integration/router/test_replicas.py": RANDOM,
    "tests/integration/client/test_several_routers.py": RANDOM,
    "tests/unit/kvstore/test_kvstore_disk_crash.py": RANDOM,
    "tests/e2e/test_sdk.py::test_a_stream_goes_on_when_its_router_and_then_its_instance_is_killed": RANDOM,
    "tests/contract/test_store_cluster.py::test_a_node_killed_in_mid_load_costs_blocks_and_never_wrong_ones": RANDOM,
    "tests/contract/test_store_cluster.py::test_a_node_that_hangs_in_mid_load_costs_bounded_time": WAITS,
    "tests/e2e/test_up.py::test_a_second_ctrl_c_kills": WAITS,
    "tests/e2e/test_up.py::test_a_role_that_the_router_refuses_ends_the_start_with_the_reason": WAITS,
    "tests/e2e/test_up.py::test_a_process_that_cannot_start_ends_the_whole_with_its_error": WAITS,
    "tests/fuzz/test_fuzz.py": EMULATED,
    "tests/kernels/emulated": EMULATED,
    "tests/kernels/gpu/test_attention.py": EMULATED,
    "tests/kernels/gpu/test_compile.py": EMULATED,
    "tests/kernels/gpu/test_operators.py": EMULATED,
    "tests/kernels/gpu/test_stored_attention.py": EMULATED,
    "tests/integration/engine/test_interpreted_device.py": EMULATED,
    "tests/integration/engine/test_interpreted_ranks.py": EMULATED,
    "tests/integration/engine/test_flashinfer_engine.py": EMULATED,
    "tests/helm/test_policy.py": EMULATED,
    "tests/images": EMULATED,
    "tests/e2e/test_console.py": EMULATED,
    "tests/integration/http/test_console_page.py": EMULATED,
    "tests/integration/http/test_http_crowd.py": WAITS,
    "tests/helm/test_local_run.py": WAITS,
    "tests/helm/test_lifecycle.py": WAITS,
    "tests/helm/test_autoscale.py": WAITS,
    "tests/e2e/test_autoscale.py": WAITS,
    "tests/e2e/test_two_hosts.py": WAITS,
    "tests/e2e/test_rotation.py": WAITS,
    "tests/e2e/test_supervisor.py": WAITS,
    "tests/e2e/test_traces.py": WAITS,
    "tests/e2e/test_costly_schemas.py": WAITS,
    "tests/integration/bench": SMOKE,
    "tests/e2e/test_up_file.py": MANY,
    "tests/e2e/test_tools_model.py": MANY,
    "tests/e2e/test_thinking_budget.py": MANY,
}
"""Files, folders and tests, each with the reason."""

ARCHITECTURES = "tests/integration/test_architectures.py::test_equal_in_every_way_or_refused_with_the_reason"
QUICK_ARCHITECTURES = frozenset(
    {"llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "gpt_oss", "gpt2"}
    | {"deepseek_v3", "phi3", "falcon", "cohere2", "olmo2", "llama4_text", "mamba", "deepseek_v32"}
)
"""Of some hundred architectures those that ``make test`` compares with ``generate``: one for each kind of layer."""


def is_thorough(item: pytest.Item) -> bool:
    """Whether a test is left to ``make test-all``."""
    if any(item.nodeid == each or item.nodeid.startswith((f"{each}/", f"{each}::", f"{each}[")) for each in PATHS):
        return True
    parameters = list(item.callspec.params.values()) if hasattr(item, "callspec") else []
    if item.nodeid.startswith(ARCHITECTURES):
        return str(parameters[0]) not in QUICK_ARCHITECTURES
    others = {each.name for each in runnable_variants()[1:]}
    return any((each.name if isinstance(each, Variant) else each) in others for each in parameters if _is_name(each))


def _is_name(value: object) -> bool:
    return isinstance(value, Variant | str)
