// Tensors of the operators' dtypes: 0 float32, 1 bfloat16, 2 float16.
#pragma once
#include "choices.h"

inline size_t width_of(int dtype) { return dtype ? 2 : 4; }

// Numbers of a dtype between -1 and 1.
inline Buffer<uint8_t> tensor(Choices &from, size_t count, int dtype) {
    Buffer<uint8_t> made(count * width_of(dtype));
    from.fill(made.get(), made.bytes());
    for (size_t i = 0; i < count; i++) {
        if (!dtype) {
            const float value = static_cast<int8_t>(made[4 * i]) / 128.0f;
            std::memcpy(&made[4 * i], &value, 4);
        } else {  // small exponents, any sign
            made[2 * i + 1] = (made[2 * i + 1] & 0x80) | (dtype == 1 ? 0x3e : 0x34);
        }
    }
    return made;
}

inline bool finite(Buffer<uint8_t> &numbers, int dtype) {
    for (size_t i = 0; i < numbers.size() / width_of(dtype); i++) {
        uint32_t bits = 0;
        std::memcpy(&bits, &numbers[i * width_of(dtype)], width_of(dtype));
        const uint32_t all = dtype == 0 ? 0x7f800000u : dtype == 1 ? 0x7f80u : 0x7c00u;
        if ((bits & all) == all) return false;
    }
    return true;
}
