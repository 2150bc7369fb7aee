// Quantized weights into panels; see quantized.h.
#include "quantized.h"

namespace baton {
namespace {

// Stores a float as what it is exactly in the narrow type.
void put_number(uint8_t* at, int narrow, long index, float value) {
  if (narrow == 0) {
    std::memcpy(at + index * 4, &value, 4);
  } else if (narrow == 1) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t high = (uint16_t)(bits >> 16);
    std::memcpy(at + index * 2, &high, 2);
  } else {
    f16 half[VL];
    store(half, splat(value));
    std::memcpy(at + index * 2, half, 2);
  }
}

// The 32-bit lane of inputs `first` to `end` of a row: four bytes, or eight halves of bytes.
uint32_t lane(const QuantizedShape& a, const uint8_t* row, long first, long end) {
  uint32_t bits = 0;
  if (inputs_per_step(a.form) == 4) {
    for (long i = first; i < end; ++i) bits |= (uint32_t)(a.form == INT8 ? row[i] ^ 0x80 : row[i]) << 8 * (i - first);
    return bits;
  }
  for (long i = first; i < end; ++i) {
    const uint32_t value = row[i / 2] >> 4 * (i % 2) & 15;
    const long k = i - first;
    bits |= value << (k < 4 ? 8 * k : 8 * (k - 4) + 4);
  }
  return bits;
}

// A quarter of the largest sum of squares that weights of a burst have in any column of panel p, rounded up: see
// quantized_narrow.h. The burst is steps `first` to `end` of group g.
uint16_t bound_of(const QuantizedShape& a, const PackedLayout& layout, const uint8_t* values, long p, long g,
                  long first, long end) {
  const long begin = g * layout.group + first * layout.inputs;
  const long until = std::min({(g + 1) * layout.group, a.in_features, g * layout.group + end * layout.inputs});
  int32_t most = 0;
  for (long c = 0; c < PW; ++c) {
    const long row = PackedLayout::row(a, p, c);
    if (row < 0) continue;
    int32_t squares[2] = {};  // of inputs 0 and 1, and of 2 and 3, of each step
    for (long i = begin; i < until; ++i) {
      const int32_t value = (int8_t)values[row * a.in_features + i];
      squares[(i - begin) % 4 / 2] += value * value;
    }
    most = std::max({most, squares[0], squares[1]});
  }
  return (uint16_t)std::max(1, (most + 3) / 4);
}

void pack_panel(const QuantizedShape& a, const PackedLayout& layout, const uint8_t* values, const float* scales,
                const float* zeros, long p, uint8_t* out) {
  const long row_bytes = inputs_per_step(a.form) == 4 ? a.in_features : a.in_features / 2;
  std::memset(out, 0, layout.panel_bytes);
  for (long g = 0; g < layout.groups; ++g) {
    uint8_t* head = out + g * layout.group_bytes;
    const long end = std::min<long>(a.in_features, (g + 1) * layout.group);
    for (long c = 0; c < PW; ++c) {
      const long row = PackedLayout::row(a, p, c);
      if (row < 0) continue;
      put_number(head, a.narrow, c, scales[row * layout.groups + g]);
      if (a.own_zeros) put_number(head + PW * layout.number_bytes, a.narrow, c, zeros[row * layout.groups + g]);
      uint32_t* lanes = (uint32_t*)(head + layout.head) + c;
      for (long s = 0; s < layout.steps(g); ++s) {
        const long first = g * layout.group + s * layout.inputs;
        lanes[s * PW] = lane(a, values + row * row_bytes, first, std::min(end, first + layout.inputs));
      }
    }
    if (!PackedLayout::has_bounds(a)) continue;
    uint16_t* bounds = (uint16_t*)(out + layout.bounds) + g * layout.group_bursts;
    for (long s = 0; s < layout.steps(g); s += BURST)
      *bounds++ = bound_of(a, layout, values, p, g, s, std::min(s + BURST, layout.steps(g)));
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" int64_t baton_quantized_packed_size(const QuantizedShape* a) {
  const PackedLayout layout(*a);
  return layout.panels * layout.panel_bytes;
}

extern "C" void baton_quantized_pack(const QuantizedShape* a, const uint8_t* values, const float* scales,
                                     const float* zeros, uint8_t* packed) {
  const PackedLayout layout(*a);
  parallel(0, [&](const Team& team) {
    team.share(layout.panels, [&](long p) {
      pack_panel(*a, layout, values, scales, zeros, p, packed + p * layout.panel_bytes);
    });
  });
}
