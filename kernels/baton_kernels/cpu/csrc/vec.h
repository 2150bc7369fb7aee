// Vectors of floats of the machine's width, loads and stores of the three storage types, exp2 and reductions.
// Written with the compiler's vector extension, so that AVX2, NEON and plain machines work from the same source;
// intrinsics only where the extension cannot say it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace baton {

// NV: vectors per row of a register tile; MR: its rows.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define BATON_AVX512 1
constexpr int VL = 16, NV = 4, MR = 6;
#elif defined(__AVX2__)
constexpr int VL = 8, NV = 2, MR = 6;
#elif defined(__aarch64__)
constexpr int VL = 4, NV = 4, MR = 6;
#elif defined(BATON_AMX_EMULATION)
constexpr int VL = 16, NV = 4, MR = 6;
#else
constexpr int VL = 4, NV = 2, MR = 4;
#endif
#if defined(BATON_AVX512) && defined(__AVX512BF16__)
#define BATON_AVX512_BF16 1
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef float vf_unaligned __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef uint16_t vh_unaligned __attribute__((vector_size(VL * 2), aligned(2), may_alias));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

constexpr float NEG_INF = -std::numeric_limits<float>::infinity();
constexpr float LOG2E = 1.4426950408889634f;

constexpr long round_up(long n, long unit) { return (n + unit - 1) / unit * unit; }
inline vf splat(float x) { return x - vf{}; }
inline vf select(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
inline vf vmax(vf a, vf b) {
#if defined(BATON_AVX512)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return select(a > b, a, b);
#endif
}

#if defined(__aarch64__)
typedef __fp16 half;  // GCC has _Float16 in C++ from version 13 on there
#else
typedef _Float16 half;
#endif

// --- loads and stores -------------------------------------------------------------------------------------------

inline vf load(const float* p) { return *(const vf_unaligned*)p; }
inline vf load(const bf16* p) {
#if defined(BATON_AVX512)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  return (vf)(__builtin_convertvector((vh) * (const vh_unaligned*)p, vu) << 16);
#endif
}
inline vf load(const f16* p) {
#if defined(BATON_AVX512)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__) && defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vf out;
  for (int i = 0; i < VL; ++i) {
    half x;
    std::memcpy(&x, p + i, 2);
    out[i] = (float)x;
  }
  return out;
#endif
}

inline void store(float* p, vf x) { *(vf_unaligned*)p = x; }
inline void store(bf16* p, vf x) {
#if defined(BATON_AVX512_BF16)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  vu bits = (vu)x;
  bits += 0x7fff + ((bits >> 16) & 1);  // round to nearest, ties to even
  *(vh_unaligned*)p = __builtin_convertvector(bits >> 16, vh);
#endif
}
inline void store(f16* p, vf x) {
#if defined(BATON_AVX512)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && defined(__AVX2__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < VL; ++i) {
    half y = (half)x[i];
    std::memcpy(p + i, &y, 2);
  }
#endif
}

