// The decode kernel through AMX's tiles: the vector units cannot keep up with memory where a few query heads share a KV
// head. Keys are multiplied as they lie in the pool (scores come out transposed), values after pairs of keys were put side
// by side.
#pragma once
#include "../amx.h"
#include "decode.h"

#if defined(BATON_AMX)
namespace baton {

class DecodeAmx {
 public:
  // Whole tiles of 16 keys lie in a block, and dims fill tiles.
  static bool takes(const Attention& a) {
    return a.block_size % RUN == 0 && a.k_dim % 32 == 0 && a.v_dim % 32 == 0;
  }

  DecodeAmx(const Attention& args, const Item& item, Scratch& scratch)
      : a(args), item(item), table(args.block_tables + item.seq * args.table_stride), group(args.num_heads / args.kv_heads) {
    width = group <= 4 ? 4 : 8;
    const size_t queries = (size_t)a.k_dim * width, outputs = (size_t)width * a.v_dim;
    char* at = scratch.get<char>(item.heads * (queries * 2 + outputs * 4 + sizeof(State)) + (size_t)KB * a.v_dim * 2);
    values = (bf16*)at, at += (size_t)KB * a.v_dim * 2;
    q = (bf16*)at, at += item.heads * queries * 2;
    out = (float*)at, at += item.heads * outputs * 4;
    state = (State*)at;
  }

  // partials: null, or where to leave largest, sum and the unscaled output of each query head for merging. next: what
  // this thread will probably do after this, or null.
  void run(float* partials, const Item* next) {
    AmxShapes shapes;  // tiles 0, 1: scores, 2: queries, 3, 7: keys or values, 4, 5: outputs, 6: weights
    for (int tile : {0, 1, 2}) shapes.set(tile, 16, width * 4);
    for (int tile : {4, 5, 6}) shapes.set(tile, width, 64);
    const AmxTiles tiles(shapes);
    for (int h = 0; h < item.heads; ++h) begin(h);
    Ahead<bf16> ahead;
    for (long j = item.begin / RUN * RUN; j < item.end; j += KB) {
      const int low = (int)std::max<long>(0, item.begin - j), high = (int)std::min<long>(KB, item.end - j);
      ahead.begin_tile(a, item, next, j + high, item.heads * fetches());
      for (int h = 0; h < item.heads; ++h) tile(j, low, high, h, ahead);
    }
    for (int h = 0; h < item.heads; ++h) finish(h, partials ? partials + (long)h * group * (a.v_dim + 2) : nullptr);
  }

 private:
  static constexpr int RUN = 16;                             // keys that are sure to lie in one block
  // Calls of Ahead per head and tile, spread in time: what waits for memory all at once does nothing else meanwhile.
  static constexpr int KEY_FETCHES = 8, SOFTEN_FETCHES = 6, VALUE_FETCHES = 6;

  long fetches() const {
    return KB / (2 * RUN) * KEY_FETCHES + group * SOFTEN_FETCHES + KB / 4 + a.v_dim / 32 * VALUE_FETCHES;
  }

  struct alignas(64) State {
    float largest[MAX_GROUP], sum[MAX_GROUP];
  };

  const Attention& a;
  const Item& item;
  const int32_t* table;
  int group, width;  // query heads, and those that tiles have room for
  bf16 *values;      // [KB / 2][v_dim] of pairs
  bf16* q;           // [heads][k_dim / 2][width] of pairs
  float* out;        // [heads][width][v_dim], dims in the order of the values' pairs
  State* state;      // [heads]

  void begin(int h) {
    const long token = a.query_starts[item.seq];
    const bool sink = a.sinks && item.first;  // counted once where a decode is split
    bf16* to = q + (long)h * a.k_dim * width;
    std::memset(to, 0, (size_t)a.k_dim * width * sizeof(bf16));
    for (int g = 0; g < group; ++g) {
      const int head = (item.head + h) * group + g;
      const bf16* x = (const bf16*)a.q + token * a.q_token + (long)head * a.q_head;
      for (int d = 0; d < a.k_dim; ++d) to[(d / 2 * width + g) * 2 + d % 2] = x[d];
      state[h].largest[g] = sink ? a.sinks[head] * LOG2E : NEG_INF;
      state[h].sum[g] = sink ? 1.0f : 0.0f;
    }
    std::memset(out + (long)h * width * a.v_dim, 0, (size_t)width * a.v_dim * sizeof(float));
  }

