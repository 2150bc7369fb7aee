// Many rows of inputs for AMX's tiles, in blocks of up to 32, whose sums have room for 32: rounded to int8, multiplied in
// integers, or in bfloat16, as weights are then unpacked.
#pragma once
#include "../amx.h"
#include "quantized_panel.h"

#if defined(BATON_AMX)
namespace baton {

static_assert(PW == 32, "a panel is two tiles wide");

constexpr int AMX_BLOCK = 32;         // rows of a block: two tiles
constexpr long AMX_LEAST_ROWS = 16;   // fewer are read from memory as fast without tiles
constexpr long CHUNK_BYTES = 64;      // of a row of inputs in a tile
constexpr long CHUNK = AMX_BLOCK * CHUNK_BYTES;
constexpr size_t AMX_MEMORY = SEGMENT_INPUTS * PW / 2 + AMX_BLOCK * PW;  // floats

// Tiles of inputs for the segments of a panel: each ends its last one with zeros. UNIT: bytes of an input.
template <int UNIT>
struct Chunks {
  static constexpr long INPUTS = CHUNK_BYTES / UNIT;

  static long of(const PackedLayout& a, const Segment& segment) { return ceil_div(segment.steps * a.inputs, INPUTS); }

  // Call each(segment, its index, its first chunk); returns all chunks.
  template <class F>
  static long visit(const PackedLayout& a, F each) {
    const long segments = a.segments;
    long first = 0;
    for (long i = 0; i < segments; ++i) {
      const Segment segment = segment_of(a, i);
      each(segment, i, first);
      first += of(a, segment);
    }
    return first;
  }
};

// Inputs in int8: [chunks][32 rows][64]. Sums as Int8Inputs.
struct AmxInt8Inputs {
  using Word = uint8_t;
  using Sum = float;  // of integers
  using Tiles = Chunks<1>;
  using Guard = AmxTiles;
  static constexpr int ROWS = AMX_BLOCK;
  static constexpr size_t MEMORY = AMX_MEMORY;

  static long words(const PackedLayout& a, int) {
    return Tiles::visit(a, [](const Segment&, long, long) {}) * CHUNK / ROWS;
  }

  static float put(const PackedLayout& a, int, const float* x, float scale, int r, int rows, uint8_t* out,
                   float* sums) {
    static thread_local Scratch memory;
    int8_t* q = memory.get<int8_t>(a.all_steps() * a.inputs + 4 * VL);
    const float damage = Int8Inputs::round(x, a.all_steps() * a.inputs, scale, q);
    Tiles::visit(a, [&](const Segment& segment, long i, long first) {
      const long count = segment.steps * a.inputs, chunks = Tiles::of(a, segment);
      const int8_t* from = q + segment.at * a.inputs;
      int32_t sum = 0;
      for (long k = 0; k < count; ++k) sum += from[k];
      sums[i * rows + r] = (float)sum;
      for (long c = 0; c < chunks; ++c) {
        uint8_t* to = out + (first + c) * CHUNK + r * CHUNK_BYTES;
        const long some = std::min(CHUNK_BYTES, count - c * CHUNK_BYTES);
        std::memcpy(to, from + c * CHUNK_BYTES, some);
        std::memset(to + some, 0, CHUNK_BYTES - some);
      }
    });
    return scale + damage;
  }
};

// Inputs in bfloat16: [chunks][32 rows][32].
struct AmxBf16Inputs {
  using Word = bf16;
  using Sum = int32_t;  // none
  using Tiles = Chunks<2>;
  using Guard = AmxTiles;
  static constexpr int ROWS = AMX_BLOCK;
  static constexpr size_t MEMORY = AMX_MEMORY;

  static long words(const PackedLayout& a, int) {
    return Tiles::visit(a, [](const Segment&, long, long) {}) * CHUNK / ROWS / 2;
  }

  static float put(const PackedLayout& a, int, const float* x, float, int r, int, bf16* out, int32_t*) {
    Tiles::visit(a, [&](const Segment& segment, long, long first) {
      const long count = segment.steps * a.inputs, chunks = Tiles::of(a, segment);
      const float* from = x + segment.at * a.inputs;
      for (long c = 0; c < chunks; ++c) {
        bf16* to = out + ((first + c) * CHUNK + r * CHUNK_BYTES) / 2;
        for (long k = 0; k < Tiles::INPUTS; k += VL) {
          const long at = c * Tiles::INPUTS + k;
          store(to + k, at < count ? load_upto(from + at, count - at) : vf{});
        }
      }
    });
    return 1.0f;
  }
};

void multiply(const Panel& panel, const RowBlock<AmxInt8Inputs>* blocks, int count, float* memory);
void multiply(const Panel& panel, const RowBlock<AmxBf16Inputs>* blocks, int count, float* memory);

}  // namespace baton
#endif
