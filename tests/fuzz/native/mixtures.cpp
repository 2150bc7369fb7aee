// From a router's logits to the outputs of the experts that were chosen, and from logits to tokens, over ragged shapes.
#include <algorithm>
#include <cmath>

#include "operators.h"
#include "tensors.h"

using namespace baton;

namespace {

int64_t told = 0;

void tell(int64_t begin, int64_t end) {
    REQUIRE(begin == told && end > begin);
    told = end;
}

int32_t number(Choices &from, int least, int most) { return static_cast<int32_t>(from.number(least, most)); }

const float *floats(Buffer<uint8_t> &buffer) { return reinterpret_cast<const float *>(buffer.get()); }

void mixture(Choices &from) {
    const int dtype = number(from, 0, 1);
    const int64_t tokens = from.flag() ? number(from, 0, 9) : number(from, 0, 300);
    Routing routing = {};
    routing.groups = from.flag() ? number(from, 1, 4) : 1;
    routing.experts = routing.groups * number(from, 2, 12), routing.top_groups = number(from, 1, routing.groups);
    routing.top_k = number(from, 1, routing.experts / routing.groups * routing.top_groups);
    auto logits = tensor(from, tokens * routing.experts, dtype), bias = tensor(from, routing.experts, 0);
    Buffer<int32_t> ids(tokens * routing.top_k);
    Buffer<float> weights(tokens * routing.top_k);
    routing.logits = logits.get(), routing.bias = from.flag() ? floats(bias) : nullptr;
    routing.ids = ids.get(), routing.weights = weights.get(), routing.tokens = tokens, routing.dtype = dtype;
    routing.scoring = number(from, 0, 2), routing.normalize = from.flag(), routing.scale = 2.5f, routing.threads = number(from, 1, 2);
    baton_route(&routing);
    for (int64_t t = 0; t < tokens; t++) {
        int32_t *chosen = ids.get() + t * routing.top_k;
        for (int k = 0; k < routing.top_k; k++) {
            REQUIRE(0 <= chosen[k] && chosen[k] < routing.experts && std::isfinite(weights[t * routing.top_k + k]));
            REQUIRE(std::find(chosen, chosen + k, chosen[k]) == chosen + k);
        }
    }

    Experts call = {};
    call.hidden = number(from, 1, 90), call.inner = number(from, 1, 70), call.experts = routing.experts, call.top_k = routing.top_k;
    const int64_t count = call.experts;
    auto gate_up = tensor(from, 2 * call.inner * call.hidden, dtype), down = tensor(from, call.hidden * call.inner, dtype);
    int64_t sizes[4];
    baton_experts_sizes(dtype, call.hidden, call.inner, sizes);
    Buffer<uint8_t> all_gate_up(count * sizes[0], true), all_down(count * sizes[1], true);
    for (int64_t e = 0; e < count; e++)
        baton_experts_pack(dtype, gate_up.get(), down.get(), reinterpret_cast<uint32_t *>(all_gate_up.get() + e * sizes[0]), reinterpret_cast<uint32_t *>(all_down.get() + e * sizes[1]), call.hidden, call.inner);
    const bool biased = from.flag();
    auto gate_up_bias = tensor(from, count * 2 * sizes[2], 0), down_bias = tensor(from, count * sizes[3], 0);
    call.x_stride = call.hidden + number(from, 0, 5), call.residual_stride = call.hidden + number(from, 0, 5);
    auto x = tensor(from, tokens ? (tokens - 1) * call.x_stride + call.hidden : 0, dtype);
    auto residual = tensor(from, tokens ? (tokens - 1) * call.residual_stride + call.hidden : 0, dtype);
    Buffer<uint8_t> out(tokens * call.hidden * width_of(dtype));
    if (from.byte() % 4 == 0)  // what is no expert's number chooses none
        for (size_t i = 0; i < ids.size(); i += number(from, 1, 5)) ids[i] = from.flag() ? -1 : call.experts + number(from, 0, 200);
    call.x = x.get(), call.ids = ids.get(), call.weights = weights.get(), call.out = out.get();
    call.gate_up = all_gate_up.get(), call.down = all_down.get();
    if (biased) call.gate_up_bias = floats(gate_up_bias), call.down_bias = floats(down_bias);
    if (from.flag()) call.residual = residual.get();
    call.tokens = tokens, call.dtype = dtype, call.activation = number(from, 0, 2), call.pairs = from.flag() && baton_pairs_are_faster();
    call.threads = number(from, 1, 2), call.alpha = 1.702f, call.limit = 7.0f;
    baton_experts(&call);
    REQUIRE(finite(out, dtype));
}

void sample(Choices &from) {
    const int dtype = number(from, 0, 2);
    const int64_t rows = number(from, 0, 6), vocab = from.flag() ? number(from, 1, 300) : number(from, 1, 5000), stride = vocab + number(from, 0, 9);
    auto logits = tensor(from, rows ? (rows - 1) * stride + vocab : 0, dtype);
    Buffer<Filter> filters(rows);
    Buffer<int64_t> tokens(rows);
    Buffer<uint64_t> seeds(rows), positions(rows);
    const bool damaged = rows && from.byte() % 8 == 0;
    if (damaged) {  // infinite or not a number, in the first row
        const uint32_t all = dtype == 0 ? 0x7f800000u : dtype == 1 ? 0x7f80u : 0x7c00u, bits = all | from.flag();
        std::memcpy(logits.get() + from.number(0, vocab - 1) * width_of(dtype), &bits, width_of(dtype));
    }
    for (int64_t r = 0; r < rows; r++) {
        Filter &filter = filters[r];
        filter.temperature = from.flag() ? number(from, 1, 300) / 100.0f : 0.0f, filter.top_p = from.flag() ? number(from, 1, 100) / 100.0f : 1.0f;
        filter.min_p = from.flag() ? number(from, 0, 100) / 100.0f : 0.0f, filter.top_k = from.flag() ? number(from, 0, 6000) : 0;
        seeds[r] = from.word(), positions[r] = from.byte();
    }
    const int64_t words = (vocab + 31) / 32;
    Buffer<uint32_t> bits(rows * words);
    Buffer<const uint32_t *> masks(rows);
    const bool masked = from.flag();
    for (int64_t r = damaged; masked && r < rows; r++) {
        if (from.byte() % 4 == 0) continue;
        for (int64_t w = 0; w < words; w++) bits[r * words + w] = from.flag() ? (uint32_t)from.word() : 0;
        const int64_t allowed = from.number(0, vocab - 1);
        bits[r * words + allowed / 32] |= 1u << allowed % 32;
        masks[r] = bits.get() + r * words;
    }
    SampleOp call = {};
    if (masked) call.masks = masks.get();
    Buffer<int64_t> at(rows), kept(8 * rows), watched(rows);  // as many as MOST_KEPT
    for (int64_t r = 0; r < rows; r++) at[r] = r;
    if (from.flag()) call.at = at.get(), call.kept = kept.get();
    told = 0;
    for (int64_t r = 0; r < rows; r++) watched[r] = rows - 1 - r;
    if (from.flag()) call.ready = tell, call.num_watched = from.number(0, static_cast<int>(rows));
    call.logits = logits.get(), call.filters = filters.get(), call.seeds = seeds.get(), call.positions = positions.get(), call.tokens = tokens.get();
    call.watched = watched.get(), call.again = from.flag(), call.rows = rows, call.vocab = vocab, call.stride = stride, call.dtype = dtype, call.threads = number(from, 1, 2);
    baton_sample(&call);
    REQUIRE(told == call.num_watched);
    for (int64_t r = 0; r < rows; r++) {
        REQUIRE(damaged && r == 0 ? tokens[r] == -1 : 0 <= tokens[r] && tokens[r] < vocab);
        REQUIRE(!masks[r] || masks[r][tokens[r] / 32] >> tokens[r] % 32 & 1);
        for (int64_t i = 0; call.kept && i < 8; i++) REQUIRE(kept[8 * r] < 0 || (-1 <= kept[8 * r + i] && kept[8 * r + i] < vocab));
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Choices from(data, size);
    from.byte() % 3 ? mixture(from) : sample(from);
    return 0;
}
