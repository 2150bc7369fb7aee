// How rows of inputs are multiplied with a segment of quantized weights: rounded to int8 and summed in integers, or as
// they are in float32.
#pragma once
#include "quantized.h"

namespace baton {

constexpr long QUANTIZED_AHEAD = 4096;  // bytes that a streamed panel is fetched ahead

// --- integers: inputs in int8 -------------------------------------------------------------------------------------

#if defined(BATON_AVX512)
typedef __m512i Bytes;
inline Bytes add_pairs16(vu a, vu b) { return _mm512_madd_epi16((Bytes)a, (Bytes)b); }
inline Bytes add_pairs8(vu a, vu b) { return _mm512_maddubs_epi16((Bytes)a, (Bytes)b); }
inline Bytes add16(Bytes a, Bytes b) { return _mm512_add_epi16(a, b); }
inline vu shift16(vu a, int n) { return (vu)_mm512_srli_epi16((Bytes)a, n); }
#elif defined(__AVX2__)
typedef __m256i Bytes;
inline Bytes add_pairs16(vu a, vu b) { return _mm256_madd_epi16((Bytes)a, (Bytes)b); }
inline Bytes add_pairs8(vu a, vu b) { return _mm256_maddubs_epi16((Bytes)a, (Bytes)b); }
inline Bytes add16(Bytes a, Bytes b) { return _mm256_add_epi16(a, b); }
inline vu shift16(vu a, int n) { return (vu)_mm256_srli_epi16((Bytes)a, n); }
#endif
#if defined(BATON_AVX512) && defined(__AVX512VNNI__)
#define BATON_VNNI 1
inline vi add_quads(vi sum, vu a, vu b) { return (vi)_mm512_dpbusd_epi32((Bytes)sum, (Bytes)a, (Bytes)b); }
#elif defined(__AVX2__) && defined(__AVXVNNI__)
#define BATON_VNNI 1
inline vi add_quads(vi sum, vu a, vu b) { return (vi)_mm256_dpbusd_avx_epi32((Bytes)sum, (Bytes)a, (Bytes)b); }
#endif

inline vu splat_word(uint32_t x) { return x - vu{}; }
inline uint32_t word_of(const int8_t* q) {
  uint32_t word;
  std::memcpy(&word, q, 4);
  return word;
}

#if defined(__ARM_FEATURE_DOTPROD)
// Sums of products of signed bytes: 8-bit weights are less 128.
constexpr int BYTE_BASE = 128;
inline vi add_quads(vi sum, vu a, vu b) { return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b); }
#elif defined(__AVX2__)
constexpr int BYTE_BASE = 0;
#else
constexpr int BYTE_BASE = 0;
// Four bytes of each column, unsigned, times four signed bytes.
inline vi add_quads(vi sum, vu a, uint32_t b) {
  for (int j = 0; j < 4; ++j) sum += (vi)(a >> 8 * j & 255) * (int32_t)(int8_t)(b >> 8 * j);
  return sum;
}
inline vi add_quads(vi sum, vu a, vu b) { return add_quads(sum, a, b[0]); }
#endif

// WORDS: 32-bit words of a row's inputs per step, which lie `apart` from each other. BASE: what weights are less by.
struct Dot8 {
  static constexpr int BASE = BYTE_BASE;
#if defined(__AVX2__) && !defined(BATON_VNNI)
  static constexpr int WORDS = 2;  // inputs 0 and 2, 1 and 3, in 16 bits: sums of pairs of bytes could saturate
  static void words(const int8_t* q, uint32_t* out, long apart) {
    for (int i = 0; i < 2; ++i) out[i * apart] = (uint16_t)q[i] | (uint32_t)(uint16_t)q[i + 2] << 16;
  }
#else
  static constexpr int WORDS = 1;
  static void words(const int8_t* q, uint32_t* out, long) { *out = word_of(q); }
#endif

  static constexpr uint32_t SIGN = BYTE_BASE * 0x01010101u;

  // sums[R][2] += x[steps][WORDS][R] * weights[steps][2]
  template <int R>
  static void add(const uint32_t* x, const vu* weights, long steps, const char* ahead, vi (&sums)[R][2]) {
    for (long s = 0; s < steps; ++s, weights += 2, ahead += sizeof(vu) * 2) {
      __builtin_prefetch(ahead, 0, 3);
      if (sizeof(vu) == 64) __builtin_prefetch(ahead + 64, 0, 3);
#if defined(__AVX2__) && !defined(BATON_VNNI)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half, x += R) {
        const vu low = half ? shift16(weights[0], 8) : weights[0] & 0x00ff00ffu;
        const vu high = half ? shift16(weights[1], 8) : weights[1] & 0x00ff00ffu;
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const vu inputs = splat_word(x[r]);
          sums[r][0] += (vi)add_pairs16(low, inputs), sums[r][1] += (vi)add_pairs16(high, inputs);
        }
      }
#else
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const vu inputs = splat_word(x[r]), low = weights[0] ^ SIGN, high = weights[1] ^ SIGN;
        sums[r][0] = add_quads(sums[r][0], low, inputs), sums[r][1] = add_quads(sums[r][1], high, inputs);
      }
      x += R;
