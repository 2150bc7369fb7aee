// A mixture of experts: every token's row goes through the gated MLPs that were chosen for it, and their outputs are
// summed with the tokens' weights. One call groups the rows by expert, so that each expert's weights are read once.
//
// Weights are repacked once into panels of two vectors of columns, step by step: a float32, or a pair of bfloat16, per
// column. A panel of the first product has as many gates as ups, so that activation(gate) * up is taken in registers.
#include <type_traits>

#include "activation.h"
#include "expert_plan.h"
#include "operators.h"
#include "team.h"

namespace baton {
namespace {

constexpr long MOST_SLOTS = 8192;  // (token, expert) pairs at a time: bounds the memory between the products
constexpr int AHEAD = 1024;        // bytes that a panel is fetched ahead
constexpr int GROUP = ROW_GROUP;   // rows of a register tile
static_assert(GROUP <= VL, "rows are transposed in squares of vectors");

// How elements are multiplied. STEP: inputs per step of a panel; UNITS: 32-bit units of a row's inputs for a step.
struct Float32 {
  using T = float;
  static constexpr int STEP = 1, UNITS = 1;
  static void add(vf& sum, const float* x, long, vu w) { sum += splat(*x) * (vf)w; }
};
struct Widened {  // bfloat16 as float32
  using T = bf16;
  static constexpr int STEP = 2, UNITS = 2;
  static void add(vf& sum, const float* x, long next, vu w) {
    sum += splat(x[0]) * (vf)(w << 16);
    sum += splat(x[next]) * (vf)(w & 0xffff0000u);
  }
};
#if defined(BATON_AVX512_BF16)
struct Pairs {  // of bfloat16
  using T = bf16;
  static constexpr int STEP = 2, UNITS = 1;
  static void add(vf& sum, const float* x, long, vu w) {
    const __m512i pair = (__m512i)_mm512_set1_ps(*x);
    sum = (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)w);
  }
};
template <class M>
constexpr bool paired = std::is_same_v<M, Pairs>;
#else
template <class M>
constexpr bool paired = false;
#endif

// sums[R][2] = x[steps][UNITS][R] * panel[steps][2]
template <class M, int R>
void tile(const float* x, const vu* panel, long steps, vf* sums) {
  constexpr int U = R <= 2 ? 4 : R <= 4 ? 2 : 1;  // sums kept apart, so that no addition waits for the one before
  vf acc[U][R][2] = {};
  const auto step = [&](int u, long s) __attribute__((always_inline)) {
    const vu low = panel[2 * s], high = panel[2 * s + 1];
    __builtin_prefetch((const char*)(panel + 2 * s) + AHEAD, 0, 3);
    const float* at = x + s * (M::UNITS * R);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      M::add(acc[u][r][0], at + r, R, low);
      M::add(acc[u][r][1], at + r, R, high);
    }
  };
  long s = 0;
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
      sums[2 * r + c] = total;
    }
}

