"""ONNX Runtime GenAI with weights as its model builder makes them; see ``engines.py``. In an environment of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import onnxruntime_genai

TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "baton-tiny"
folder, work, threads, weights = sys.argv[1:]
clock = time.process_time if os.environ["RIVAL_CLOCK"] == "cpu" else time.perf_counter


def main() -> None:
    converted = Path(work) / "model"
    source = Path(work) / "source"  # the builder wants a tokenizer, of whatever vocabulary; nothing here uses it
    source.mkdir()
    for file in (*Path(folder).iterdir(), TOKENIZER / "tokenizer.json", TOKENIZER / "tokenizer_config.json"):
        (source / file.name).symlink_to(file)
    build = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(converted)]
    build += ["-p", weights, "-e", "cpu", "-c", work]
    subprocess.run(build, check=True, stdout=sys.stderr)
    path = converted / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = int(threads)
    path.write_text(json.dumps(config))
    model = onnxruntime_genai.Model(str(converted))
    details = {"version": onnxruntime_genai.__version__, "weights": weights, "threads": threads}
    print("RIVAL " + json.dumps(details), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prompts = request["prompts"]
        new_tokens = request["new_tokens"]
        options = onnxruntime_genai.GeneratorParams(model)
        length = len(prompts[0]) + new_tokens
        options.set_search_options(batch_size=len(prompts), max_length=length, min_length=length, do_sample=False)
        begin = clock()
        times = []
        generator = onnxruntime_genai.Generator(model, options)
        generator.append_tokens(prompts)
        for _ in range(new_tokens):
            generator.generate_next_token()
            times.append(clock() - begin)
        print("RIVAL " + json.dumps([times] * len(prompts)), flush=True)


if __name__ == "__main__":
    main()
