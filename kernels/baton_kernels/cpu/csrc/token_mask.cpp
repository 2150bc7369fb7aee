// Forbid tokens: set logits to -inf where a row's mask has no bit. A bit per token, the first in the lowest of the first word.
#include "operators.h"
#include "team.h"
#include "vec.h"

namespace baton {
namespace {

template <class T>
T forbidden();
template <>
float forbidden() { return NEG_INF; }
template <>
bf16 forbidden() { return {0xFF80}; }
template <>
f16 forbidden() { return {0xFC00}; }

// 32 tokens, whose bits are in `word`.
template <class T>
void mask_word(T* at, uint32_t word) {
  const T none = forbidden<T>();
#if defined(BATON_AVX512)
  if constexpr (sizeof(T) == 4) {
    const __m512 all = _mm512_set1_ps(NEG_INF);
    _mm512_mask_storeu_ps(at, (__mmask16)~word, all);
    _mm512_mask_storeu_ps(at + 16, (__mmask16)(~word >> 16), all);
  } else {
    uint16_t bits;
    std::memcpy(&bits, &none, 2);
    _mm512_mask_storeu_epi16(at, (__mmask32)~word, _mm512_set1_epi16((short)bits));
  }
#elif defined(__AVX2__)
  // Each lane looks at its own bit of the word, which all of them have.
  if constexpr (sizeof(T) == 4) {
    const __m256i own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256 all = _mm256_set1_ps(NEG_INF);
    for (int i = 0; i < 32; i += 8) {
      const __m256i bits = _mm256_and_si256(_mm256_set1_epi32((int)(word >> i & 0xFF)), own);
      const __m256 allowed = _mm256_castsi256_ps(_mm256_cmpeq_epi32(bits, own));
      _mm256_storeu_ps((float*)at + i, _mm256_blendv_ps(all, _mm256_loadu_ps((const float*)at + i), allowed));
    }
  } else {
    const __m256i own = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
    uint16_t pattern;
    std::memcpy(&pattern, &none, 2);
    const __m256i all = _mm256_set1_epi16((short)pattern);
    for (int i = 0; i < 32; i += 16) {
      const __m256i bits = _mm256_and_si256(_mm256_set1_epi16((short)(word >> i)), own);
      const __m256i before = _mm256_loadu_si256((const __m256i*)(at + i));
      _mm256_storeu_si256((__m256i*)(at + i), _mm256_blendv_epi8(all, before, _mm256_cmpeq_epi16(bits, own)));
    }
  }
#else
  for (int i = 0; i < 32; ++i) at[i] = (word >> i & 1) ? at[i] : none;
#endif
}

template <class T>
void mask_row(T* logits, const uint32_t* mask, long vocab) {
  const T none = forbidden<T>();
  long begin = 0;
  for (; begin + 32 <= vocab; begin += 32, ++mask) {
    if (*mask == ~0u) continue;
    mask_word(logits + begin, *mask);
  }
  for (long i = begin; i < vocab; ++i)
    if (!(*mask >> (i - begin) & 1)) logits[i] = none;
}

template <class T>
void mask_rows(const TokenMaskOp& a) {
  std::atomic<long> next{0};
  parallel((int)std::max<long>(1, std::min<long>(a.threads, a.count)), [&](const Team&) {
    take(next, a.count, [&](long i) { mask_row((T*)a.logits + a.rows[i] * a.stride, a.masks[i], a.vocab); });
  });
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" void baton_mask_tokens(const TokenMaskOp* a) {
  switch (a->dtype) {
    case 0: return mask_rows<float>(*a);
    case 1: return mask_rows<bf16>(*a);
    case 2: return mask_rows<f16>(*a);
  }
}
