// Linear layers with bfloat16 weights through AMX's tiles, sums in float32, rounded once.
//
// Weights are repacked once into panels of 32 columns: per step of 32 inputs two tiles, one behind the other, so that a
// panel is read in order, as fast as memory delivers. Inputs are put into tiles too: rows of a power of two bytes would
// fall into the same few cache lines.
#include "amx.h"
#include "linear.h"

namespace baton {
namespace {

constexpr long STEP = 32;              // inputs per step: 16 pairs
constexpr long TILE = 512;             // bfloat16 in a tile
constexpr long BLOCK = 2 * TILE;       // of 32 rows, or of 32 columns, of a step

long steps_of(long in_features) { return (in_features + STEP - 1) / STEP; }
long panels_of(long out_features) { return (out_features + 31) / 32; }

#if defined(BATON_AMX)
constexpr int PRIVATE_ROWS = 32;       // up to here, each thread packs the inputs for itself
constexpr int STEP_LINES = 32;          // cache lines of a panel's step
constexpr long STREAM_ROWS = 256;       // from here on, outputs are too large for the caches
constexpr int AHEAD = 1024;            // bytes that a streamed panel is fetched ahead
constexpr long PART = 12;              // steps of a panel that stay in the first-level cache
constexpr long CACHED = 768 * 1024;    // bytes of packed inputs that stay in the second-level cache

// Rows `first` to first + 32, as far as they exist, as tiles: [steps][2][16][32].
void pack_rows(const Linear& a, long first, bf16* out) {
  const int count = (int)std::min<long>(32, a.rows - first);
  const long steps = steps_of(a.in_features);
  for (int r = 0; r < 32; ++r) {
    bf16* to = out + r * STEP;
    const bf16* from = (const bf16*)a.x + (first + r) * a.x_stride;
    for (long s = 0; s < steps; ++s, to += BLOCK) {
      const long left = a.in_features - s * STEP;
      const __mmask32 there = r >= count ? 0 : left >= STEP ? ~0u : (1u << left) - 1;
      _mm512_store_si512(to, _mm512_maskz_loadu_epi16(there, from + s * STEP));
    }
  }
}

// Fetch what will be read later: the processor itself does not look that far ahead.
inline void fetch(const char* at, int lines) {
  for (int i = 0; i < lines; ++i) __builtin_prefetch(at + i * 64, 0, 2);
}

// sums [32][PW] (+)= 32 rows of inputs times a panel; each step fetches `lines` cache lines from `ahead` on.
void multiply(const bf16* x, const bf16* panel, long steps, bool fresh, const char* ahead, int lines, float* sums) {
  amx_fence();
  if (fresh)
    amx_zero4();
  else
    amx_load4(sums, PW * 4);
  for (long s = 0; s < steps; ++s, x += BLOCK, panel += BLOCK, ahead += lines * 64) {
    fetch(ahead, lines);
    _tile_loadd(6, panel, 64);
    _tile_loadd(7, panel + TILE, 64);
    _tile_loadd(4, x, 64);
    _tile_loadd(5, x + TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  amx_store4(sums, PW * 4);
  amx_fence();
}

// The same for at most 16 rows, from the beginning.
void multiply_few(const bf16* x, const bf16* panel, long steps, float* sums) {
  amx_fence();
  _tile_zero(0);
  _tile_zero(1);
  for (long s = 0; s < steps; ++s, x += BLOCK, panel += BLOCK) {
    fetch((const char*)panel + AHEAD, STEP_LINES);
    _tile_loadd(4, x, 64);
    _tile_loadd(6, panel, 64);
    _tile_loadd(7, panel + TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, sums, PW * 4);
  _tile_stored(1, sums + 16, PW * 4);
  amx_fence();
}

// As finish_row, for a whole panel of columns. `stream`: past the caches, for outputs that they cannot hold.
void finish_full(const Linear& a, long row, long column, bool stream, const float* sums) {
  vf low = load(sums), high = load(sums + VL);
  if (a.bias) low += load(a.bias + column), high += load(a.bias + column + VL);
  if (a.residual) {
    const bf16* more = (const bf16*)a.residual + row * a.residual_stride + column;
    low += load(more), high += load(more + VL);
  }
  const __m512i y = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  void* to = (bf16*)a.out + row * a.out_stride + column;
  if (stream)
    _mm512_stream_si512((__m512i*)to, y);
  else
    _mm512_storeu_si512(to, y);
}

void finish(const Linear& a, long p, long first, long count, const float* sums) {
  const bool stream = a.rows >= STREAM_ROWS && a.out_stride % 32 == 0 && (uintptr_t)a.out % 64 == 0;
  if ((p + 1) * PW <= a.out_features)
    for (long r = 0; r < count; ++r) finish_full(a, first + r, p * PW, stream, sums + r * PW);
  else
    for (long r = 0; r < count; ++r) finish_row(a, first + r, p * PW, sums + r * PW);
}

// Blocks `begin` to `end` of 32 rows times a panel. Of many, a part of the panel at a time, which stays in the
// first-level cache while the rows go over it; they fetch the next part.
void panel_of(const Linear& a, long p, long begin, long end, const bf16* x, float* sums) {
  const long steps = steps_of(a.in_features), block = steps * BLOCK, blocks = end - begin;
  const bf16* panel = (const bf16*)a.packed + p * block;
  const long first = begin * 32, rows = std::min(a.rows, end * 32) - first;
  if (rows <= 16) {
    multiply_few(x + begin * block, panel, steps, sums);
    return finish(a, p, first, rows, sums);
  }
  if (blocks == 1) {
    multiply(x + begin * block, panel, steps, true, (const char*)panel + AHEAD, STEP_LINES, sums);
    return finish(a, p, first, rows, sums);
  }
  const int lines = (int)((STEP_LINES + blocks - 1) / blocks);
  for (long s = 0; s < steps; s += PART) {
    const long count = std::min(PART, steps - s);
    const char* next = (const char*)(panel + (s + count) * BLOCK);
    for (long b = 0; b < blocks; ++b) {
      float* at = sums + b * 32 * PW;
      const bf16* from = x + (begin + b) * block + s * BLOCK;
      multiply(from, panel + s * BLOCK, count, s == 0, next + b * count * lines * 64, lines, at);
      if (s + count == steps) finish(a, p, first + b * 32, std::min<long>(32, rows - b * 32), at);
    }
  }
}

// Run by every thread of the team; `shared` is null where each thread packs the inputs for itself.
void run(const Linear& a, bf16* shared, const Team& team, Scratch& scratch) {
  const AmxTiles tiles;
  const long steps = steps_of(a.in_features), blocks = (a.rows + 31) / 32, block = steps * BLOCK;
  const long cached = std::min(blocks, std::max<long>(1, CACHED / (block * (long)sizeof(bf16))));
  float* sums = scratch.get<float>(cached * 32 * PW + (shared ? 0 : blocks * block / 2));
  bf16* x = shared ? shared : (bf16*)(sums + cached * 32 * PW);
  if (shared) {
    team.share(blocks, [&](long b) { pack_rows(a, b * 32, x + b * block); });
    team.barrier();
  } else {
    for (long b = 0; b < blocks; ++b) pack_rows(a, b * 32, x + b * block);
  }
  for (long begin = 0; begin < blocks; begin += cached) {
    const long end = std::min(blocks, begin + cached), panels = panels_of(a.out_features);
    team.share(panels, [&](long p) { panel_of(a, p, begin, end, x, sums); });
  }
  _mm_sfence();  // streamed outputs are there for other threads
}
#endif

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" int64_t baton_linear_amx_packed_size(int64_t out_features, int64_t in_features) {
  return panels_of(out_features) * steps_of(in_features) * BLOCK;
}

extern "C" void baton_linear_amx_pack(const uint16_t* weight, uint16_t* packed, int64_t out_features,
                                      int64_t in_features) {
  const long steps = steps_of(in_features);
  const auto pack_panel = [&](long p) {
    for (long s = 0; s < steps; ++s)
      for (long column = 0; column < 32; ++column)
        for (long i = 0; i < STEP; ++i) {
          const long row = p * 32 + column, k = s * STEP + i;
          const long tile = (p * steps + s) * 2 + column / 16;
          packed[tile * TILE + (i / 2) * STEP + column % 16 * 2 + i % 2] =
              row < out_features && k < in_features ? weight[row * in_features + k] : 0;
        }
  };
  parallel(0, [&](const Team& team) { team.share(panels_of(out_features), pack_panel); });
}

extern "C" void baton_linear_amx([[maybe_unused]] const Linear* a) {
#if defined(BATON_AMX)
  static thread_local Scratch inputs;
  if (a->rows == 0) return;
  const long blocks = (a->rows + 31) / 32;
  bf16* shared = a->rows > PRIVATE_ROWS ? inputs.get<bf16>(blocks * steps_of(a->in_features) * BLOCK) : nullptr;
  parallel(a->threads, [&](const Team& team) {
    static thread_local Scratch scratch;
    run(*a, shared, team, scratch);
  });
#endif
}
