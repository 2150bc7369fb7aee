// Which instructions this library was compiled for.
#include "operators.h"
#include "vec.h"

extern "C" const char* baton_cpu_instructions() {
#if defined(BATON_AVX512_BF16)
  return "avx512-bf16";
#elif defined(BATON_AVX512) && defined(__AVX512VNNI__)
  return "avx512-vnni";
#elif defined(BATON_AVX512)
  return "avx512";
#elif defined(__AVX2__) && defined(__AVXVNNI__)
  return "avx2-vnni";
#elif defined(__AVX2__)
  return "avx2";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "neon-dotprod";
#elif defined(__aarch64__)
  return "neon";
#else
  return "plain";
#endif
}
