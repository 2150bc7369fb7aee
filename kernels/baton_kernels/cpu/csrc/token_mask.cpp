// Forbid tokens: set logits to -inf where a row's mask has no bit. A bit per token, the first in the lowest of the first word.
#include "team.h"
#include "vec.h"

namespace baton {
namespace {

struct TokenMaskOp {
  void* logits;                  // [rows][vocab], rows `stride` elements apart; changed in place
  const int64_t* rows;           // [count], which of them
  const uint32_t* const* masks;  // [count], of (vocab + 31) / 32 words each
  int64_t count, vocab, stride;
  int32_t dtype, threads;
};

template <class T>
T forbidden();
template <>
float forbidden() { return NEG_INF; }
template <>
bf16 forbidden() { return {0xFF80}; }
template <>
f16 forbidden() { return {0xFC00}; }

template <class T>
void mask_row(T* logits, const uint32_t* mask, long vocab) {
  const T none = forbidden<T>();
  long begin = 0;
  for (; begin + 32 <= vocab; begin += 32, ++mask) {
    const uint32_t word = *mask;
    T* const at = logits + begin;
    if (word == ~0u) continue;
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
#else
    if (word == 0)
      for (int i = 0; i < 32; ++i) at[i] = none;
    else
      for (int i = 0; i < 32; ++i) at[i] = (word >> i & 1) ? at[i] : none;
#endif
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
