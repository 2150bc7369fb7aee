// How rows of inputs are multiplied with a segment of quantized weights: rounded to int8 and summed in integers, or as
// they are in float32.
#pragma once
#include <utility>

#include "quantized.h"

namespace baton {

constexpr long QUANTIZED_AHEAD = 4096;  // bytes that a streamed panel is fetched ahead

// --- integers: inputs in int8 -------------------------------------------------------------------------------------

#if defined(BATON_AVX512)
typedef __m512i Bytes;
inline Bytes add_pairs16(vu a, vu b) { return _mm512_madd_epi16((Bytes)a, (Bytes)b); }
inline vu shift16(vu a, int n) { return (vu)_mm512_srli_epi16((Bytes)a, n); }
#elif defined(__AVX2__)
typedef __m256i Bytes;
inline Bytes add_pairs16(vu a, vu b) { return _mm256_madd_epi16((Bytes)a, (Bytes)b); }
inline vu shift16(vu a, int n) { return (vu)_mm256_srli_epi16((Bytes)a, n); }
#endif
#if defined(__AVX2__)
// sum += pairs of products, in 32 or in 16 bits. One instruction behind the other, as registers are scarce: compilers
// gather the products first, and put them into memory.
inline void add_products16(vi& sum, vu a, vu b) {
  vi products;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(products) : "v"(a), "v"(b));
}
inline void add_products8(Bytes& sum, vu unsigned_bytes, vu b) {
  Bytes products;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sum), "=&v"(products) : "v"(unsigned_bytes), "v"(b));
}
#endif
#if defined(BATON_AVX512) && defined(__AVX512VNNI__)
#define BATON_VNNI 1
inline vi add_quads(vi sum, vu a, vu b) { return (vi)_mm512_dpbusd_epi32((Bytes)sum, (Bytes)a, (Bytes)b); }
#elif defined(__AVX2__) && defined(__AVXVNNI__)
#define BATON_VNNI 1
inline vi add_quads(vi sum, vu a, vu b) { return (vi)_mm256_dpbusd_avx_epi32((Bytes)sum, (Bytes)a, (Bytes)b); }
#endif