template <class M>
void tile_of(int rows, const float* x, const vu* panel, long steps, vf* sums) {
  switch (rows) {
#define BATON_ROWS(R) \
  case R:             \
    return tile<M, R>(x, panel, steps, sums);
    BATON_ROWS(1)
    BATON_ROWS(2)
    BATON_ROWS(3)
    BATON_ROWS(4)
#if defined(__AVX2__)
    BATON_ROWS(5)
    BATON_ROWS(6)
#endif
#if defined(BATON_AVX512)
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

// Sizes that packing and multiplying share, for T: inputs rounded up to whole steps, columns to whole panels.
template <class T>
struct Sizes {
  static constexpr int STEP = sizeof(T) == 4 ? 1 : 2;
  long hidden_steps, inner_steps, inner_panels, hidden_panels;
  Sizes(long hidden, long inner)
      : hidden_steps((hidden + STEP - 1) / STEP),
        inner_steps(round_up(inner, VL) / STEP),
        inner_panels(round_up(inner, VL) / VL),
        hidden_panels((hidden + 2 * VL - 1) / (2 * VL)) {}
  long gate_up() const { return inner_panels * hidden_steps * 2; }  // vectors per expert
  long down() const { return hidden_panels * inner_steps * 2; }
};

// A group's rows of x, step by step: [steps][UNITS][rows].
template <class M>
void gather(const Experts& a, const Group& group, const Plan& plan, float* out) {
  using T = typename M::T;
  const T* rows[GROUP];
  for (int r = 0; r < group.rows; ++r) rows[r] = (const T*)a.x + plan.token[group.first + r] * a.x_stride;
  const long units = paired<M> ? (a.hidden + 1) / 2 : round_up(a.hidden, M::STEP);
  for (long u = 0; u < units; u += VL) {
    vf square[VL] = {};
    for (int r = 0; r < group.rows; ++r)
      if constexpr (paired<M>) {
        bf16 part[2 * VL] = {};
        const long at = 2 * u, left = std::min<long>(2 * VL, a.hidden - at);
        std::memcpy(part, rows[r] + at, left * sizeof(bf16));
        std::memcpy(&square[r], part, sizeof(vf));
      } else if (u < a.hidden) {
        square[r] = load_upto(rows[r] + u, a.hidden - u);
      }
    transpose(square);
    const int width = (int)std::min<long>(VL, units - u);
    for (int i = 0; i < width; ++i) {  // the next overwrites what is too much; the last must not write past the end
      const long at = (u + i) * group.rows;
      store_upto(out + at, square[i], std::max<long>(group.rows, units * group.rows - at));
    }
  }
}

// Inner columns `column` to column + VL of row r to where the second product reads them.
template <class M>
void put(vf h, long column, int r, int rows, float* out) {
  if constexpr (paired<M>) {
    bf16 narrow[VL];
    store(narrow, h);
    for (int i = 0; i < VL / 2; ++i) std::memcpy(out + (column / 2 + i) * rows + r, narrow + 2 * i, 4);
  } else {
    for (int i = 0; i < VL; ++i) out[(column + i) * rows + r] = h[i];
  }
}

template <class M>
class Run {
 public:
  using T = typename M::T;

  Run(const Experts& a, const Plan& plan, float* memory, long from, long count)
      : a_(a), plan_(plan), sizes_(a.hidden, a.inner), from_(from), count_(count) {
    const long slots = (long)plan.token.size();
    x_stride_ = sizes_.hidden_steps * M::UNITS, h_stride_ = sizes_.inner_steps * M::UNITS;
    x_ = memory, h_ = x_ + round_up(slots * x_stride_, 16), y_ = h_ + round_up(slots * h_stride_, 16);
  }

  // Elements of float that the constructor wants.
  static size_t memory(const Experts& a, long slots) {
    const Sizes<T> sizes(a.hidden, a.inner);
    return round_up(slots * sizes.hidden_steps * M::UNITS, 16) + round_up(slots * sizes.inner_steps * M::UNITS, 16) +
           slots * sizes.hidden_panels * 2 * VL;
  }

  void work(const Team& team, std::atomic<long>* next) {
    team.share((long)plan_.groups.size(), [&](long g) {
      const Group& group = plan_.groups[g];
      gather<M>(a_, group, plan_, x_ + group.first * x_stride_);
    });
    team.barrier();
    const long active = (long)plan_.active.size(), panels = sizes_.inner_panels, columns = sizes_.hidden_panels;
    take(next[0], active * panels, [&](long i) { first(plan_.active[i / panels], i % panels); });
    team.barrier();
    take(next[1], active * columns, [&](long i) { second(plan_.active[i / columns], i % columns); });
    team.barrier();
    team.share(count_, [&](long t) { finish(t); });
  }

 private:
  // A panel of gates and ups of one expert.
  void first(int expert, long panel) {
    switch (a_.activation) {
      case SILU: return first_of<SILU>(expert, panel);
      case GELU_TANH: return first_of<GELU_TANH>(expert, panel);
      case CLIPPED_SWISH: return first_of<CLIPPED_SWISH>(expert, panel);
    }
  }

  template <int kind>
  void first_of(int expert, long panel) {
    const vu* weights = (const vu*)a_.gate_up + expert * sizes_.gate_up() + panel * sizes_.hidden_steps * 2;
    const long padded = sizes_.inner_panels * VL, column = panel * VL;
    vf gate_bias = vf{}, up_bias = vf{};
    if (a_.gate_up_bias) {
      const float* bias = a_.gate_up_bias + expert * 2 * padded + column;
      gate_bias = load(bias), up_bias = load(bias + padded);
    }
    vf sums[GROUP * 2];
    for (int g = plan_.first_group[expert]; g < plan_.first_group[expert + 1]; ++g) {
      const Group& group = plan_.groups[g];
      tile_of<M>(group.rows, x_ + group.first * x_stride_, weights, sizes_.hidden_steps, sums);
      float* to = h_ + group.first * h_stride_;
      for (int r = 0; r < group.rows; ++r)
        put<M>(gated<kind>(sums[2 * r] + gate_bias, sums[2 * r + 1] + up_bias, a_.alpha, a_.limit), column, r,
               group.rows, to);
    }
  }

  // A panel of the outputs of one expert, weighted.
  void second(int expert, long panel) {
    const vu* weights = (const vu*)a_.down + expert * sizes_.down() + panel * sizes_.inner_steps * 2;
    const long width = sizes_.hidden_panels * 2 * VL, column = panel * 2 * VL;
    vf low = vf{}, high = vf{};
    if (a_.down_bias) {
      const float* bias = a_.down_bias + expert * width + column;
      low = load(bias), high = load(bias + VL);
    }
    vf sums[GROUP * 2];
    for (int g = plan_.first_group[expert]; g < plan_.first_group[expert + 1]; ++g) {
      const Group& group = plan_.groups[g];
      tile_of<M>(group.rows, h_ + group.first * h_stride_, weights, sizes_.inner_steps, sums);
      for (int r = 0; r < group.rows; ++r) {
        float* to = y_ + (group.first + r) * width + column;
        const float weight = plan_.weight[group.first + r];
        store(to, (sums[2 * r] + low) * weight);
        store(to + VL, (sums[2 * r + 1] + high) * weight);
      }
    }
  }

  // A token's row of the output.
  void finish(long t) {
    const long width = sizes_.hidden_panels * 2 * VL;
    const int32_t* slots = plan_.slot.data() + t * a_.top_k;
    const T* residual = a_.residual ? (const T*)a_.residual + (from_ + t) * a_.residual_stride : nullptr;
    T* out = (T*)a_.out + (from_ + t) * a_.hidden;
    for (long d = 0; d < a_.hidden; d += VL) {
      vf y = residual ? load_upto(residual + d, a_.hidden - d) : vf{};
      for (int k = 0; k < a_.top_k; ++k)
        if (slots[k] >= 0) y += load(y_ + slots[k] * width + d);
      store_upto(out + d, y, a_.hidden - d);
    }
  }

  const Experts& a_;
  const Plan& plan_;
  const Sizes<T> sizes_;
  const long from_, count_;
  long x_stride_, h_stride_;
  float *x_, *h_, *y_;
};

template <class M>
void run(const Experts& a) {
  static thread_local Plan plan;
  static thread_local Scratch scratch;
  const long step = std::max<long>(1, MOST_SLOTS / a.top_k);
  for (long from = 0; from < a.tokens; from += step) {
    const long count = std::min(step, a.tokens - from);
    plan.make(a.ids, a.weights, a.top_k, a.experts, from, count);
    Run<M> part(a, plan, scratch.get<float>(Run<M>::memory(a, (long)plan.token.size())), from, count);
    std::atomic<long> next[2] = {{0}, {0}};
    parallel(a.threads, [&](const Team& team) { part.work(team, next); });
  }
}

// Columns of a panel from weights [columns][inputs], of which some may be past the end: units [steps][2][VL].
template <class T>
void pack_panel(const T* low, long low_count, const T* high, long high_count, long inputs, long steps, uint32_t* out) {
  constexpr int STEP = Sizes<T>::STEP;
  const auto unit = [&](const T* columns, long count, long c, long s) -> uint32_t {
    uint32_t bits = 0;
    if (c >= count) return bits;
    const long left = std::min<long>(STEP, inputs - s * STEP);
    if (left > 0) std::memcpy(&bits, columns + c * inputs + s * STEP, left * sizeof(T));
    return bits;
  };
  for (long s = 0; s < steps; ++s)
    for (long c = 0; c < VL; ++c) {
      out[(2 * s) * VL + c] = unit(low, low_count, c, s);
      out[(2 * s + 1) * VL + c] = unit(high, high_count, c, s);
    }
}

template <class T>
void pack(const T* gate_up, const T* down, uint32_t* to_gate_up, uint32_t* to_down, long hidden, long inner) {
  const Sizes<T> sizes(hidden, inner);
  parallel(0, [&](const Team& team) {
    team.share(sizes.inner_panels, [&](long p) {
      const T *gate = gate_up + p * VL * hidden, *up = gate + inner * hidden;
      const long left = inner - p * VL;
      pack_panel(gate, left, up, left, hidden, sizes.hidden_steps, to_gate_up + p * sizes.hidden_steps * 2 * VL);
    });
    team.share(sizes.hidden_panels, [&](long p) {
      const T *low = down + p * 2 * VL * inner, *high = low + VL * inner;
      const long left = hidden - p * 2 * VL;
      pack_panel(low, left, high, left - VL, inner, sizes.inner_steps, to_down + p * sizes.inner_steps * 2 * VL);
    });
  });
}

template <class T>
void packed_sizes(long hidden, long inner, int64_t* out) {
  const Sizes<T> sizes(hidden, inner);
  out[0] = sizes.gate_up() * VL * 4, out[1] = sizes.down() * VL * 4;
  out[2] = sizes.inner_panels * VL, out[3] = sizes.hidden_panels * 2 * VL;
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" void baton_experts_sizes(int64_t dtype, int64_t hidden, int64_t inner, int64_t* out) {
  return dtype == 0 ? packed_sizes<float>(hidden, inner, out) : packed_sizes<bf16>(hidden, inner, out);
}

extern "C" void baton_experts_pack(int64_t dtype, const void* gate_up, const void* down, uint32_t* to_gate_up,
                                   uint32_t* to_down, int64_t hidden, int64_t inner) {
  if (dtype == 0) return pack((const float*)gate_up, (const float*)down, to_gate_up, to_down, hidden, inner);
  pack((const bf16*)gate_up, (const bf16*)down, to_gate_up, to_down, hidden, inner);
}

extern "C" void baton_experts(const Experts* a) {
  if (a->dtype == 0) return run<Float32>(*a);
#if defined(BATON_AVX512_BF16)
  if (a->pairs) return run<Pairs>(*a);
#endif
  run<Widened>(*a);
}
