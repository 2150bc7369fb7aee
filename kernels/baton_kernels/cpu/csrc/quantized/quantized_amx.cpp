// Panels of quantized weights times rows of inputs in AMX's tiles.
#include "quantized_amx.h"

#if defined(BATON_AMX)
namespace baton {
namespace {

class AmxPanel : public Panel {
 public:
  explicit AmxPanel(const Panel& panel) : Panel(panel) {}

  void multiply(const RowBlock<AmxInt8Inputs>* blocks, int count, float* memory) const {
    clear(blocks, count);
    int32_t* products = (int32_t*)memory;
    uint8_t* unpacked = (uint8_t*)(products + AMX_BLOCK * PW);
    Chunks<1>::visit(layout_, [&](const Segment& segment, long index, long first) {
      const long chunks = Chunks<1>::of(layout_, segment);
      const uint8_t* weights = bytes(segment, chunks, unpacked);
      for (int b = 0; b < count; ++b) {
        const uint8_t* x = blocks[b].x + first * CHUNK;
        amx_fence();
        amx_zero4();
        for (long c = 0; c < chunks; ++c) {
          _tile_loadd(4, x + c * CHUNK, CHUNK_BYTES);
          _tile_loadd(5, x + c * CHUNK + CHUNK / 2, CHUNK_BYTES);
          _tile_loadd(6, weights + c * 16 * PW * 4, PW * 4);
          _tile_loadd(7, weights + c * 16 * PW * 4 + 64, PW * 4);
          _tile_dpbsud(0, 4, 6);
          _tile_dpbsud(1, 4, 7);
          _tile_dpbsud(2, 5, 6);
          _tile_dpbsud(3, 5, 7);
        }
        amx_store4((float*)products, PW * 4);
        amx_fence();
        add(segment, products, blocks[b], blocks[b].input_sums + index * blocks[b].rows);
      }
    });
  }

  void multiply(const RowBlock<AmxBf16Inputs>* blocks, int count, float* memory) const {
    with_form(shape_.form, [&](auto form) { multiply_floats<form>(blocks, count, memory); });
  }

 private:
  // A segment's values as bytes: [16 * chunks][32 columns][4 inputs].
  const uint8_t* bytes(const Segment& segment, long chunks, uint8_t* unpacked) const {
    const vu* from = weights(segment);
    if (shape_.form == INT8 && segment.steps % 16 == 0) return (const uint8_t*)from;
    vu* to = (vu*)unpacked;
    for (long s = 0; s < segment.steps; ++s, from += 2) {
      if (shape_.form == INT8) {
        to[2 * s] = from[0], to[2 * s + 1] = from[1];
      } else {
        for (int v = 0; v < 2; ++v)
          to[4 * s + v] = half_of(from[v], 0), to[4 * s + 2 + v] = half_of(from[v], 1);
      }
    }
    const long filled = segment.steps * (shape_.form == INT8 ? 2 : 4);
    for (long i = filled; i < chunks * 32; ++i) to[i] = vu{};
    return unpacked;
  }

  void add(const Segment& segment, const int32_t* products, const RowBlock<AmxInt8Inputs>& block,
           const float* input_sums) const {
    const Numbers numbers(head(segment), shape_);
    for (int r = 0; r < block.rows; ++r)
      for (int v = 0; v < 2; ++v) {
        vi whole;
        std::memcpy(&whole, products + r * PW + v * VL, sizeof whole);
        float* to = block.sums + r * PW + v * VL;
        store(to, load(to) + scaled(numbers, whole, input_sums[r], 0, v));
      }
  }

  template <int form>
  void multiply_floats(const RowBlock<AmxBf16Inputs>* blocks, int count, float* memory) const {
    const Values<form> values(table_);
    Chunks<2>::visit(layout_, [&](const Segment& segment, long index, long first) {
      const long chunks = Chunks<2>::of(layout_, segment);
      pairs(values, segment, chunks, (vu*)memory);
      for (int b = 0; b < count; ++b) {
        const uint8_t* x = (const uint8_t*)(blocks[b].x) + first * CHUNK;
        amx_fence();
        if (index == 0)
          amx_zero4();
        else
          amx_load4(blocks[b].sums, PW * 4);
        for (long c = 0; c < chunks; ++c)
          amx_step4(x + c * CHUNK, CHUNK_BYTES, (const uint8_t*)memory + c * 16 * PW * 4, PW * 4);
        amx_store4(blocks[b].sums, PW * 4);
        amx_fence();
      }
    });
  }

  // A segment as pairs of bfloat16: [16 * chunks][32 columns][2 inputs].
  template <int form>
  void pairs(const Values<form>& values, const Segment& segment, long chunks, vu* to) const {
    constexpr int INPUTS = inputs_per_step(form);
    const Numbers numbers(head(segment), shape_);
    const vu* from = weights(segment);
    const auto rounded = [&](int v, vu bits, int j) {
      vf value = values(bits, j) * Values<form>::factor(j);
      if (has_zeros(form)) value -= numbers.zero[v];
      const vu whole = (vu)(value * numbers.scale[v]);
      return whole + (0x7fff + (whole >> 16 & 1));
    };
    for (long s = 0; s < segment.steps; ++s, from += 2)
#pragma GCC unroll 4
      for (int j = 0; j < INPUTS; j += 2)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v)
          *to++ = rounded(v, from[v], j) >> 16 | (rounded(v, from[v], j + 1) & 0xffff0000u);
    const long filled = segment.steps * INPUTS;
    for (long i = filled; i < chunks * 32; ++i) *to++ = vu{};
  }
};

}  // namespace

void multiply(const Panel& panel, const RowBlock<AmxInt8Inputs>* blocks, int count, float* memory) {
  AmxPanel(panel).multiply(blocks, count, memory);
}

void multiply(const Panel& panel, const RowBlock<AmxBf16Inputs>* blocks, int count, float* memory) {
  AmxPanel(panel).multiply(blocks, count, memory);
}

}  // namespace baton
#endif