  // Positions low to high of the tile at j, for KV head h of the item.
  void tile(long j, int low, int high, int h, Ahead<bf16>& ahead) {
    const Head<bf16> head(a, item.seq, item.head + h);
    alignas(64) float scores[KB * MAX_GROUP], rows[MAX_GROUP][KB];
    alignas(64) bf16 weights[MAX_GROUP * KB];
    multiply_keys(head, j, high, q + (long)h * a.k_dim * width, scores, ahead);
    turn(scores, rows);
    float* outputs = out + (long)h * width * a.v_dim;
    for (int g = 0; g < group; ++g) {
      ahead.some(SOFTEN_FETCHES);
      const float factor = soften(rows[g], low, high, state[h].largest[g], state[h].sum[g], weights + g * KB);
      if (factor == 1.0f) continue;
      for (int d = 0; d < a.v_dim; d += VL) *(vf*)(outputs + (long)g * a.v_dim + d) *= factor;
    }
    pair_values(head, j, high, ahead);
    multiply_values(weights, outputs, ahead);
  }

  const bf16* row(const bf16* base, long position, long dim) const {
    const long block = position / a.block_size, offset = position % a.block_size;
    return base + table[block] * a.block_stride + offset * dim;
  }

  // scores [KB][width] = keys x queries; what lies beyond the sequence's end is left as it was.
  void multiply_keys(const Head<bf16>& head, long j, int high, const bf16* queries, float* scores, Ahead<bf16>& ahead) {
    const long stride = a.k_dim * 2l;
    amx_fence();
    for (int i = 0; i < high; i += 2 * RUN) {
      const bf16* one = row(head.k, j + i, a.k_dim);
      const bf16* two = i + RUN < high ? row(head.k, j + i + RUN, a.k_dim) : one;
      ahead.some(KEY_FETCHES);
      _tile_zero(0);
      _tile_zero(1);
      for (int d = 0; d < a.k_dim; d += 32) {
        _tile_loadd(2, queries + (long)d * width, width * 4);
        _tile_loadd(3, one + d, stride);
        _tile_loadd(7, two + d, stride);
        _tile_dpbf16ps(0, 3, 2);
        _tile_dpbf16ps(1, 7, 2);
      }
      _tile_stored(0, scores + (long)i * width, width * 4);
      _tile_stored(1, scores + (long)(i + RUN) * width, width * 4);
    }
    amx_fence();
  }

  // [KB][width] -> [width][KB]. Not by gathering, which mitigations have made slow.
  void turn(const float* scores, float (*rows)[KB]) const {
    for (int i = 0; i < KB; i += 16, scores += 16 * width) {
      __m512 x[4], y[4];
      for (int k = 0; k < 4; ++k) {
        if (width == 4) {
          x[k] = _mm512_load_ps(scores + k * 16);
          continue;
        }
        const __m512 one = _mm512_load_ps(scores + k * 32), two = _mm512_load_ps(scores + k * 32 + 16);
        x[k] = _mm512_shuffle_f32x4(one, two, 0x88);
        y[k] = _mm512_shuffle_f32x4(one, two, 0xdd);
      }
      turn4(x, rows, i);
      if (width == 8) turn4(y, rows + 4, i);
    }
  }

  // x: 16 keys' scores of four heads, key by key -> columns i to i + 16 of four rows
  static void turn4(const __m512* x, float (*rows)[KB], int i) {
    const __m512i ends = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i others = _mm512_add_epi32(ends, _mm512_set1_epi32(2));
    for (int g = 0; g < 4; g += 2) {
      const __m512i index = g ? others : ends;
      const __m512 one = _mm512_permutex2var_ps(x[0], index, x[1]), two = _mm512_permutex2var_ps(x[2], index, x[3]);
      _mm512_store_ps(rows[g] + i, _mm512_shuffle_f32x4(one, two, 0x44));
      _mm512_store_ps(rows[g + 1] + i, _mm512_shuffle_f32x4(one, two, 0xee));
    }
  }

