// The engine's operators over ragged shapes of every kind, in memory that ends where their arguments end.
#include <algorithm>
#include <cmath>
#include <vector>

#include "choices.h"
#include "operators.h"
#include "tensors.h"

using namespace baton;

namespace {

void rows(Choices &from) {
    const int dtype = static_cast<int>(from.number(0, 2));
    const int64_t count = static_cast<int64_t>(from.number(0, 20)), dim = static_cast<int64_t>(from.number(1, 200));
    const bool norm = from.flag();
    const int64_t wide = norm ? dim : 2 * dim, stride = wide + static_cast<int64_t>(from.number(0, 9));
    auto x = tensor(from, count ? (count - 1) * stride + wide : 0, dtype), weight = tensor(from, dim, dtype);
    auto residual = tensor(from, count * dim, dtype);
    Buffer<uint8_t> out(count * dim * width_of(dtype));
    RowOp call = {};
    call.x = x.get(), call.weight = weight.get(), call.out = out.get(), call.residual = from.flag() ? residual.get() : nullptr;
    call.rows = count, call.dim = dim, call.x_stride = stride, call.dtype = dtype;
    call.threads = static_cast<int32_t>(from.number(1, 2)), call.activation = static_cast<int32_t>(from.number(0, 2));
    call.eps = 1e-5f, call.offset = from.flag() ? 1.0f : 0.0f, call.alpha = 1.702f, call.limit = 7.0f;
    norm ? baton_rms_norm(&call) : baton_gated_mul(&call);
    REQUIRE(finite(out, dtype));
}

void linear(Choices &from) {
    const int64_t count = static_cast<int64_t>(from.number(0, from.flag() ? 70 : 9)), stride_more = static_cast<int64_t>(from.number(0, 5));
    const int64_t in = static_cast<int64_t>(from.number(1, 150)), outs = static_cast<int64_t>(from.number(1, 150));
    const bool amx = from.flag() && baton_amx_ready();
    auto weight = tensor(from, in * outs, 1), x = tensor(from, count ? (count - 1) * (in + stride_more) + in : 0, 1);
    auto bias = tensor(from, outs, 0), residual = tensor(from, count * outs, 1);
    Buffer<uint8_t> out(count * outs * 2);
    Buffer<uint32_t> packed(amx ? (baton_linear_amx_packed_size(outs, in) + 1) / 2 : (baton_linear_packed_size(outs, in) + 1) / 2, true);
    const auto *weights = reinterpret_cast<const uint16_t *>(weight.get());
    if (amx) baton_linear_amx_pack(weights, reinterpret_cast<uint16_t *>(packed.get()), outs, in);
    else baton_linear_pack(weights, packed.get(), outs, in);
    Linear call = {};
    call.x = x.get(), call.packed = packed.get(), call.out = out.get();
    call.bias = from.flag() ? reinterpret_cast<const float *>(bias.get()) : nullptr;
    call.residual = from.flag() ? residual.get() : nullptr;
    call.rows = count, call.x_stride = in + stride_more, call.residual_stride = outs, call.out_stride = outs;
    call.in_features = static_cast<int32_t>(in), call.out_features = static_cast<int32_t>(outs);
    call.threads = static_cast<int32_t>(from.number(1, 2));
    amx ? baton_linear_amx(&call) : baton_linear(&call);
    REQUIRE(finite(out, 1));
}

void attention(Choices &from) {
    Attention a = {};
    const bool long_one = from.byte() % 8 == 0;
    a.dtype = static_cast<int32_t>(from.number(0, 2)), a.num_seqs = static_cast<int32_t>(from.number(0, 4));
    a.kv_heads = static_cast<int32_t>(from.number(1, 3)), a.num_heads = a.kv_heads * static_cast<int32_t>(from.number(1, 10));
    a.k_dim = 2 * static_cast<int32_t>(from.number(1, 40)), a.v_dim = from.flag() ? a.k_dim : static_cast<int32_t>(from.number(1, 80));
    a.block_size = static_cast<int32_t>(from.number(1, 32)), a.window = from.flag() ? static_cast<int32_t>(from.number(1, 80)) : 0;
    a.threads = static_cast<int32_t>(from.number(1, 2)), a.pairs = from.flag(), a.amx = from.flag() && baton_amx_ready();
    if ((a.latent = from.byte() % 4 == 0)) a.kv_heads = 1, a.v_dim = std::min(a.v_dim, a.k_dim), a.num_heads = std::max(a.num_heads, 1);
    a.rotate_pairs = from.flag();
    a.scale = 0.1f, a.softcap = from.flag() ? 20.0f : 0.0f, a.norm_eps = 1e-6f, a.norm_offset = from.flag() ? 1.0f : 0.0f;
    std::vector<int32_t> starts = {0}, lens;
    int32_t longest = 1;
    for (int i = 0; i < a.num_seqs; i++) {
        const int32_t fresh = from.flag() ? 1 : static_cast<int32_t>(from.number(0, long_one ? 150 : 12));
        const int32_t before = static_cast<int32_t>(from.number(fresh ? 0 : 1, long_one ? 700 : 60));
        starts.push_back(starts.back() + fresh);
        lens.push_back(before + fresh);
        longest = std::max(longest, lens.back());
    }
    const int32_t width = (longest + a.block_size - 1) / a.block_size, blocks = std::max(1, width * a.num_seqs);
    Buffer<int32_t> query_starts(starts.size()), context_lens(lens.size()), tables(static_cast<size_t>(width) * a.num_seqs);
    std::copy(starts.begin(), starts.end(), query_starts.get());
    std::copy(lens.begin(), lens.end(), context_lens.get());
    const int32_t turn = static_cast<int32_t>(from.number(0, blocks - 1));
    for (int i = 0; i < a.num_seqs; i++)  // a block of its own for what a sequence has; what lies behind is never read
        for (int32_t b = 0; b < width; b++)
            tables[i * width + b] = b * a.block_size < lens[i] ? (i * width + b + turn) % blocks : INT32_MAX / 2;
    const size_t tokens = static_cast<size_t>(starts.back());
    const int64_t keys = int64_t{a.kv_heads} * a.block_size * a.k_dim, values = a.latent ? 0 : int64_t{a.kv_heads} * a.block_size * a.v_dim;
    const bool stored = !a.latent && from.byte() % 3 == 0;  // as int8 or fp8, or bfloat16 beside float32
    a.storage = !stored ? a.dtype : a.dtype == 0 && from.flag() ? 1 : static_cast<int32_t>(from.number(3, 4));
    const size_t unit = a.storage < 3 ? width_of(a.storage) : 1, all = blocks * (keys + values);
    auto pool = a.storage < 3 ? tensor(from, all, a.storage) : Buffer<uint8_t>(all);
    if (a.storage >= 3) {
        from.fill(pool.get(), all);
        for (size_t i = 0; i < all; i++)
            if (a.storage == 4 && (pool[i] & 0x7f) == 0x7f) pool[i] ^= 1;  // no number
    }
    const size_t num_scales = a.storage == 3 ? static_cast<size_t>(blocks) * a.kv_heads * a.block_size : a.kv_heads;
    auto k_scales = tensor(from, num_scales, a.storage == 3), v_scales = tensor(from, num_scales, a.storage == 3);
    if (a.storage == 4)
        for (size_t i = 0; i < num_scales; i++)
            reinterpret_cast<float *>(k_scales.get())[i] = reinterpret_cast<float *>(v_scales.get())[i] = 0.5f;
    a.k_scales = k_scales.get(), a.v_scales = v_scales.get(), a.scale_stride = int64_t{a.kv_heads} * a.block_size;
    auto q = tensor(from, tokens * a.num_heads * a.k_dim, a.dtype);
    auto k = tensor(from, tokens * a.kv_heads * a.k_dim, a.dtype), v = tensor(from, a.latent ? 0 : tokens * a.kv_heads * a.v_dim, a.dtype);
    auto sinks = tensor(from, a.num_heads, 0), q_norm = tensor(from, a.k_dim, a.dtype), k_norm = tensor(from, a.k_dim, a.dtype);
    a.rotary = 2 * static_cast<int32_t>(from.number(1, a.k_dim / 2));
    auto cos = tensor(from, static_cast<size_t>(longest) * a.rotary / 2, 0), sin = tensor(from, static_cast<size_t>(longest) * a.rotary / 2, 0);
    Buffer<uint8_t> out(tokens * a.num_heads * a.v_dim * width_of(a.dtype));
    a.q = q.get(), a.k = k.get(), a.v = v.get(), a.out = out.get();
    a.k_pool = pool.get(), a.v_pool = pool.get() + (a.latent ? 0 : keys * unit), a.block_stride = keys + values;
    a.q_head = a.k_dim, a.q_token = int64_t{a.num_heads} * a.k_dim, a.k_head = a.k_dim, a.k_token = int64_t{a.kv_heads} * a.k_dim;
    a.v_head = a.v_dim, a.v_token = int64_t{a.kv_heads} * a.v_dim, a.table_stride = width;
    a.query_starts = query_starts.get(), a.context_lens = context_lens.get(), a.block_tables = tables.get();
    if (from.flag()) a.sinks = reinterpret_cast<const float *>(sinks.get());
    if (from.flag()) {
        a.cos = reinterpret_cast<const float *>(cos.get()), a.sin = reinterpret_cast<const float *>(sin.get());
        if (from.flag()) a.q_norm = q_norm.get(), a.k_norm = k_norm.get();
    }
    REQUIRE(baton_paged_attention(&a) == 0);
    REQUIRE(finite(out, a.dtype));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Choices from(data, size);
    switch (from.byte() % 4) {
        case 0: rows(from); break;
        case 1: linear(from); break;
        default: attention(from);
    }
    return 0;
}
