// Linear layers with bfloat16 weights, multiplied in float32: for processors whose float32 units outrun their bfloat16
// ones. Weights are repacked once into panels of columns that are read in order; a vector of bfloat16 pairs becomes two
// float32 vectors by a shift and a mask. Few rows stream the panels; many go over a block of a panel while it is cached.
#include "linear.h"

namespace baton {
namespace {

constexpr int K_BLOCK = 128;       // steps of a panel that stay in the first-level cache while rows go over them
constexpr int PRIVATE_ROWS = 64;   // up to here, each thread converts the inputs for itself
constexpr int AHEAD = 64;          // steps that a streamed panel is fetched ahead
#if defined(__AVX2__) && !defined(BATON_AVX512)
constexpr int GROUP = 6;           // rows of a register tile
#else
constexpr int GROUP = 12;
#endif
constexpr int ROW_BLOCK = 10 * GROUP;  // rows converted at a time

// Rows `first` to first + count as float32, step by step: out[in_features][count], and up to VL elements more.
void convert(const Linear& a, long first, int count, float* out) {
  const bf16* from = (const bf16*)a.x + first * a.x_stride;
  if (GROUP > VL) {  // more rows than a square of vectors has
    for (int i = 0; i < count; ++i)
      for (long s = 0; s < a.in_features; s += VL) {
        const vf x = load_upto(from + i * a.x_stride + s, a.in_features - s);
        const int width = (int)std::min<long>(VL, a.in_features - s);
        for (int c = 0; c < width; ++c) out[(s + c) * count + i] = x[c];
      }
    return;
  }
  for (long s = 0; s < a.in_features; s += VL) {
    vf x[VL];
    for (int i = 0; i < VL; ++i) x[i] = i < count ? load_upto(from + i * a.x_stride + s, a.in_features - s) : vf{};
    transpose(x);
    const int width = (int)std::min<long>(VL, a.in_features - s);
    for (int i = 0; i < width; ++i) store(out + (s + i) * count, x[i]);  // the next store overwrites what is too much
  }
}

// sums[R][PW] (+)= x[steps][R] * panel[steps][PW]. Few rows keep several sums apart, so that no addition waits for the
// one before. `ahead`, moved by `stride` bytes a step: memory to fetch for later.
template <int R>
void block(const float* x, const uint32_t* panel, int steps, bool fresh, const char* ahead, long stride, float* sums) {
  constexpr int U = R == 1 ? 4 : R <= 3 ? 2 : 1;
  vf acc[U][R][2];
#pragma GCC unroll 4
  for (int u = 0; u < U; ++u)
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) acc[u][r][c] = fresh || u ? vf{} : *(vf*)(sums + r * PW + c * VL);
  const auto step = [&](int u, int s) __attribute__((always_inline)) {
    const vu pairs = ((const vu*)panel)[s];
    __builtin_prefetch(ahead, 0, 3);
    ahead += stride;
    const vf low = (vf)(pairs << 16), high = (vf)(pairs & 0xffff0000u);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const vf a = splat(x[s * R + r]);
      acc[u][r][0] += a * low, acc[u][r][1] += a * high;
    }
  };
  int s = 0;
  for (; s + U <= steps; s += U)
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) step(u, s + u);
  for (; s < steps; ++s) step(0, s);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      vf total = acc[0][r][c];
#pragma GCC unroll 4
      for (int u = 1; u < U; ++u) total += acc[u][r][c];
      *(vf*)(sums + r * PW + c * VL) = total;
    }
}

void block_of(int rows, const float* x, const uint32_t* panel, int steps, bool fresh, const char* ahead, long stride,
              float* sums) {
  switch (rows) {
#define BATON_ROWS(R) \
  case R:             \
    return block<R>(x, panel, steps, fresh, ahead, stride, sums);
    BATON_ROWS(1)
    BATON_ROWS(2)
    BATON_ROWS(3)
    BATON_ROWS(4)
    BATON_ROWS(5)
    BATON_ROWS(6)
#if !defined(__AVX2__) || defined(BATON_AVX512)
    BATON_ROWS(7)
    BATON_ROWS(8)
    BATON_ROWS(9)
    BATON_ROWS(10)
    BATON_ROWS(11)
    BATON_ROWS(12)
#endif
#undef BATON_ROWS
  }
}

