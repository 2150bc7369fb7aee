// Quantized weights of any form and shape packed, and multiplied by linear layers and experts.
#include <cmath>

#include "operators.h"
#include "tensors.h"

using namespace baton;

namespace {

int32_t number(Choices &from, int least, int most) { return static_cast<int32_t>(from.number(least, most)); }

const float *floats(Buffer<uint8_t> &buffer) { return reinterpret_cast<const float *>(buffer.get()); }

bool in_bytes(int form) { return form == 0 || form == 2; }

// `count` weights of a shape, one behind the other.
Buffer<uint8_t> packed(Choices &from, const QuantizedShape &shape, int count) {
    const int64_t groups = (shape.in_features + shape.group - 1) / shape.group;
    const int64_t size = baton_quantized_packed_size(&shape);
    Buffer<uint8_t> made(size * count, true);
    for (int i = 0; i < count; i++) {
        Buffer<uint8_t> values(shape.out_features * (in_bytes(shape.form) ? shape.in_features : shape.in_features / 2));
        from.fill(values.get(), values.bytes());
        auto scales = tensor(from, shape.out_features * groups, 0), zeros = tensor(from, shape.out_features * groups, 0);
        baton_quantized_pack(&shape, values.get(), floats(scales), shape.own_zeros ? floats(zeros) : nullptr, made.get() + i * size);
    }
    return made;
}

QuantizedShape shape_of(Choices &from, int64_t in, int64_t out, int form) {
    QuantizedShape shape = {};
    shape.in_features = in, shape.out_features = out, shape.form = form;
    const int step = in_bytes(form) ? 1 : 2;
    shape.group = from.flag() ? step * number(from, 1, 40) : in;
    if (in % shape.group && form != 2) shape.group = in;  // the blocks of fp8 alone may end early
    shape.narrow = number(from, 0, 2);
    if (form < 2) shape.own_zeros = from.flag(), shape.zero = from.flag() ? 8 : 128;
    return shape;
}

// Any order, each input once.
Buffer<int32_t> order_of(Choices &from, int64_t count) {
    Buffer<int32_t> order(count);
    const int64_t turn = static_cast<int64_t>(from.number(0, count - 1));
    for (int64_t i = 0; i < count; i++) order[i] = static_cast<int32_t>((i + turn) % count);
    return order;
}

void linear(Choices &from) {
    const int form = number(from, 0, 3), dtype = number(from, 0, 2);
    const int64_t in = number(from, 1, from.flag() ? 700 : 90) * (in_bytes(form) ? 1 : 2), out = number(from, 1, 150);
    QuantizedLinear call = {};
    call.shape = shape_of(from, in, out, form);
    auto weight = packed(from, call.shape, 1), table = tensor(from, 16, 0), bias = tensor(from, out, 0);
    auto order = order_of(from, in);
    call.rows = number(from, 0, from.flag() ? 140 : 9), call.x_stride = in + number(from, 0, 5);
    call.residual_stride = out + number(from, 0, 5), call.out_stride = out;
    auto x = tensor(from, call.rows ? (call.rows - 1) * call.x_stride + in : 0, dtype);
    auto residual = tensor(from, call.rows ? (call.rows - 1) * call.residual_stride + out : 0, dtype);
    Buffer<uint8_t> result(call.rows * out * width_of(dtype));
    if (from.flag())  // values that bfloat16 has too
        for (int i = 0; i < 16; i++) reinterpret_cast<uint16_t *>(table.get())[2 * i] = 0;
    call.x = x.get(), call.packed = weight.get(), call.table = floats(table), call.out = result.get();
    if (from.flag()) call.bias = floats(bias);
    if (from.flag()) call.order = order.get();
    if (from.flag()) call.residual = residual.get();
    call.dtype = dtype, call.threads = number(from, 1, 2), call.int8_inputs = form < 2 && from.flag();
    call.scale = from.flag() ? 0.01f : 0.0f;
    call.amx = from.flag() && baton_amx_ready(), call.pairs = from.flag();
    baton_quantized_linear(&call);
    // fp8 has values that are no numbers, which come out as large ones
    if (dtype != 2) REQUIRE(finite(result, dtype));
}

void experts(Choices &from) {
    const int form = number(from, 0, 3), dtype = number(from, 0, 2);
    const int64_t hidden = 2 * number(from, 1, 50), inner = 2 * number(from, 1, 40), tokens = number(from, 0, from.flag() ? 60 : 5);
    QuantizedExperts call = {};
    call.experts = number(from, 1, 6), call.top_k = number(from, 1, call.experts);
    call.gate_up = shape_of(from, hidden, 2 * inner, form), call.down = shape_of(from, inner, hidden, form);
    call.gate_up.gated = 1;
    auto gate_up = packed(from, call.gate_up, call.experts), down = packed(from, call.down, call.experts);
    auto table = tensor(from, 16, 0), weights = tensor(from, tokens * call.top_k, 0);
    auto gate_up_bias = tensor(from, call.experts * 2 * inner, 0), down_bias = tensor(from, call.experts * hidden, 0);
    auto first = order_of(from, hidden), second = order_of(from, inner);
    Buffer<int32_t> ids(tokens * call.top_k);
    for (size_t i = 0; i < ids.size(); i++) ids[i] = number(from, 0, call.experts + 1) - 1;  // some are nobody's
    call.x_stride = hidden + number(from, 0, 5), call.residual_stride = hidden + number(from, 0, 5), call.tokens = tokens;
    auto x = tensor(from, tokens ? (tokens - 1) * call.x_stride + hidden : 0, dtype);
    auto residual = tensor(from, tokens ? (tokens - 1) * call.residual_stride + hidden : 0, dtype);
    Buffer<uint8_t> result(tokens * hidden * width_of(dtype));
    call.x = x.get(), call.ids = ids.get(), call.weights = floats(weights), call.out = result.get();
    call.packed_gate_up = gate_up.get(), call.packed_down = down.get(), call.gate_up_table = call.down_table = floats(table);
    if (from.flag()) call.gate_up_order = first.get(), call.down_order = second.get();
    if (from.flag()) call.gate_up_bias = floats(gate_up_bias), call.down_bias = floats(down_bias);
    if (from.flag()) call.residual = residual.get();
    call.dtype = dtype, call.activation = number(from, 0, 2), call.int8_inputs = form < 2 && from.flag();
    call.threads = number(from, 1, 2), call.alpha = 1.702f, call.limit = 7.0f;
    call.amx = from.flag() && baton_amx_ready(), call.pairs = from.flag();
    baton_quantized_experts(&call);
    if (dtype == 0) REQUIRE(finite(result, dtype));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Choices from(data, size);
    from.byte() % 3 ? linear(from) : experts(from);
    return 0;
}