inline vu splat_word(uint32_t x) { return x - vu{}; }
// The low bytes of VL integers.
inline void store_bytes(int8_t* to, vi x) {
#if defined(BATON_AVX512)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((Bytes)x));
#elif defined(__AVX2__)
  const Bytes low = _mm256_shuffle_epi8((Bytes)x, _mm256_set1_epi32(0x0c080400));
  const int words[2] = {_mm256_extract_epi32(low, 0), _mm256_extract_epi32(low, 4)};
  std::memcpy(to, words, sizeof words);
#else
  typedef int8_t narrow __attribute__((vector_size(VL)));
  const narrow bytes = __builtin_convertvector(x, narrow);
  std::memcpy(to, &bytes, VL);
#endif
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

// Call each(i) for constants i from 0 to N: arrays that are indexed by them become registers before anything else is
// decided about them, which unrolled loops do not always bring about.
template <class F, size_t... I>
inline __attribute__((always_inline)) void repeat_for(F each, std::index_sequence<I...>) {
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

// Products of integers. BASE: what weights are less by. WORDS: 32-bit words of a row's inputs per step; words() makes
// word `word` of VL steps of inputs that it is given as words of four. add(): sums[R][2] += x[steps][WORDS][R] *
// weights[steps][2].
struct Dot8 {
  static constexpr int BASE = BYTE_BASE;
#if defined(__AVX2__) && !defined(BATON_VNNI)
  static constexpr int WORDS = 2;  // inputs 0 and 2, 1 and 3, in 16 bits: sums of pairs of bytes could saturate
  static vu words(vu four, int word) {
    const vi first = (vi)(four << (24 - 8 * word)) >> 24, second = (vi)(four << (8 - 8 * word)) >> 24;
    return ((vu)first & 0xffffu) | (vu)second << 16;
  }

  template <int R>
  static void add(const uint32_t* x, const vu* weights, long steps, Ahead ahead, vi (&sums)[R][2]) {
    vi acc[R][2];
    repeat<R>([&](auto r) __attribute__((always_inline)) { acc[r][0] = sums[r][0], acc[r][1] = sums[r][1]; });
    for (long s = 0; s < steps; ++s, weights += 2, x += 2 * R) {
      ahead.fetch();
      repeat<2>([&](auto half) __attribute__((always_inline)) {
        const vu low = half ? shift16(weights[0], 8) : weights[0] & 0x00ff00ffu;
        const vu high = half ? shift16(weights[1], 8) : weights[1] & 0x00ff00ffu;
        repeat<R>([&](auto r) __attribute__((always_inline)) {
          const vu inputs = splat_word(x[half * R + r]);
          add_products16(acc[r][0], low, inputs), add_products16(acc[r][1], high, inputs);
        });
      });
    }
    repeat<R>([&](auto r) __attribute__((always_inline)) { sums[r][0] = acc[r][0], sums[r][1] = acc[r][1]; });
  }
#else
  static constexpr int WORDS = 1;
  static constexpr uint32_t SIGN = BYTE_BASE * 0x01010101u;
  static vu words(vu four, int) { return four; }

  template <int R>
  static void add(const uint32_t* x, const vu* weights, long steps, Ahead ahead, vi (&sums)[R][2]) {
    vi acc[R][2];
    repeat<R>([&](auto r) __attribute__((always_inline)) { acc[r][0] = sums[r][0], acc[r][1] = sums[r][1]; });
    for (long s = 0; s < steps; ++s, weights += 2, x += R) {
      ahead.fetch();
      const vu low = weights[0] ^ SIGN, high = weights[1] ^ SIGN;
      repeat<R>([&](auto r) __attribute__((always_inline)) {
        const vu inputs = splat_word(x[r]);
        acc[r][0] = add_quads(acc[r][0], low, inputs), acc[r][1] = add_quads(acc[r][1], high, inputs);
      });
    }
    repeat<R>([&](auto r) __attribute__((always_inline)) { sums[r][0] = acc[r][0], sums[r][1] = acc[r][1]; });
  }
#endif
};

struct Dot4 {
  static constexpr int BASE = 0, WORDS = 2;

  static vu half_of(vu weights, int half) { return (half ? weights >> 4 : weights) & 0x0f0f0f0fu; }

  template <int R>
  static void add(const uint32_t* x, const vu* weights, long steps, Ahead ahead, vi (&sums)[R][2]) {
#if defined(__AVX2__) && !defined(BATON_VNNI)
    constexpr long NARROW = 4;  // steps whose sums fit 16 bits: 8 times two of 15 * 127
    using Sum = Bytes;
#else
    constexpr long NARROW = std::numeric_limits<long>::max();
    using Sum = vi;
#endif
    while (steps > 0) {
      const long count = std::min(NARROW, steps);
      Sum acc[R][2];
      repeat<R>([&](auto r) __attribute__((always_inline)) { acc[r][0] = acc[r][1] = Sum{}; });
#pragma GCC unroll 1
      for (long s = 0; s < count; ++s, weights += 2, x += 2 * R) {
        ahead.fetch();
        repeat<2>([&](auto half) __attribute__((always_inline)) {
          const vu low = half_of(weights[0], half), high = half_of(weights[1], half);
          repeat<R>([&](auto r) __attribute__((always_inline)) {
            const vu inputs = splat_word(x[half * R + r]);
            add_some(acc[r][0], low, inputs), add_some(acc[r][1], high, inputs);
          });
        });
      }
      repeat<R>([&](auto r) __attribute__((always_inline)) {
        widen(acc[r][0], sums[r][0]), widen(acc[r][1], sums[r][1]);
      });
      steps -= count;
    }
  }

 private:
#if defined(__AVX2__) && !defined(BATON_VNNI)
  static void add_some(Bytes& sum, vu a, vu b) { add_products8(sum, a, b); }
  static void widen(Bytes sum, vi& to) { to += (vi)add_pairs16((vu)sum, splat_word(0x00010001u)); }
#else
  static void add_some(vi& sum, vu a, vu b) { sum = add_quads(sum, a, b); }
  static void widen(vi sum, vi& to) { to += sum; }
#endif
};

// --- float32: inputs as they are ----------------------------------------------------------------------------------

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

constexpr bool has_zeros(int form) { return form == INT8 || form == INT4; }

}  // namespace baton
