"""OpenVINO GenAI's continuous batching; see ``engines.py``. Runs in an environment of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai

folder, work, threads, weights = sys.argv[1:]
clock = time.process_time if os.environ["RIVAL_CLOCK"] == "cpu" else time.perf_counter


def main() -> None:
    converted = Path(work) / "model"
    export = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", folder]
    export += ["--task", "text-generation-with-past", "--weight-format", weights, str(converted)]
    subprocess.run(export, check=True, stdout=sys.stderr)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 32
    scheduler.enable_prefix_caching = False
    settings = {"INFERENCE_NUM_THREADS": int(threads), "INFERENCE_PRECISION_HINT": "bf16"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(converted, scheduler, "CPU", settings)
    print(
        "RIVAL " + json.dumps({"version": openvino_genai.__version__, "weights": weights, "threads": threads}),
        flush=True,
    )
    counter = iter(range(10**9))
    for line in sys.stdin:
        request = json.loads(line)
        options = openvino_genai.GenerationConfig()
        options.max_new_tokens = request["new_tokens"]
        options.ignore_eos = True
        options.do_sample = False
        begin = clock()
        handles = [
            pipeline.add_request(next(counter), ov.Tensor(np.array([prompt], dtype=np.int64)), options)
            for prompt in request["prompts"]
        ]
        times: list[list[float]] = [[] for _ in handles]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = clock() - begin
            for handle, seen in zip(handles, times, strict=True):
                if handle.can_read():
                    seen += [now] * sum(len(output.generated_ids) for output in handle.read().values())
        print("RIVAL " + json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
