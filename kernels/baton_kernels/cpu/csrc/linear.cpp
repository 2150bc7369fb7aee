// Linear layers with bfloat16 weights, sums in float32. They are multiplied as float32, or as pairs of bfloat16 where the
// processor does more of these. Weights are repacked once into panels of columns that are read in order. Few rows stream
// the panels; many go over a block of a panel while it is cached.
#include "linear.h"

namespace baton {
namespace {

constexpr int PRIVATE_ROWS = 64;   // up to here, each thread converts the inputs for itself
constexpr long AHEAD = 8192;       // bytes that a streamed panel is fetched ahead
#if defined(__AVX2__) && !defined(BATON_AVX512)
constexpr int GROUP = 6;           // rows of a register tile
constexpr long CACHED = 4 * 1024;  // bytes of a panel that stay in the first-level cache while rows go over them
#else
constexpr int GROUP = 12;
constexpr long CACHED = 16 * 1024;
#endif
constexpr int ROW_BLOCK = 10 * GROUP;  // rows converted at a time

// How a step of a panel is multiplied. STEP: inputs that it takes; VECTORS: of the panel. A row's inputs have 32 bits.
struct Widened {  // bfloat16 as float32: a vector of the panel has an input of columns c (low halves) and c + VL
  static constexpr int STEP = 1, VECTORS = 1;
  vf low, high;

  explicit Widened(const vu* panel) : low((vf)(*panel << 16)), high((vf)(*panel & 0xffff0000u)) {}
  void add(float x, vf* sums) const { sums[0] += splat(x) * low, sums[1] += splat(x) * high; }

  // Steps s to s + VL of a row of inputs.
  static vf inputs(const bf16* row, long s, long in_features) { return load_upto(row + s, in_features - s); }

  // Step s of the panel, from weights(column, input).
  template <class F>
  static void pack(F weights, long s, uint32_t* out) {
    for (int c = 0; c < VL; ++c) out[c] = weights(c, s) | weights(c + VL, s) << 16;
  }
};

#if defined(BATON_AVX512_BF16)
struct Pairs {  // of bfloat16, of one column each
  static constexpr int STEP = 2, VECTORS = 2;
  __m512bh low, high;

