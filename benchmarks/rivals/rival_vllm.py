"""vLLM's CPU build; see ``engines.py``. Runs in an environment of its own."""

import json
import os
import sys
import time

folder, work, threads, _ = sys.argv[1:]
clock = time.process_time if os.environ["RIVAL_CLOCK"] == "cpu" else time.perf_counter
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", VLLM_NO_USAGE_STATS="1")
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")

import vllm


def main() -> None:
    llm = vllm.LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=32,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    engine = llm.llm_engine
    counter = iter(range(10**9))
    print("RIVAL " + json.dumps({"version": vllm.__version__, "threads": threads}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        new_tokens = request["new_tokens"]
        options = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        begin = clock()
        times: dict[str, list[float]] = {}
        for prompt in request["prompts"]:
            name = str(next(counter))
            times[name] = []
            engine.add_request(name, {"prompt_token_ids": prompt}, options)
        while engine.has_unfinished_requests():
            for output in engine.step():
                name = output.request_id.split("-")[0]
                new = len(output.outputs[0].token_ids) - len(times[name])
                times[name] += [clock() - begin] * new
        print("RIVAL " + json.dumps(list(times.values())), flush=True)


if __name__ == "__main__":
    main()