  // One row of scores -> weights; columns outside of [low, high) are hidden. Returns the factor for what was summed up.
  float soften(float* s, int low, int high, float& largest_so_far, float& sum_so_far, bf16* weights) const {
    constexpr int N = KB / VL;
    vf x[N];
    for (int i = 0; i < N; ++i) x[i] = scaled(a, *(vf*)(s + i * VL));
    if (low > 0 || high < KB) {
      vi column;
      for (int i = 0; i < VL; ++i) column[i] = i;
      for (int i = 0; i < N; ++i, column += VL) x[i] = select((column >= low) & (column < high), x[i], splat(NEG_INF));
    }
    vf top = x[0], total = vf{};
    for (int i = 1; i < N; ++i) top = vmax(top, x[i]);
    const float before = largest_so_far, now = std::max(before, largest(top));
    for (int i = 0; i < N; ++i) total += x[i] = exp2v<true>(x[i] - now);
    for (int i = 0; i < N; i += 2)
      _mm512_store_si512(weights + i * VL, (__m512i)_mm512_cvtne2ps_pbh((__m512)x[i + 1], (__m512)x[i]));
    const float factor = before == now ? 1.0f : exp2f(before - now);
    largest_so_far = now;
    sum_so_far = sum_so_far * factor + sum(total);
    return factor;
  }

  // Values of two keys side by side, dim for dim; within 32 dims in the order that the cheapest instruction leaves:
  // 0-3, 8-11, 16-19, 24-27, then the others. Keys beyond the end are zero: whatever lies there must not count.
  void pair_values(const Head<bf16>& head, long j, int high, Ahead<bf16>& ahead) {
    const __m512i zero = _mm512_setzero_si512();
    for (int i = 0; i < KB; i += 2) {
      if (i % 4 == 0) ahead.some(1);
      const bf16* even = i < high ? row(head.v, j + i, a.v_row()) : nullptr;
      const bf16* odd = i + 1 < high ? even + a.v_row() : nullptr;
      bf16* to = values + (long)i * a.v_dim;
      for (int d = 0; d < a.v_dim; d += 32, to += 64) {
        const __m512i x = even ? _mm512_loadu_si512(even + d) : zero, y = odd ? _mm512_loadu_si512(odd + d) : zero;
        _mm512_store_si512(to, _mm512_unpacklo_epi16(x, y));
        _mm512_store_si512(to + 32, _mm512_unpackhi_epi16(x, y));
      }
    }
  }

  // outputs [width][v_dim] += weights [width][KB] x values
  void multiply_values(const bf16* weights, float* outputs, Ahead<bf16>& ahead) {
    const long stride = a.v_dim * 4l;
    amx_fence();
    for (int d = 0; d < a.v_dim; d += 32) {
      ahead.some(VALUE_FETCHES);
      _tile_loadd(4, outputs + d, stride);
      _tile_loadd(5, outputs + d + 16, stride);
      for (int i = 0; i < KB; i += 32) {
        const bf16* pairs = values + (long)i * a.v_dim + 2 * d;
        _tile_loadd(6, weights + i, KB * 2);
        _tile_loadd(3, pairs, stride);
        _tile_loadd(7, pairs + 32, stride);
        _tile_dpbf16ps(4, 6, 3);
        _tile_dpbf16ps(5, 6, 7);
      }
      _tile_stored(4, outputs + d, stride);
      _tile_stored(5, outputs + d + 16, stride);
    }
    amx_fence();
  }

  void finish(int h, float* partial) {
    const long token = a.query_starts[item.seq];
    for (int g = 0; g < group; ++g) {
      const float *from = out + ((long)h * width + g) * a.v_dim, total = state[h].sum[g];
      const float scale = partial ? 1.0f : total > 0 ? 1.0f / total : 0.0f;
      float* to_partial = partial ? partial + (long)g * (a.v_dim + 2) : nullptr;
      bf16* to = (bf16*)a.out + (token * a.num_heads + (item.head + h) * group + g) * a.v_dim;
      if (to_partial) to_partial[0] = state[h].largest[g], to_partial[1] = total;
      for (int d = 0; d < a.v_dim; d += 32) {
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        const __m512 x = _mm512_loadu_ps(from + d), y = _mm512_loadu_ps(from + d + 16);
        const vf one = (vf)_mm512_permutex2var_ps(x, low, y) * scale, two = (vf)_mm512_permutex2var_ps(x, high, y) * scale;
        if (to_partial)
          store(to_partial + 2 + d, one), store(to_partial + 2 + d + VL, two);
        else
          store(to + d, one), store(to + d + VL, two);
      }
    }
  }
};

}  // namespace baton
#endif