#endif
    }
  }
};

struct Dot4 {
  static constexpr int BASE = 0, WORDS = 2;
  static void words(const int8_t* q, uint32_t* out, long apart) { out[0] = word_of(q), out[apart] = word_of(q + 4); }

  static vu half_of(vu weights, int half) { return (half ? weights >> 4 : weights) & 0x0f0f0f0fu; }

  template <int R>
  static void add(const uint32_t* x, const vu* weights, long steps, const char* ahead, vi (&sums)[R][2]) {
#if defined(__AVX2__) && !defined(BATON_VNNI)
    constexpr long NARROW = 4;  // steps whose sums fit 16 bits: 8 times two of 15 * 127
    const vu ones = splat_word(0x00010001u);
    while (steps > 0) {
      Bytes narrow[R][2] = {};
      const long count = std::min(NARROW, steps);
      for (long s = 0; s < count; ++s, weights += 2, ahead += sizeof(vu) * 2) {
        __builtin_prefetch(ahead, 0, 3);
        if (sizeof(vu) == 64) __builtin_prefetch(ahead + 64, 0, 3);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half, x += R) {
          const vu low = half_of(weights[0], half), high = half_of(weights[1], half);
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) {
            const vu inputs = splat_word(x[r]);
            narrow[r][0] = add16(narrow[r][0], add_pairs8(low, inputs));
            narrow[r][1] = add16(narrow[r][1], add_pairs8(high, inputs));
          }
        }
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) sums[r][v] += (vi)add_pairs16((vu)narrow[r][v], ones);
      steps -= count;
    }
#else
    for (long s = 0; s < steps; ++s, weights += 2, ahead += sizeof(vu) * 2) {
      __builtin_prefetch(ahead, 0, 3);
      if (sizeof(vu) == 64) __builtin_prefetch(ahead + 64, 0, 3);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half, x += R) {
        const vu low = half_of(weights[0], half), high = half_of(weights[1], half);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const vu inputs = splat_word(x[r]);
          sums[r][0] = add_quads(sums[r][0], low, inputs), sums[r][1] = add_quads(sums[r][1], high, inputs);
        }
      }
    }
#endif
  }
};

// --- float32: inputs as they are ----------------------------------------------------------------------------------

// Values of a form as float32: of input j of a step, from its vector. BASE: what zeros are less then.
template <int form>
struct Values;

template <>
struct Values<INT8> {
  static constexpr float BASE = 128.0f;
  explicit Values(const float*) {}
  vf operator()(vu weights, int j) const {
    return __builtin_convertvector((vi)((weights ^ 0x80808080u) << (24 - 8 * j)) >> 24, vf);
  }
};

template <>
struct Values<INT4> {
  static constexpr float BASE = 0.0f;
  explicit Values(const float*) {}
  vf operator()(vu weights, int j) const {
    return __builtin_convertvector((vi)(weights >> (j < 4 ? 8 * j : 8 * j - 28) & 15), vf);
  }
};

template <>
struct Values<FP8> {  // e4m3: as a float32 with its exponent, which has another bias
  static constexpr float BASE = 0.0f;
  explicit Values(const float*) {}
  vf operator()(vu weights, int j) const {
    return (vf)((vi)(weights << (24 - 8 * j)) >> 4 & (int32_t)0x87f00000u) * 0x1p120f;
  }
};

template <>
struct Values<TABLE> {
  static constexpr float BASE = 0.0f;
#if defined(BATON_AVX512)
  vf table;
  explicit Values(const float* from) : table(load(from)) {}
  vf operator()(vu weights, int j) const {
    return (vf)_mm512_permutexvar_ps((__m512i)(weights >> (j < 4 ? 8 * j : 8 * j - 28)), (__m512)table);
  }
#elif defined(__AVX2__)
  vf low, high;
  explicit Values(const float* from) : low(load(from)), high(load(from + 8)) {}
  vf operator()(vu weights, int j) const {
    const int shift = j < 4 ? 8 * j : 8 * j - 28;
    const __m256i index = (__m256i)(weights >> shift);
    return (vf)_mm256_blendv_ps(_mm256_permutevar8x32_ps((__m256)low, index),
                                _mm256_permutevar8x32_ps((__m256)high, index), (__m256)(weights << (28 - shift)));
  }
#else
  const float* table;
  explicit Values(const float* from) : table(from) {}
  vf operator()(vu weights, int j) const {
    const vu index = weights >> (j < 4 ? 8 * j : 8 * j - 28) & 15;
    vf out;
    for (int i = 0; i < VL; ++i) out[i] = table[index[i]];
    return out;
  }
#endif
};

constexpr bool has_zeros(int form) { return form == INT8 || form == INT4; }

}  // namespace baton