// Rows in groups of a register tile each, as even as they come.
struct Groups {
  int rows, count;
  explicit Groups(int n) : rows(n), count((n + GROUP - 1) / GROUP) {}
  int begin(int g) const { return rows * g / count; }
  int size(int g) const { return begin(g + 1) - begin(g); }
};

// One panel of columns for some rows; x: per group what `convert` gives, `stride` elements apart.
void panel_of(const Linear& a, long panel, long first, const Groups& groups, const float* x, long stride, float* sums) {
  const int steps = a.in_features;
  const uint32_t* weights = a.packed + panel * steps * (PW / 2);
  for (int s = 0; s < steps; s += K_BLOCK) {
    const int n = std::min(K_BLOCK, steps - s);
    for (int g = 0; g < groups.count; ++g) {
      const int rows = groups.size(g);
      const uint32_t* part = weights + (long)s * (PW / 2);
      // one group streams; of several, each fetches its share of the next block
      const long bytes = (long)n * sizeof(vu), share = groups.count == 1 ? 0 : bytes + bytes * g / groups.count;
      const char* ahead = (const char*)part + (groups.count == 1 ? AHEAD * sizeof(vu) : share);
      block_of(rows, x + g * stride + (long)s * rows, part, n, s == 0, ahead, sizeof(vu) / groups.count,
               sums + (long)groups.begin(g) * PW);
    }
  }
  for (int r = 0; r < groups.rows; ++r) finish_row(a, first + r, panel * PW, sums + (long)r * PW);
}

long group_stride(const Linear& a) { return round_up((long)GROUP * a.in_features + VL, 16); }

// Run by every thread of the team; `shared` is null where each thread has to convert the inputs for itself.
void run(const Linear& a, float* shared, const Team& team, Scratch& scratch) {
  const long panels = (a.out_features + PW - 1) / PW, stride = group_stride(a);
  const Groups most((int)std::min<long>(a.rows, ROW_BLOCK));
  const size_t sums_size = (size_t)most.rows * PW;
  float* sums = scratch.get<float>(sums_size + (shared ? 0 : most.count * stride));
  float* x = shared ? shared : sums + sums_size;
  for (long first = 0; first < a.rows; first += ROW_BLOCK) {
    const Groups groups((int)std::min<long>(ROW_BLOCK, a.rows - first));
    for (int g = shared ? team.thread : 0; g < groups.count; g += shared ? team.threads : 1)
      convert(a, first + groups.begin(g), groups.size(g), x + g * stride);
    if (shared) team.barrier();
    team.share(panels, [&](long p) { panel_of(a, p, first, groups, x, stride, sums); });
    if (shared) team.barrier();
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

// Elements (bfloat16) of the packed weights.
extern "C" int64_t baton_linear_packed_size(int64_t out_features, int64_t in_features) {
  return round_up(out_features, PW) * in_features;
}

// weight: bfloat16 [out_features][in_features] -> packed, aligned to 64 bytes.
extern "C" void baton_linear_pack(const uint16_t* weight, uint32_t* packed, int64_t out_features, int64_t in_features) {
  const long panels = (out_features + PW - 1) / PW;
  const auto pack_panel = [&](long p) {
    for (long s = 0; s < in_features; ++s)
      for (int i = 0; i < PW / 2; ++i) {
        const long low = p * PW + i, high = low + VL;
        const uint32_t a = low < out_features ? weight[low * in_features + s] : 0;
        const uint32_t b = high < out_features ? weight[high * in_features + s] : 0;
        packed[(p * in_features + s) * (PW / 2) + i] = a | b << 16;
      }
  };
  parallel(0, [&](const Team& team) { team.share(panels, pack_panel); });
}

extern "C" void baton_linear(const Linear* a) {
  static thread_local Scratch inputs;
  if (a->rows == 0) return;
  const bool share = a->rows > PRIVATE_ROWS;
  const Groups most((int)std::min<long>(a->rows, ROW_BLOCK));
  float* shared = share ? inputs.get<float>(most.count * group_stride(*a)) : nullptr;
  parallel(a->threads, [&](const Team& team) {
    static thread_local Scratch scratch;
    run(*a, shared, team, scratch);
  });
}
