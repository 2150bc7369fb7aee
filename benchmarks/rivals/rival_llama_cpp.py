"""llama.cpp with bfloat16, q8_0 or q4_0 weights; see ``engines.py``. Runs in an environment of its own.

Its library is the one that xllamacpp brings along.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

folder, work, threads, weights = sys.argv[1:]
clock = time.process_time if os.environ["RIVAL_CLOCK"] == "cpu" else time.perf_counter
CONTEXT = 32 * 1024
SEQUENCES = 32
BATCH = 2048
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
DTYPE = gguf.GGMLQuantizationType[weights.upper()]
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
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
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
            if weights != "bf16":
                raw = gguf.quants.quantize((tensor.astype(np.uint32) << 16).view(np.float32), DTYPE)
            writer.add_tensor(f"{target}.weight", raw, raw_dtype=DTYPE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Batch(ctypes.Structure):
    """``llama_batch``."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


class Options(ctypes.Structure):
    """``llama_context_params``, and ``llama_model_params``, of this very version, with room behind them."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        ("between", ctypes.c_uint32 * 3),
        *((name, ctypes.c_int32) for name in ("n_threads", "n_threads_batch")),
        ("rest", ctypes.c_uint8 * 105),
        ("kv_unified", ctypes.c_bool),
        ("behind", ctypes.c_uint8 * 370),
    )


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def LOG(level: int, text: bytes, _: int) -> None:
    """Keep llama.cpp's log from standard output."""


def load_library() -> ctypes.CDLL:
    (path,) = Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")
    library = ctypes.CDLL(str(path))
    pointers = ("llama_model_load_from_file", "llama_init_from_model", "llama_model_get_vocab", "llama_get_memory")
    for name in pointers:
        library[name].restype = ctypes.c_void_p
    for name in ("llama_context_default_params", "llama_model_default_params"):
        getattr(library, name).restype = Options
    library.llama_batch_init.restype = Batch
    library.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    return library


class Engine:
    """The sequences of a request, decoded side by side."""

    def __init__(self, path: Path) -> None:
        llama = self.llama = load_library()
        llama.llama_log_set(LOG, None)
        llama.llama_backend_init()
        model = ctypes.c_void_p(
            llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        )
        options = llama.llama_context_default_params()
        if (options.n_ctx, options.n_batch, options.n_ubatch, options.n_threads) != (512, 2048, 512, 4):
            raise RuntimeError("llama_context_params lies elsewhere in this version")
        options.n_ctx = CONTEXT
        options.n_batch = BATCH
        options.n_ubatch = 512
        options.n_seq_max = SEQUENCES
        options.n_threads = options.n_threads_batch = int(threads)
        options.kv_unified = True
        self.context = ctypes.c_void_p(llama.llama_init_from_model(model, options))
        if llama.llama_n_ctx_seq(self.context) != CONTEXT:
            raise RuntimeError("kv_unified lies elsewhere in this version")
        self.memory = ctypes.c_void_p(llama.llama_get_memory(self.context))
        self.vocab = llama.llama_vocab_n_tokens(ctypes.c_void_p(llama.llama_model_get_vocab(model)))
        self.batch = llama.llama_batch_init(BATCH, 0, 1)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, sequence, wants logits); returns the best tokens of those that want some."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        if self.llama.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        results = []
        for i, row in enumerate(rows):
            if row[3]:
                logits = self.llama.llama_get_logits_ith(self.context, i)
                results.append(int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax()))
        return results

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[float]]:
        """Prompts in batches, then all sequences side by side."""
        self.llama.llama_memory_clear(self.memory, True)
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
    path = Path(work) / "model.gguf"
    convert(path)
    engine = Engine(path)
    print("RIVAL " + json.dumps({"version": xllamacpp.__version__, "weights": weights, "threads": threads}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print("RIVAL " + json.dumps(engine.generate(request["prompts"], request["new_tokens"])), flush=True)


if __name__ == "__main__":
    main()
