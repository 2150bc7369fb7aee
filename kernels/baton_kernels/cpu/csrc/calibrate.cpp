// Which multiply-add is faster here: processors that have vdpbf16ps differ by a factor of four in its rate.
#include <algorithm>
#include <chrono>

#include "amx.h"
#include "operators.h"

namespace baton {
namespace {

#if defined(BATON_AVX512_BF16)
constexpr int ROUNDS = 7, STEPS = 10000;

// Ten independent chains, so that latency does not count.
#define BATON_CHAINS(op)                                                                                   \
  op " %%zmm31,%%zmm31,%%zmm0\n" op " %%zmm31,%%zmm31,%%zmm1\n" op " %%zmm31,%%zmm31,%%zmm2\n"             \
  op " %%zmm31,%%zmm31,%%zmm3\n" op " %%zmm31,%%zmm31,%%zmm4\n" op " %%zmm31,%%zmm31,%%zmm5\n"             \
  op " %%zmm31,%%zmm31,%%zmm6\n" op " %%zmm31,%%zmm31,%%zmm7\n" op " %%zmm31,%%zmm31,%%zmm8\n"             \
  op " %%zmm31,%%zmm31,%%zmm9\n"
#define BATON_CLOBBERED                                                                                    \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9"

// Seconds of the fastest of some short runs.
template <class Step>
double fastest(Step step) {
  double best = 1e9;
  for (int round = 0; round < ROUNDS; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int s = 0; s < STEPS; ++s) step();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}
#endif

}  // namespace
}  // namespace baton

// 1 if multiply-adds of pairs of bfloat16 do clearly more per second than those of float32.
extern "C" int baton_pairs_are_faster() {
#if defined(BATON_AVX512_BF16)
  using namespace baton;
  const double pairs = fastest([] {
    asm volatile("vpxord %%zmm31,%%zmm31,%%zmm31\n" BATON_CHAINS("vdpbf16ps")::: BATON_CLOBBERED, "xmm31");
  });
  const double plain = fastest([] {
    asm volatile("vpxord %%zmm31,%%zmm31,%%zmm31\n" BATON_CHAINS("vfmadd231ps")::: BATON_CLOBBERED, "xmm31");
  });
  return 2.0 * plain > 1.2 * pairs;
#else
  return 0;
#endif
}

// 1 if this processor has AMX for bfloat16, and this process may use it. Asks the kernel; harmless if repeated.
extern "C" int baton_amx_ready() {
#if defined(BATON_AMX)
  return baton::amx_present() && baton::amx_permitted();
#else
  return 0;
#endif
}