// The first n < VL elements; the rest is zero.
template <class T>
inline vf load_part(const T* p, int n) {
  T buffer[VL] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
template <class T>
inline void store_part(T* p, vf x, int n) {
  T buffer[VL];
  store(buffer, x);
  std::memcpy(p, buffer, n * sizeof(T));
}
template <class T>
inline vf load_upto(const T* p, long n) {
  return n >= VL ? load(p) : load_part(p, (int)n);
}
template <class T>
inline void store_upto(T* p, vf x, long n) {
  if (n >= VL) {
    store(p, x);
  } else {
    store_part(p, x, (int)n);
  }
}

#if defined(BATON_AVX512_BF16)
// 2 VL numbers as they lie, or the `left` that are there and zeros.
inline __m512i load_pairs(const bf16* x, long left) {
  return left >= 2 * VL ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi16((1u << (left < 0 ? 0 : left)) - 1, x);
}
#endif

// --- arithmetic -------------------------------------------------------------------------------------------------

inline float sum(vf x) {
#if defined(BATON_AVX512)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float s = 0;
  for (int i = 0; i < VL; ++i) s += x[i];
  return s;
#endif
}
inline float largest(vf x) {
#if defined(BATON_AVX512)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float s = x[0];
  for (int i = 1; i < VL; ++i) s = x[i] > s ? x[i] : s;
  return s;
#endif
}

// 2^x for x <= 127; exactly 0 far below. Relative error 2e-7, or 7e-5 where `rough` (bfloat16 weights).
template <bool rough>
inline vf exp2v(vf x) {
#if defined(BATON_AVX512)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
  const vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vi underflow = x < splat(-126.0f);
  x = vmax(x, splat(-126.0f));
  const vf shifted = x + 12582912.0f;  // 1.5 * 2^23: the integer part ends up in the low bits
  const vf n = shifted - 12582912.0f;
#endif
  const vf r = x - n;  // in [-0.5, 0.5]
  vf y;
  if (rough) {
    y = splat(0.0551716594f);
    y = y * r + 0.242611121f;
    y = y * r + 0.693260987f;
    y = y * r + 0.999928074f;
  } else {
    y = splat(0.00015345811f);
    y = y * r + 0.00133999312f;
    y = y * r + 0.00961848896f;
    y = y * r + 0.0555032878f;
    y = y * r + 0.240226469f;
    y = y * r + 0.693147206f;
    y = y * r + 1.0f;
  }
#if defined(BATON_AVX512)
  // What underflows is masked: a result that is no normal number costs hundreds of cycles.
  return (vf)_mm512_maskz_scalef_ps(normal, (__m512)y, (__m512)n);
#else
  y = (vf)((vi)y + (vi)((vu)shifted << 23));
  return select(underflow, vf{}, y);
#endif
}

inline vf tanhv(vf x) {
  // 1 - 2 / (e^2x + 1), e^2x bounded so that it stays finite
  const vf y = exp2v<false>(-vmax(-(x * (2.0f * LOG2E)), splat(-60.0f)));
  return 1.0f - 2.0f / (y + 1.0f);
}

// Sums of VL vectors: lane i of the result is the sum of the lanes of x[i].
inline vi sums(const vi* x) {
#if defined(__AVX2__) && !defined(BATON_AVX512)
  const __m256i* y = (const __m256i*)x;
  const __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(y[0], y[1]), _mm256_hadd_epi32(y[2], y[3]));
  const __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(y[4], y[5]), _mm256_hadd_epi32(y[6], y[7]));
  return (vi)_mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
#else
  vi out;
  for (int i = 0; i < VL; ++i) {
    int32_t total = 0;
    for (int l = 0; l < VL; ++l) total += x[i][l];
    out[i] = total;
  }
  return out;
#endif
}
inline vf sums(const vf* x) {
#if defined(BATON_AVX512)
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) {
    // x[i] and x[i + 8]: after this, lower halves hold parts of x[i], upper halves of x[i + 8]
    const __m512 p = (__m512)x[i], q = (__m512)x[i + 8];
    a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x44), _mm512_shuffle_f32x4(p, q, 0xee));
  }
  for (int i = 0; i < 4; ++i)
    b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
  for (int i = 0; i < 2; ++i)
    c[i] = _mm512_add_ps(_mm512_unpacklo_ps(b[i], b[i + 2]), _mm512_unpackhi_ps(b[i], b[i + 2]));
  const __m512 d = _mm512_add_ps(_mm512_unpacklo_ps(c[0], c[1]), _mm512_unpackhi_ps(c[0], c[1]));
  // 128-bit lane L of d holds x[base + 0..3] with base 0, 8, 4, 12 by the shuffles above
  return (vf)_mm512_shuffle_f32x4(d, d, 0xd8);
#elif defined(__AVX2__)
  const __m256* y = (const __m256*)x;
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(y[0], y[1]), _mm256_hadd_ps(y[2], y[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(y[4], y[5]), _mm256_hadd_ps(y[6], y[7]));
  return (vf)_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
#else
  vf out;
  for (int i = 0; i < VL; ++i) out[i] = sum(x[i]);
  return out;
#endif
}

#if defined(BATON_AVX512)
// A square of 32-bit elements, in place.
inline void transpose16(__m512i* x) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    x[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    x[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}
#endif

inline void transpose(vf* x) {
#if defined(BATON_AVX512)
  transpose16((__m512i*)x);
#else
  vf from[VL];
  for (int i = 0; i < VL; ++i) from[i] = x[i];
  for (int i = 0; i < VL; ++i)
    for (int j = 0; j < VL; ++j) x[i][j] = from[j][i];
#endif
}

}  // namespace baton
