// Products of weights of 8 and 4 bits with inputs rounded to int8, summed in integers, where instructions for that sum
// in 32 bits, or where there are none. quantized_narrow.h has the others.
#pragma once
#include "quantized_products.h"

namespace baton {

inline vu splat_word(uint32_t x) { return x - vu{}; }

// The low or high halves of bytes: values of 4 bits as bytes.
inline vu half_of(vu weights, int half) { return (half ? weights >> 4 : weights) & 0x0f0f0f0fu; }

// What is multiplied by integers lays a row of inputs out in words of 32 bits and sums a segment's products:
//   BASE: what weights of 8 bits are less by
//   words(): of a row, at most
//   lay(): row r of a block of `rows` from its bytes q [all_steps * inputs], which may be read VL words further
//   add(): sums[R][2] += a block's inputs times segment `index` of a panel
//   at(), step(): the words of a segment's inputs, and how many belong to a step

#if !defined(BATON_NARROW_SUMS)
#if defined(BATON_VNNI)
constexpr int BYTE_BASE = 0;  // weights are unsigned, inputs signed
inline vi add_quads(vi sum, vu a, vu b) {
#if defined(BATON_AVX512)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#endif
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int BYTE_BASE = 128;  // both are signed
inline vi add_quads(vi sum, vu a, vu b) { return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b); }
#else
constexpr int BYTE_BASE = 128;
inline vi add_quads(vi sum, vu a, vu b) {
  for (int j = 0; j < 4; ++j) sum += ((vi)(a << (24 - 8 * j)) >> 24) * (int32_t)(int8_t)(b[0] >> 8 * j);
  return sum;
}
#endif

// Sums in 32 bits. WORDS: of a row's inputs per step, each with four of them.
template <int WORDS_PER_STEP>
class WideDot {
 public:
  static constexpr int WORDS = WORDS_PER_STEP, BASE = WORDS == 1 ? BYTE_BASE : 0;

  static long words(const PackedLayout& a) { return a.all_steps() * WORDS; }

  static void lay(const PackedLayout& a, const int8_t* q, int r, int rows, uint32_t* out) {
    for (long w = 0; w < words(a); ++w) std::memcpy(out + w * rows + r, q + 4 * w, 4);
  }

  WideDot(const PackedLayout&, const uint32_t* inputs, int rows, const uint8_t*) : x_(inputs), rows_(rows) {}

  long step() const { return WORDS * rows_; }
  const uint32_t* at(const Segment& segment) const { return x_ + segment.at * step(); }

  template <int R>
  void add(const Segment& segment, long, const vu* weights, Ahead ahead, vi (&sums)[R][2]) const {
    const uint32_t* x = at(segment);
    vi acc[R][2];
    repeat<R>([&](auto r) __attribute__((always_inline)) { acc[r][0] = sums[r][0], acc[r][1] = sums[r][1]; });
    for (long s = 0; s < segment.steps; ++s, weights += 2, x += WORDS * R) {
      ahead.fetch();
      repeat<WORDS>([&](auto word) __attribute__((always_inline)) {
        const vu low = bytes(weights[0], word), high = bytes(weights[1], word);
        repeat<R>([&](auto r) __attribute__((always_inline)) {
          const vu inputs = splat_word(x[word * R + r]);
          acc[r][0] = add_quads(acc[r][0], low, inputs), acc[r][1] = add_quads(acc[r][1], high, inputs);
        });
      });
    }
    repeat<R>([&](auto r) __attribute__((always_inline)) { sums[r][0] = acc[r][0], sums[r][1] = acc[r][1]; });
  }

 private:
  static vu bytes(vu weights, int word) { return WORDS == 1 ? weights ^ BASE * 0x01010101u : half_of(weights, word); }

  const uint32_t* x_;
  int rows_;
};

using Dot8 = WideDot<1>;
using Dot4 = WideDot<2>;
#endif

}  // namespace baton
