// Values of quantized weights as float32, and what loops over products of all kinds are made of.
#pragma once
#include <utility>

#include "quantized.h"

namespace baton {

constexpr long QUANTIZED_AHEAD = 4096;  // bytes that a streamed panel is fetched ahead

// Call each(i) for constants i from 0 to N: arrays that are indexed by them become registers before anything else is
// decided about them, which unrolled loops do not always bring about.
template <class F, size_t... I>
inline __attribute__((always_inline)) void repeat_for([[maybe_unused]] F each, std::index_sequence<I...>) {
  (each(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
inline __attribute__((always_inline)) void repeat(F each) {
  repeat_for(each, std::make_index_sequence<N>{});
}

// What is fetched ahead while a step is multiplied.
struct Ahead {
  const char* at;
  long step;  // bytes

  void fetch() {
    __builtin_prefetch(at, 0, 3);
    if (sizeof(vu) == 64) __builtin_prefetch(at + 64, 0, 3);
    at += step;
  }
};

// Values of a form as float32: of input j of a step, from its vector. Integers are left where they stand in their lane,
// which makes them larger by a power of two; factor(j): what inputs are multiplied with for that.
template <int form>
struct Values;

template <>
struct Values<INT8> {
  explicit Values(const float*) {}
  static constexpr float factor(int j) { return j == 3 ? 1.0f : 1.0f / (1 << 8 * j); }
  vf operator()(vu weights, int j) const {
    return __builtin_convertvector((vi)(j == 3 ? weights >> 24 : weights & 255u << 8 * j), vf);
  }
};

template <>
struct Values<INT4> {
  explicit Values(const float*) {}
  static constexpr int shift(int j) { return j < 4 ? 8 * j : 8 * j - 28; }
  static constexpr float factor(int j) { return j == 7 ? 1.0f : 1.0f / (1 << shift(j)); }
  vf operator()(vu weights, int j) const {
    return __builtin_convertvector((vi)(j == 7 ? weights >> 28 : weights & 15u << shift(j)), vf);
  }
};

template <>
struct Values<FP8> {  // e4m3: as a float32 with its exponent, which has another bias
  static constexpr float factor(int) { return 1.0f; }
  explicit Values(const float*) {}
  vf operator()(vu weights, int j) const {
    return (vf)((vi)(weights << (24 - 8 * j)) >> 4 & (int32_t)0x87f00000u) * 0x1p120f;
  }
};

template <>
struct Values<TABLE> {
  static constexpr float factor(int) { return 1.0f; }
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

inline float factor_of(int form, int j) {
  return form == INT8 ? Values<INT8>::factor(j) : form == INT4 ? Values<INT4>::factor(j) : 1.0f;
}

// Call f(form) with the form as a constant.
template <class F>
inline void with_form(int form, F f) {
  switch (form) {
    case INT8: return f(std::integral_constant<int, INT8>{});
    case INT4: return f(std::integral_constant<int, INT4>{});
    case FP8: return f(std::integral_constant<int, FP8>{});
    default: return f(std::integral_constant<int, TABLE>{});
  }
}

constexpr bool has_zeros(int form) { return form == INT8 || form == INT4; }

}  // namespace baton
