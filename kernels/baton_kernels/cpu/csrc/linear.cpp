// Linear layers with bfloat16 weights, multiplied in float32: for processors whose float32 units outrun their bfloat16
// ones. Weights are repacked once into panels of columns that are read in order; a bfloat16 pair becomes two float32
// vectors by a shift and a mask. Few rows stream the panels; many rows convert a block of a panel once and reuse it.
#include <omp.h>

#include "paged_attention.h"

namespace baton {
namespace {

constexpr int PW = NV * VL;        // columns per panel
constexpr int PAIRS = NV / 2;      // vectors of pairs per step of a panel
constexpr int K_BLOCK = 128;       // steps whose float32 panel stays in the first-level cache
constexpr int CONVERT_ROWS = 48;   // from here on, converting the panel pays
constexpr int ROW_BLOCK = 252;     // rows that share one conversion
constexpr int PRIVATE_ROWS = 32;   // up to here, each thread converts the inputs for itself

struct Linear {
  const void* x;
  const uint32_t* packed;
  const float* bias;     // or null
  const void* residual;  // added to the result, or null
  void* out;
  int64_t rows, x_stride, residual_stride, out_stride;
  int32_t in_features, out_features, threads, unused;
};

void to_float(const bf16* x, long n, float* out) {
  for (long i = 0; i < n; i += VL) store_upto(out + i, load_upto(x + i, n - i), n - i);
}

// sums[R][PW] (+)= x[R][steps] * panel[steps][PW], the panel as pairs or as float32
template <int R, bool PACKED>
void block(const float* x, long ldx, const void* panel, int steps, bool fresh, float* sums) {
  vf acc[R][NV];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < NV; ++c) acc[r][c] = fresh ? vf{} : *(vf*)(sums + r * PW + c * VL);
  for (int s = 0; s < steps; ++s) {
    vf w[NV];
    if (PACKED) {
      const vu* pairs = (const vu*)panel + (long)s * PAIRS;
#pragma GCC unroll 4
      for (int c = 0; c < PAIRS; ++c) w[2 * c] = (vf)(pairs[c] << 16), w[2 * c + 1] = (vf)(pairs[c] & 0xffff0000u);
    } else {
#pragma GCC unroll 4
      for (int c = 0; c < NV; ++c) w[c] = ((const vf*)panel)[(long)s * NV + c];
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf a = splat(x[r * ldx + s]);
#pragma GCC unroll 4
      for (int c = 0; c < NV; ++c) acc[r][c] += a * w[c];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < NV; ++c) *(vf*)(sums + r * PW + c * VL) = acc[r][c];
}

template <bool PACKED>
void block_of(int rows, const float* x, long ldx, const void* panel, int steps, bool fresh, float* sums) {
  switch (rows) {
    case 1: return block<1, PACKED>(x, ldx, panel, steps, fresh, sums);
    case 2: return block<2, PACKED>(x, ldx, panel, steps, fresh, sums);
    case 3: return block<3, PACKED>(x, ldx, panel, steps, fresh, sums);
    case 4: return block<4, PACKED>(x, ldx, panel, steps, fresh, sums);
    case 5: return block<5, PACKED>(x, ldx, panel, steps, fresh, sums);
    default: return block<6, PACKED>(x, ldx, panel, steps, fresh, sums);
  }
}

constexpr int GROUP = 6;  // rows of a register tile

void unpack(const uint32_t* panel, int steps, float* out) {
  const vu* pairs = (const vu*)panel;
  vf* to = (vf*)out;
  for (long i = 0; i < (long)steps * PAIRS; ++i) to[2 * i] = (vf)(pairs[i] << 16), to[2 * i + 1] = (vf)(pairs[i] & 0xffff0000u);
}

void finish_row(const Linear& a, long row, long column, const float* sums) {
  const long width = std::min<long>(PW, a.out_features - column);
  bf16* to = (bf16*)a.out + row * a.out_stride + column;
  const bf16* residual = a.residual ? (const bf16*)a.residual + row * a.residual_stride + column : nullptr;
  for (long c = 0; c < width; c += VL) {
    vf y = load(sums + c);
    if (a.bias) y += load_upto(a.bias + column + c, width - c);
    if (residual) y += load_upto(residual + c, width - c);
    store_upto(to + c, y, width - c);
  }
}

// One panel of columns for `rows` rows from `first` on; x is float32 [rows][in_features].
void panel_of(const Linear& a, long panel, long first, int rows, const float* x, float* work) {
  const int steps = a.in_features;
  const uint32_t* weights = a.packed + panel * steps * (PW / 2);
  float* sums = work;
  float* converted = work + (size_t)round_up(rows, GROUP) * PW;
  const int groups = (rows + GROUP - 1) / GROUP, size = (rows + groups - 1) / groups;
  const bool convert = rows >= CONVERT_ROWS;
  const int unit = rows <= GROUP ? steps : convert ? K_BLOCK : 2 * K_BLOCK;
  for (int s = 0; s < steps; s += unit) {
    const int n = std::min(unit, steps - s);
    const uint32_t* part = weights + (long)s * (PW / 2);
    if (convert) unpack(part, n, converted);
    for (int r = 0; r < rows; r += size) {
      const int count = std::min(size, rows - r);
      if (convert)
        block_of<false>(count, x + (long)r * steps + s, steps, converted, n, s == 0, sums + (long)r * PW);
      else
        block_of<true>(count, x + (long)r * steps + s, steps, part, n, s == 0, sums + (long)r * PW);
    }
  }
  for (int r = 0; r < rows; ++r) finish_row(a, first + r, panel * PW, sums + (long)r * PW);
}

// Run by every thread of the team; `shared` is null where each thread has to convert the inputs for itself.
void run(const Linear& a, float* shared, Scratch& scratch) {
  const long panels = (a.out_features + PW - 1) / PW;
  const int threads = omp_get_num_threads(), thread = omp_get_thread_num(), k = a.in_features;
  const int most = (int)std::min<long>(a.rows, ROW_BLOCK);
  const size_t work_size = (size_t)round_up(most, GROUP) * PW + (size_t)K_BLOCK * PW;
  float* work = scratch.get<float>(work_size + (shared ? 0 : round_up((size_t)most * k, 16)));
  float* x = shared ? shared : work + work_size;
  for (long first = 0; first < a.rows; first += ROW_BLOCK) {
    const int rows = (int)std::min<long>(ROW_BLOCK, a.rows - first);
    const long from = shared ? (long)rows * thread / threads : 0, to = shared ? (long)rows * (thread + 1) / threads : rows;
    for (long r = from; r < to; ++r) to_float((const bf16*)a.x + (first + r) * a.x_stride, k, x + r * k);
    if (shared) {
#pragma omp barrier
    }
#pragma omp for schedule(static) nowait
    for (long p = 0; p < panels; ++p) panel_of(a, p, first, rows, x, work);
    if (shared) {
#pragma omp barrier
    }
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

// Elements (uint32) of the packed weights.
extern "C" int64_t baton_linear_packed_size(int64_t out_features, int64_t in_features) {
  return round_up(out_features, PW) * in_features / 2;
}

// weight: bfloat16 [out_features][in_features] -> packed, aligned to 64 bytes.
extern "C" void baton_linear_pack(const uint16_t* weight, uint32_t* packed, int64_t out_features, int64_t in_features) {
  const long panels = (out_features + PW - 1) / PW;
#pragma omp parallel for schedule(static)
  for (long p = 0; p < panels; ++p)
    for (long s = 0; s < in_features; ++s)
      for (int i = 0; i < PW / 2; ++i) {
        const long low = p * PW + i / VL * 2 * VL + i % VL, high = low + VL;
        const uint32_t a = low < out_features ? weight[low * in_features + s] : 0;
        const uint32_t b = high < out_features ? weight[high * in_features + s] : 0;
        packed[(p * in_features + s) * (PW / 2) + i] = a | b << 16;
      }
}

extern "C" void baton_linear(const Linear* a) {
  static thread_local Scratch inputs;
  if (a->rows == 0) return;
  const bool share = a->rows > PRIVATE_ROWS;
  float* shared = share ? inputs.get<float>((size_t)std::min<long>(a->rows, ROW_BLOCK) * a->in_features) : nullptr;
  const int threads = a->threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local Scratch scratch;
    run(*a, shared, scratch);
  }
}