  explicit Pairs(const vu* panel) : low((__m512bh)panel[0]), high((__m512bh)panel[1]) {}
  void add(float x, vf* sums) const {
    const __m512bh pair = (__m512bh)_mm512_set1_ps(x);
    sums[0] = (vf)_mm512_dpbf16_ps((__m512)sums[0], pair, low);
    sums[1] = (vf)_mm512_dpbf16_ps((__m512)sums[1], pair, high);
  }
  static vf inputs(const bf16* row, long s, long in_features) {
    return (vf)load_pairs(row + 2 * s, in_features - 2 * s);
  }
  template <class F>
  static void pack(F weights, long s, uint32_t* out) {
    for (int c = 0; c < PW; ++c) out[c] = weights(c, 2 * s) | weights(c, 2 * s + 1) << 16;
  }
};
#else
using Pairs = Widened;
#endif

long panels_of(long out_features) { return (out_features + PW - 1) / PW; }

template <class M>
long steps_of(long in_features) {
  return (in_features + M::STEP - 1) / M::STEP;
}

// Rows `first` to first + count, step by step: out[steps][count], and up to VL elements more.
template <class M>
void convert(const Linear& a, long first, int count, float* out) {
  const bf16* from = (const bf16*)a.x + first * a.x_stride;
  const long steps = steps_of<M>(a.in_features);
  for (long s = 0; s < steps; s += VL) {
    const int width = (int)std::min<long>(VL, steps - s);
    if constexpr (GROUP > VL) {  // more rows than a square of vectors has
      for (int i = 0; i < count; ++i) {
        const vf x = M::inputs(from + i * a.x_stride, s, a.in_features);
        for (int c = 0; c < width; ++c) out[(s + c) * count + i] = x[c];
      }
    } else {
      vf x[VL];
      for (int i = 0; i < VL; ++i) x[i] = i < count ? M::inputs(from + i * a.x_stride, s, a.in_features) : vf{};
      transpose(x);
      for (int i = 0; i < width; ++i) store(out + (s + i) * count, x[i]);  // the next overwrites what is too much
    }
  }
}

// sums[R][PW] (+)= x[steps][R] * panel[steps][PW]. Few rows keep several sums apart, so that no addition waits for the
// one before. `ahead`, moved by `stride` bytes per vector: memory to fetch for later.
template <class M, int R>
void block(const float* x, const vu* panel, long steps, bool fresh, const char* ahead, long stride, float* sums) {
  constexpr int U = R == 1 ? 4 : R <= 3 ? 2 : 1;
  // Two steps at a time fetch a line once, not twice; six rows leave no registers for that. Up to a sixth less time for
  // 7 to 10 rows (125M parameters, two threads of an EPYC with AVX2), with 4 KiB cached in place of 16.
  constexpr int W = U > 1 ? U : R <= 5 ? 2 : 1;
  vf acc[U][R][2];
#pragma GCC unroll 4
  for (int u = 0; u < U; ++u)
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) acc[u][r][c] = fresh || u ? vf{} : *(vf*)(sums + r * PW + c * VL);
  const auto step = [&](int u, long s) __attribute__((always_inline)) {
    const M weights(panel + s * M::VECTORS);
#pragma GCC unroll 2
    for (int v = 0; v < M::VECTORS; ++v, ahead += stride)
      if ((u * M::VECTORS + v) * sizeof(vu) % 64 == 0) __builtin_prefetch(ahead, 0, 3);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) weights.add(x[s * R + r], acc[u % U][r]);
  };
  long s = 0;
  for (; s + W <= steps; s += W)
#pragma GCC unroll 4
    for (int u = 0; u < W; ++u) step(u, s + u);
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

template <class M>
void block_of(int rows, const float* x, const vu* panel, long steps, bool fresh, const char* ahead, long stride,
              float* sums) {
  switch (rows) {
#define BATON_ROWS(R) \
  case R:             \
    return block<M, R>(x, panel, steps, fresh, ahead, stride, sums);
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
template <class M>
void panel_of(const Linear& a, long panel, long first, const Groups& groups, const float* x, long stride, float* sums) {
  constexpr long STEP_BYTES = M::VECTORS * sizeof(vu), BLOCK = CACHED / STEP_BYTES;
  const long steps = steps_of<M>(a.in_features);
  const vu* weights = (const vu*)a.packed + panel * steps * M::VECTORS;
  for (long s = 0; s < steps; s += BLOCK) {
    const long n = std::min(BLOCK, steps - s);
    for (int g = 0; g < groups.count; ++g) {
      const int rows = groups.size(g);
      const vu* part = weights + s * M::VECTORS;
      // one group streams; of several, each fetches its share of the next block
      const long bytes = n * STEP_BYTES, share = bytes + bytes * g / groups.count;
      const char* ahead = (const char*)part + (groups.count == 1 ? AHEAD : share);
      block_of<M>(rows, x + g * stride + s * rows, part, n, s == 0, ahead, sizeof(vu) / groups.count,
                  sums + (long)groups.begin(g) * PW);
    }
  }
  for (int r = 0; r < groups.rows; ++r) finish_row(a, first + r, panel * PW, sums + (long)r * PW);
}

template <class M>
long group_stride(const Linear& a) {
  return round_up(GROUP * steps_of<M>(a.in_features) + VL, 16);
}

// Run by every thread of the team; `shared` is null where each thread has to convert the inputs for itself.
template <class M>
void run(const Linear& a, float* shared, const Team& team, Shares& shares, Scratch& scratch) {
  const long panels = panels_of(a.out_features), stride = group_stride<M>(a);
  const Groups most((int)std::min<long>(a.rows, ROW_BLOCK));
  const size_t sums_size = (size_t)most.rows * PW;
  float* sums = scratch.get<float>(sums_size + (shared ? 0 : most.count * stride));
  float* x = shared ? shared : sums + sums_size;
  for (long first = 0; first < a.rows; first += ROW_BLOCK) {
    const Groups groups((int)std::min<long>(ROW_BLOCK, a.rows - first));
    for (int g = shared ? team.thread : 0; g < groups.count; g += shared ? team.threads : 1)
      convert<M>(a, first + groups.begin(g), groups.size(g), x + g * stride);
    if (shared) team.barrier();
    shares.take(team, panels, first / ROW_BLOCK, [&](long p) { panel_of<M>(a, p, first, groups, x, stride, sums); });
    if (shared) team.barrier();
  }
}

template <class M>
void linear(const Linear& a) {
  static thread_local Scratch inputs;
  if (a.rows == 0) return;
  const Groups most((int)std::min<long>(a.rows, ROW_BLOCK));
  float* shared = a.rows > PRIVATE_ROWS ? inputs.get<float>(most.count * group_stride<M>(a)) : nullptr;
  Shares shares;
  parallel(a.threads, [&](const Team& team) {
    static thread_local Scratch scratch;
    run<M>(a, shared, team, shares, scratch);
  });
}

template <class M>
void pack(const uint16_t* weight, uint32_t* packed, long out_features, long in_features) {
  const long steps = steps_of<M>(in_features);
  parallel(0, [&](const Team& team) {
    team.share(panels_of(out_features), [&](long p) {
      const auto weights = [&](long c, long s) -> uint32_t {
        const long row = p * PW + c;
        return row < out_features && s < in_features ? weight[row * in_features + s] : 0;
      };
      for (long s = 0; s < steps; ++s) M::pack(weights, s, packed + (p * steps + s) * M::VECTORS * VL);
    });
  });
}

template <class M>
int64_t packed_size(long out_features, long in_features) {
  return panels_of(out_features) * PW * steps_of<M>(in_features) * M::STEP;
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" int64_t baton_linear_packed_size(int64_t out_features, int64_t in_features) {
  return packed_size<Widened>(out_features, in_features);
}

extern "C" void baton_linear_pack(const uint16_t* weight, uint32_t* packed, int64_t out_features, int64_t in_features) {
  pack<Widened>(weight, packed, out_features, in_features);
}

extern "C" void baton_linear(const Linear* a) { linear<Widened>(*a); }

extern "C" int64_t baton_linear_pairs_packed_size(int64_t out_features, int64_t in_features) {
  return packed_size<Pairs>(out_features, in_features);
}

extern "C" void baton_linear_pairs_pack(const uint16_t* weight, uint32_t* packed, int64_t out_features,
                                        int64_t in_features) {
  pack<Pairs>(weight, packed, out_features, in_features);
}

extern "C" void baton_linear_pairs(const Linear* a) { linear<Pairs>(*a); }
