"""llama.cpp with bfloat16 weights; see ``rivals.py``. Runs in an environment of its own."""

import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

folder, work, threads = sys.argv[1:]
clock = time.process_time if os.environ["RIVAL_CLOCK"] == "cpu" else time.perf_counter
CONTEXT, SEQUENCES, BATCH = 32 * 1024, 32, 2048
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
REST = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors() -> Iterator[tuple[str, np.ndarray]]:
    """The checkpoint's tensors, bfloat16 as uint16."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                first, end = (begin + offset for offset in entry["data_offsets"])
                yield name, np.frombuffer(data[first:end], np.uint16).reshape(entry["shape"])


def convert(to: Path) -> None:
    """Write the Llama's checkpoint as llama.cpp wants it."""
    config = json.loads((Path(folder) / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(to), "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in tensors():
        stem = name.removesuffix(".weight")
        if stem in REST:
            target = REST[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            target = f"blk.{layer}.{LAYER[part]}"
        if target.endswith(("attn_q", "attn_k")):  # it turns neighbours against each other, not halves
            count = heads if target.endswith("attn_q") else kv_heads
            tensor = tensor.reshape(count, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        if tensor.ndim == 1:
            writer.add_tensor(f"{target}.weight", (tensor.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(tensor).view(np.uint8)
            writer.add_tensor(f"{target}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Engine:
    """The sequences of a request, decoded side by side."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_backend_init()
        model_options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_options)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = CONTEXT, BATCH, 512, SEQUENCES
        options.n_threads = options.n_threads_batch = int(threads)
        options.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, sequence, wants logits); returns the best tokens of those that want some."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        found = []
        for i, row in enumerate(rows):
            if row[3]:
                logits = llama_cpp.llama_get_logits_ith(self.context, i)
                found.append(int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax()))
        return found

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        """Prompts in batches, then all sequences side by side."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        begin = clock()
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        times: list[list[float]] = [[] for _ in prompts]
        tokens = []
        for at in range(0, len(rows), BATCH):
            part = rows[at : at + BATCH]
            tokens += self.decode(part)
            for row in part:
                if row[3]:
                    times[row[2]].append(clock() - begin)
        for step in range(new_tokens - 1):
            tokens = self.decode(
                [(t, len(p) + step, s, True) for s, (t, p) in enumerate(zip(tokens, prompts, strict=True))]
            )
            for seen in times:
                seen.append(clock() - begin)
        return times


def main() -> None:
    llama_cpp.llama_log_set(ctypes.cast(None, llama_cpp.llama_log_callback), None)
    path = Path(work) / "model.gguf"
    convert(path)
    engine = Engine(path)
    print("RIVAL " + json.dumps({"version": llama_cpp.__version__, "weights": "bf16", "threads": threads}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print("RIVAL " + json.dumps(engine.generate(request["prompts"], request["new_tokens"])), flush=True)


if __name__ == "__main__":
    main()
