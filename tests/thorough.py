"""What ``make test`` leaves to ``make test-all``, and why: paths of tests, and parameters of tests.

``make test`` has to take 15 minutes on two cores and give the same result every time. So what happens at random
moments, waits for time-outs, runs in emulators, under sanitizers or on another instruction set than this processor's
best, and what repeats one check for a hundred models, runs in ``make test-all``, which has everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache

import pytest

from baton_kernels.cpu.variants import Variant, runnable_variants

RANDOM = "kills or faults at random moments"
EMULATED = "emulators, sanitizers, or a scanner of its own"
WAITS = "waits for time-outs, retries or processes that start again"
SMOKE = "a smoke run of a benchmark or of a tool beside the serving part"
MANY = "a model or a whole deployment for each of many examples"
MUCH = "much memory"
LOAD = "a minute of load, and bounds in milliseconds"

PATHS = {
    "tests/chaos": RANDOM,
    "tests/e2e/faults": RANDOM,
    "tests/integration/handover/faults": RANDOM,
    "tests/integration/router/dispatch/test_router_recovery.py": RANDOM,
    "tests/integration/router/test_index_recovery.py": RANDOM,
    "tests/integration/router/test_replicas.py": RANDOM,
    "tests/integration/router/test_batches.py::test_a_killed_router_goes_on_and_nothing_is_lost_or_repeated": RANDOM,
    "tests/integration/router/test_batches.py::test_another_router_takes_over": RANDOM,
    "tests/integration/client/test_several_routers.py": RANDOM,
    "tests/unit/kvstore/test_kvstore_disk_crash.py": RANDOM,
    "tests/e2e/test_sdk.py::test_a_stream_goes_on_when_its_router_and_then_its_instance_is_killed": RANDOM,
    "tests/contract/test_store_cluster.py::test_a_node_killed_in_mid_load_costs_blocks_and_never_wrong_ones": RANDOM,
    "tests/contract/test_store_cluster.py::test_a_node_that_hangs_in_mid_load_costs_bounded_time": WAITS,
    "tests/contract/test_stalled_reads.py::test_a_slow_read_over_which_something_comes_goes_on": WAITS,
    "tests/e2e/test_up.py::test_a_second_ctrl_c_kills": WAITS,
    "tests/e2e/test_up.py::test_a_role_that_the_router_refuses_ends_the_start_with_the_reason": WAITS,
    "tests/e2e/test_up.py::test_a_process_that_cannot_start_ends_the_whole_with_its_error": WAITS,
    "tests/fuzz/test_fuzz.py": EMULATED,
    "tests/kernels/emulated": EMULATED,
    "tests/kernels/gpu": EMULATED,
    "tests/kernels/test_compiled_kernels.py::test_each_launch_compiles": MANY,
    "tests/integration/engine/test_interpreted_device.py": EMULATED,
    "tests/integration/engine/test_interpreted_ranks.py": EMULATED,
    "tests/integration/engine/test_interpreted_warm_up.py": EMULATED,
    "tests/integration/engine/test_flashinfer_engine.py": EMULATED,
    "tests/integration/engine/speculation/test_interpreted_speculation.py": EMULATED,
    "tests/integration/engine/quantization/test_quantized_memory.py": MUCH,
    "tests/integration/engine/quantization/test_quantized_quality.py": MANY,
    "tests/integration/http/test_openapi.py::test_it_names_every_endpoint_and_a_fuzzer_finds_nothing": EMULATED,
    "tests/helm/test_policy.py": EMULATED,
    "tests/images": EMULATED,
    "tests/e2e/test_console.py": EMULATED,
    "tests/integration/http/test_console_page.py": EMULATED,
    "tests/helm/test_local_run.py": WAITS,
    "tests/helm/test_lifecycle.py": WAITS,
    "tests/helm/test_autoscale.py": WAITS,
    "tests/e2e/test_autoscale.py": WAITS,
    "tests/e2e/test_two_hosts.py": WAITS,
    "tests/e2e/test_up_reachable.py": WAITS,
    "tests/e2e/test_rotation.py": WAITS,
    "tests/e2e/test_supervisor.py": WAITS,
    "tests/e2e/test_traces.py": WAITS,
    "tests/e2e/test_costly_schemas.py": WAITS,
    "tests/e2e/test_attack.py": LOAD,
    "tests/integration/handover/test_prefill_queue.py": WAITS,
    "tests/integration/handover/test_pipe_processes.py": WAITS,
    "tests/integration/handover/equality/test_latent_handover.py": MANY,
    "tests/integration/handover/equality/test_kv_cast.py": MANY,
    "tests/unit/engine/grammar/test_masked_draws.py": MANY,
    "tests/integration/bench": SMOKE,
    "tests/e2e/test_up_file.py": MANY,
    "tests/e2e/test_gguf.py": MANY,
    "tests/helm/test_document.py::test_its_commands_bring_up_2p3d_which_answers_as_generate": MANY,
    "tests/e2e/test_tools_model.py": MANY,
    "tests/e2e/test_thinking_budget.py": MANY,
}
"""Files, folders and tests, each with the reason."""

_ENGINE = "tests/integration/engine"
_SPECULATION = f"{_ENGINE}/speculation"
_EQUALITY = "tests/integration/handover/equality"
_PREEMPTED = "test_equality_when_the_decode_pool_is_so_small_that_sequences_are_preempted"
EXAMPLES = {
    "tests/integration/test_architectures.py::test_equal_in_every_way_or_refused_with_the_reason": (
        *("llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "gpt2", "deepseek_v3", "phi3", "cohere2", "olmo2"),
        *("llama4_text", "mamba", "deepseek_v32"),
    ),
    f"{_ENGINE}/test_equality_engine.py::test_equality_of_32_concurrent_requests": ("*-cpp", "llama-*", "gpt_oss-*"),
    f"{_ENGINE}/test_equality_engine.py::test_equality_with_a_pool_so_small_that_preemption_happens": (
        "llama",
        "deepseek_v3",
    ),
    f"{_ENGINE}/test_fused_families.py::test_fused_families_equal_generate_and_the_generic_path": (
        "llama",
        "gemma3",
        "mixtral",
        "gpt_oss",
        "deepseek_v3",
    ),
    f"{_ENGINE}/test_layer_groups.py::test_equality_with_preemption_and_prefix_hits": ("gemma3-{}", "gpt_oss-*"),
    f"{_ENGINE}/test_llm.py::test_a_script_prints_what_it_prints": ("1",),
    f"{_ENGINE}/test_model_runner.py::test_logits_are_those_of_transformers_in_chunks_and_ragged_batches": (
        "*-auto-True",
        "llama-*",
    ),
    f"{_ENGINE}/test_parallel_engine.py::test_equality_of_mixed_batches_with_chunks_and_preemption": (
        "gemma3-*",
        "gpt_oss-*",
        "deepseek_v3-*",
    ),
    f"{_ENGINE}/test_step_plans.py::test_hidden_states_are_what_the_head_takes": ("*-1",),
    f"{_ENGINE}/quantization/test_gguf.py::test_divided": ("shape0",),
    f"{_ENGINE}/quantization/test_gguf.py::test_tokens_are_those_of_the_dequantized_model": (
        *("llama-Q8_0", "qwen2-Q4_0", "gemma3-Q5_0"),
    ),
    f"{_ENGINE}/quantization/test_quantized_checkpoints.py::test_logits_are_those_of_the_dequantized_model": (
        *("awq", "bnb-int8", "bnb-nf4-nested", "ct-fp8-block", "ct-mxfp4", "ct-nvfp4", "ct-w4a16-ordered", "ct-w8a8"),
        *("ct-w8a16-packed", "fp8-block", "fp8-static", "gptq-v1-ordered", "gptq-v2", "torchao-fp8"),
        "torchao-int8-dynamic",
    ),
    f"{_ENGINE}/quantization/test_quantized_checkpoints.py::test_other_architectures_and_experts": (
        *("mixtral-bnb-nf4", "qwen3_moe-gptq-v2", "deepseek_v3-*", "gpt_oss-*", "gemma3-*"),
    ),
    f"{_ENGINE}/quantization/test_quantized_checkpoints.py::test_inputs_are_rounded_as_the_checkpoint_says": (
        "ct-w8a8",
        "fp8-block",
    ),
    f"{_ENGINE}/quantization/test_quantized_checkpoints.py::test_tokens_of_several_ranks_are_those_of_generate": (
        "llama-ct-w8a16-2-2",
        "phi3-awq-2-1",
    ),
    f"{_ENGINE}/quantization/test_stored_kv.py::test_tokens_are_those_of_a_model_whose_keys_and_values_are_rounded": (
        "{}",
        "*backend*",
        "*linears*",
        "*block*",
    ),
    f"{_ENGINE}/quantization/test_stored_kv.py::test_layers_that_are_left_out_stay_as_they_are": ("('first', '1'*",),
    f"{_SPECULATION}/test_draft_heads.py::test_answers_are_those_without_a_head": ("*-llama",),
    f"{_SPECULATION}/test_next_token_layers.py::test_answers_are_those_without_and_drafts_those_of_transformers": (
        "deepseek_v3",
        "glm4_moe_lite",
    ),
    f"{_SPECULATION}/test_speculation_equality.py::test_answers_are_those_without_speculation": (
        "llama",
        "gemma3",
        "mixtral",
        "gpt_oss",
        "deepseek_v3",
    ),
    f"{_SPECULATION}/test_speculation_equality.py::test_answers_are_those_without_speculation_on_two_ranks": ("*pp*",),
    f"{_SPECULATION}/test_tree_speculation.py::test_answers_are_those_without_speculation": ("*{}", "*_*"),
    "tests/contract/test_device_arenas.py::test_blocks_bigger_than_a_staging_area_come_in_parts": (
        *("memory-from-device-dtypes0-64", "memory-both-dtypes1-*", "shm-to-device-dtypes0-64"),
        *("tcp-from-device-dtypes2-1024", "tcp-to-device-dtypes0-1024", "tcp-both-dtypes2-64"),
        *("tls-both-dtypes1-1024", "cuda_ipc-both-dtypes2-*"),
    ),
    "tests/unit/engine/grammar/test_grammar_sampling.py::test_sampling_is_free_sampling_rescaled_to_what_is_allowed": (
        *("operators-*1,3*", "torch-(ab*", "late-x*"),
    ),
    "tests/unit/engine/speculation/test_speculation_rejection.py::test_answers_are_distributed_as_without_drafts": (
        *("random", "look-up"),
    ),
    "tests/unit/router/placement/test_router_policy.py::test_the_default_keeps_hits_and_balance": ("0",),
    "tests/unit/tokenizer/test_fast_encoder.py::test_every_character_has_the_librarys_ids": (
        *("demo", "o200k", "unusual", "added", "sentencepiece"),
    ),
    f"{_EQUALITY}/test_equality_handover.py::test_equality_through_every_pipe": ("llama-*",),
    f"{_EQUALITY}/test_equality_handover.py::{_PREEMPTED}": ("llama",),
    f"{_EQUALITY}/test_equality_handover.py::test_equality_between_block_sizes": ("*gemma3*",),
    f"{_EQUALITY}/test_equality_handover.py::test_equality_between_parallel_shapes": ("*-prefill_first",),
    f"{_EQUALITY}/test_int8_handover.py::test_scales_go_with_their_head_between_parallel_shapes": ("(2, 1)-()",),
    f"{_EQUALITY}/test_int8_handover.py::test_through_a_store_node": ("1",),
    f"{_EQUALITY}/test_int8_handover.py::test_through_every_pipe_in_half_the_bytes": ("memory-*",),
}
"""Tests of many models or ways: patterns of the examples that ``make test`` runs, one for each kind of layer or way."""


def is_thorough(item: pytest.Item) -> bool:
    """Whether a test is left to ``make test-all``."""
    nodeid = item.nodeid
    test, _, example = nodeid.removesuffix("]").partition("[")
    if not PATHS.keys().isdisjoint(_paths_to(test)):
        return True
    if test in EXAMPLES:
        return not any(fnmatchcase(example, pattern) for pattern in EXAMPLES[test])
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(
        (each.name if isinstance(each, Variant) else each) in _other_variants() for each in parameters if _is_name(each)
    )


def _paths_to(test: str) -> Iterator[str]:
    """Return a test's name, and those of its classes, file and folders."""
    path, *names = test.split("::")
    yield from ("::".join([path, *names[:depth]]) for depth in range(len(names) + 1))
    while path := path.rpartition("/")[0]:
        yield path


@cache
def _other_variants() -> set[str]:
    return {each.name for each in runnable_variants()[1:]}


def _is_name(value: object) -> bool:
    return isinstance(value, Variant | str)
