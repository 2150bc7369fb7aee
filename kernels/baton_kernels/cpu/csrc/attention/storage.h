// What may lie in a KV pool beside the floats of vec.h: int8 and fp8 (E4M3), both with scales.
// baton_kernels/paged_attention/quantized.py is the definition.
#pragma once
#include <algorithm>

#include "../vec.h"

namespace baton {

struct e4m3 {
  uint8_t bits;
};
struct q8 {
  int8_t value;
};

// SCALED: numbers are multiples of a scale; PER_HEAD: of one per head, else of one per token and head.
template <class S>
struct Storage {
  static constexpr bool SCALED = false, PER_HEAD = false;
};
template <>
struct Storage<q8> {
  static constexpr bool SCALED = true, PER_HEAD = false;
};
template <>
struct Storage<e4m3> {
  static constexpr bool SCALED = true, PER_HEAD = true;
};

typedef uint8_t vb __attribute__((vector_size(VL)));
typedef uint8_t vb_unaligned __attribute__((vector_size(VL), aligned(1), may_alias));
typedef int8_t vq __attribute__((vector_size(VL)));

inline float as_float(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
inline bf16 as_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return {(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline vf load(const q8* p) {
#if defined(BATON_AVX512)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  return __builtin_convertvector((vq) * (const vb_unaligned*)p, vf);
#endif
}
inline vf load(const e4m3* p) {
  const vu code = __builtin_convertvector((vb) * (const vb_unaligned*)p, vu);
  const vu size = code & 0x7f;
  const vf normal = (vf)((size << 20) + (120u << 23));  // exponents have a bias of 7, not 127
  vf value = select((vi)(size < 8), (normal - 0x1p-7f) * 2.0f, normal);
  value = select((vi)(size == 0x7f), splat(std::numeric_limits<float>::quiet_NaN()), value);
  return (vf)((vu)value | ((code & 0x80) << 24));
}

#if defined(__AVX2__)
// 16-bit integers, two to each lane of a vector of 32-bit ones.
#define BATON_WHOLE 1
typedef int16_t vs __attribute__((vector_size(VL * 4)));

// 2 VL numbers, or the `left` that are there and zeros.
inline vs load_whole(const q8* p, long left) {
  q8 part[2 * VL];
  if (left < 2 * VL) {
    std::memset(part, 0, sizeof part);
    std::memcpy(part, p, left);
    p = part;
  }
#if defined(BATON_AVX512)
  return (vs)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#else
  return (vs)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#endif
}
// The products of pairs, added to sums.
inline vi add_pair_products(vi sums, vs a, vs b) {
#if defined(BATON_AVX512) && defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(BATON_AVX512)
  return sums + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
  return (vi)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#else
  return sums + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}
// Pairs of neighbours of two rows: of the lower and of the upper half of each 128 bits.
inline void pair_up(vs a, vs b, vs& low, vs& high) {
#if defined(BATON_AVX512)
  low = (vs)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b), high = (vs)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#else
  low = (vs)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b), high = (vs)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b);
#endif
}
#endif

// Integers.
inline void store(q8* p, vf x) {
  const vi whole = __builtin_convertvector(x, vi);
  for (int i = 0; i < VL; ++i) p[i].value = (int8_t)whole[i];
}

// The largest magnitude of a row, as its bits: what is no number is larger than any.
inline uint32_t largest_bits(const float* x, int n) {
  uint32_t largest = 0;
  for (int i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// A row of n floats, and what is behind them up to a whole vector, to the pool; `scale`: of the row or of the head.
template <class S>
inline void store_row(const float* x, int n, S* to, void*) {
  for (int d = 0; d < n; d += VL) store_upto(to + d, load(x + d), n - d);
}
inline void store_row(const float* x, int n, q8* to, void* scale) {
  constexpr uint32_t INFINITE = 0x7f800000u;
  const uint32_t largest = largest_bits(x, n);
  float size;
  std::memcpy(&size, &largest, sizeof size);
  const float wanted = size / 127.0f;
  const bf16 rounded = largest >= INFINITE ? bf16{0x7fc0} : wanted < 0x1p-126f ? bf16{0} : as_bf16(wanted);
  *(bf16*)scale = rounded;
  if (rounded.bits == 0 || largest >= INFINITE) {
    std::memset(to, 0, n);
    return;
  }
  const float unit = as_float(rounded);
  constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer, ties to even
  for (int d = 0; d < n; d += VL) store_upto(to + d, load(x + d) / unit + ROUNDER - ROUNDER, n - d);
}
inline void store_row(const float* x, int n, e4m3* to, void* scale) {
  const float unit = *(const float*)scale;
  for (int i = 0; i < n; ++i) {
    const float value = x[i] / unit;
    uint32_t bits, size;
    std::memcpy(&bits, &value, sizeof bits);
    const uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
    size = bits & 0x7fffffff;
    if (size >= 0x7f800000u) {
      to[i].bits = sign | 0x7f;  // no number
      continue;
    }
    const float bounded = std::min(std::fabs(value), 448.0f);
    std::memcpy(&size, &bounded, sizeof size);
    if (bounded < 0x1p-6f)  // below the least normal number the unit is 2^-9
      to[i].bits = sign | (uint8_t)(bounded * 512.0f + 12582912.0f - 12582912.0f);
    else
      to[i].bits = sign | (uint8_t)(((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120u << 3));
  }
}

}  // namespace baton
