// The tile kernel: many query rows (tokens of a chunk times the heads that share a KV head) against tiles of 64 keys.
//
// Keys and values of a tile are packed once and stay in the first-level cache while all rows go over them, MR rows at a
// time: scores in registers, softmax kept online, weights times values added to the rows' outputs.
#pragma once
#include "../amx.h"
#include "paged_attention.h"

namespace baton {

// Compute in float32, from any storage.
struct ComputeF32 {
  typedef float elem;
  static constexpr int PAIR = 1;
  static constexpr bool ROUGH = false;
  static vf fma(vf acc, elem a, const elem* b) { return acc + splat(a) * *(const vf*)b; }

  template <class T>
  static void pack_row(const T* x, int n, elem* out, int padded) {
    for (int i = 0; i < padded; i += VL) *(vf_unaligned*)(out + i) = i < n ? load_upto(x + i, n - i) : vf{};
  }
  // rows [KB][dim] -> out [dim][KB]
  template <class T>
  static void pack_keys(const T* const* rows, int n, int dim, elem* out) {
    for (int j = 0; j < KB; j += VL)
      for (int d = 0; d < dim; d += VL) {
        vf x[VL];
        for (int i = 0; i < VL; ++i) x[i] = j + i < n ? load_upto(rows[j + i] + d, dim - d) : vf{};
        transpose(x);
        const int columns = std::min(VL, dim - d);
        for (int c = 0; c < columns; ++c) store(out + (long)(d + c) * KB + j, x[c]);
      }
  }
  template <class T>
  static void pack_values(const T* const* rows, int n, int dim, int padded, elem* out) {
    for (int j = 0; j < KB; ++j)
      if (j < n)
        pack_row(rows[j], dim, out + (long)j * padded, padded);
      else
        std::memset(out + (long)j * padded, 0, padded * sizeof(elem));
  }
  static void weights(const vf* p, elem* out) {
    for (int i = 0; i < KB / VL; ++i) store(out + i * VL, p[i]);
  }
};

#if defined(BATON_AVX512_BF16)
// Pairs of bfloat16 through vdpbf16ps, sums in float32. Dims and keys go in pairs; an odd last one has a zero beside it.
struct ComputeBF16 {
  typedef uint32_t elem;
  static constexpr int PAIR = 2;
  static constexpr bool ROUGH = true;
  static vf fma(vf acc, elem a, const elem* b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)_mm512_load_si512(b));
  }

  static void pack_row(const bf16* x, int n, elem* out, int padded) {
    for (int i = 0; i < padded; i += 16) _mm512_storeu_si512(out + i, load_pairs(x + 2 * i, n - 2 * i));
  }
  // rows [KB][dim] -> out [dim / 2][KB] of pairs of dims
  static void pack_keys(const bf16* const* rows, int n, int dim, elem* out) {
    const int pairs = (dim + 1) / 2;
    for (int j = 0; j < KB; j += 16)
      for (int d = 0; d < pairs; d += 16) {
        __m512i x[16];
        for (int i = 0; i < 16; ++i)
          x[i] = j + i < n ? load_pairs(rows[j + i] + 2 * d, dim - 2 * d) : _mm512_setzero_si512();
        transpose16(x);
        const int width = std::min(16, pairs - d);
        for (int c = 0; c < width; ++c) _mm512_store_si512(out + (long)(d + c) * KB + j, x[c]);
      }
  }
  // rows [KB][dim] -> out [KB / 2][padded] of pairs of keys
  static void pack_values(const bf16* const* rows, int n, int dim, int padded, elem* out) {
    for (int j = 0; j < KB; j += 2)
      for (int d = 0; d < padded; d += 32) {
        const __m512i zero = _mm512_setzero_si512();
        const __m512i x = j < n ? load_pairs(rows[j] + d, dim - d) : zero;
        const __m512i y = j + 1 < n ? load_pairs(rows[j + 1] + d, dim - d) : zero;
        elem* to = out + (long)(j / 2) * padded + d;
        _mm512_store_si512(to, interleave_low(x, y));
        if (d + 16 < padded) _mm512_store_si512(to + 16, interleave_high(x, y));
      }
  }
  static __m512i interleave_low(__m512i x, __m512i y) {  // x0 y0 x1 y1 ... of the first 16 values
    return _mm512_or_si512(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(x)),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(y)), 16));
  }
  static __m512i interleave_high(__m512i x, __m512i y) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1)),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(y, 1)), 16));
  }
  static void weights(const vf* p, elem* out) {
    for (int i = 0; i < KB / VL; i += 2)
      _mm512_store_si512(out + i * (VL / 2), (__m512i)_mm512_cvtne2ps_pbh((__m512)p[i + 1], (__m512)p[i]));
  }
};
#endif

// out[MR][N vectors] = (fresh ? 0 : out * factor[row]) + a[MR][steps] x b[steps][..]
template <class C, int N, bool fresh>
inline void multiply(const typename C::elem* a, long lda, const typename C::elem* b, long ldb, int steps,
                     const float* factor, float* out, long ldo) {
  vf acc[MR][N];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < N; ++c) acc[r][c] = fresh ? vf{} : load(out + r * ldo + c * VL) * factor[r];
  for (int s = 0; s < steps; ++s, b += ldb) {
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      const auto x = a[r * lda + s];
#pragma GCC unroll 4
      for (int c = 0; c < N; ++c) acc[r][c] = C::fma(acc[r][c], x, b + c * VL);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < N; ++c) store(out + r * ldo + c * VL, acc[r][c]);
}

// The two products for ROWS rows at a time, in registers of vectors.
template <class C>
struct Products {
  typedef typename C::elem elem;
  struct Unit {};  // what a thread holds while it multiplies
  static constexpr int ROWS = MR;
  static constexpr int STEPS = 1;  // keys have a multiple of so many steps
  static constexpr int TILE_ROWS = 192;  // about as many (token, head) rows share one packed tile of keys
  static constexpr int FEW_ROWS = C::PAIR == 1 ? 24 : 0;  // so many are not worth packing keys for

  // q [ROWS][width] x keys [steps][KB] -> s [ROWS][KB]
  static void scores(const elem* q, int width, const elem* keys, int steps, float* s) {
    for (int c = 0; c < KB; c += NV * VL) multiply<C, NV, true>(q, width, keys + c, KB, steps, nullptr, s + c, KB);
  }
  // out [ROWS][padded] = out * factor [ROWS] + p [ROWS][KB] x v [KB][padded]
  static void add_values(const elem* p, const elem* v, int padded, const float* factor, float* out) {
    constexpr int KEYS = KB / C::PAIR;
    int d = 0;
    for (; d + NV * VL <= padded; d += NV * VL)
      multiply<C, NV, false>(p, KEYS, v + d, padded, KEYS, factor, out + d, padded);
    for (; d < padded; d += VL) multiply<C, 1, false>(p, KEYS, v + d, padded, KEYS, factor, out + d, padded);
  }
};

#if defined(BATON_AMX)
// The same pairs through AMX.
struct ComputeAmx : ComputeBF16 {};

template <>
struct Products<ComputeAmx> {
  typedef ComputeAmx::elem elem;
  typedef AmxTiles Unit;
  static constexpr int ROWS = 2 * AMX_ROWS;
  static constexpr int STEPS = AMX_PAIRS;
  static constexpr int TILE_ROWS = 384;
  static constexpr int FEW_ROWS = 0;

  static void scores(const elem* q, int width, const elem* keys, int steps, float* s) {
    amx_fence();
    for (int c = 0; c < KB; c += 32) {
      amx_zero4();
      for (int t = 0; t < steps; t += AMX_PAIRS)
        amx_step4(q + t, width * 4l, keys + (long)t * KB + c, KB * 4l);
      amx_store4(s + c, KB * 4l);
    }
    amx_fence();
  }
  static void add_values(const elem* p, const elem* v, int padded, const float* factor, float* out) {
    for (int r = 0; r < ROWS; ++r)
      if (factor[r] != 1.0f)
        for (int d = 0; d < padded; d += VL) *(vf*)(out + (long)r * padded + d) *= factor[r];
    amx_fence();
    constexpr int KEYS = KB / 2;
    const long row = padded * 4l;
    int d = 0;
    for (; d + 32 <= padded; d += 32) {
      amx_load4(out + d, row);
      for (int t = 0; t < KEYS; t += AMX_PAIRS) amx_step4(p + t, KEYS * 4l, v + (long)t * padded + d, row);
      amx_store4(out + d, row);
    }
    if (d < padded) last_values(p, v, padded, d, out);
    amx_fence();
  }

  // A last tile of 16 columns at d.
  static void last_values(const elem* p, const elem* v, int padded, int d, float* out) {
    constexpr int KEYS = KB / 2;
    const long row = padded * 4l;
    float* bottom = out + (long)AMX_ROWS * padded + d;
    _tile_loadd(0, out + d, row);
    _tile_loadd(2, bottom, row);
    for (int t = 0; t < KEYS; t += AMX_PAIRS) {
      _tile_loadd(4, p + t, KEYS * 4l);
      _tile_loadd(5, p + AMX_ROWS * KEYS + t, KEYS * 4l);
      _tile_loadd(6, v + (long)t * padded + d, row);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
    }
    _tile_stored(0, out + d, row);
    _tile_stored(2, bottom, row);
  }
};
#endif

// The softmax's state of rows: largest scores so far, in units of log2, and the weights' sums, lane by lane.
struct RowStates {
  float* largest;
  vf* sum;
};

// Raw scores [ROWS][KB] -> what makes them units of log2, once they are in the order of those.
template <int ROWS>
inline float settle(const Attention& a, float* s) {
  const float unit = a.scale * LOG2E;
  if (a.softcap <= 0 && unit >= 0) return unit;
  for (int i = 0; i < ROWS * KB; i += VL) *(vf*)(s + i) = scaled(a, *(vf*)(s + i));
  return 1.0f;
}

// Hide the columns of a row of scores that are not in [low, high].
inline void hide(float* s, int low, int high) {
  vi column;
  for (int i = 0; i < VL; ++i) column[i] = i;
  for (int i = 0; i < KB; i += VL, column += VL) {
    vf* at = (vf*)(s + i);
    *at = select((column >= low) & (column <= high), *at, splat(NEG_INF));
  }
}

// Scores [ROWS][KB] of a tile, times `unit` -> weights; `factor` [ROWS] is for what was summed up before. Rows go side by side: what
// a row does with its largest score is done for a vector of rows, without a branch. SCALED: weights are given as multiples
// of the values' scales [KB].
template <class C, bool SCALED>
inline void soften(const float* s, float unit, RowStates state, const float* value_scales, typename C::elem* out,
                   float* factor) {
  constexpr int ROWS = Products<C>::ROWS, PADDED = (ROWS + VL - 1) / VL * VL, N = KB / VL;
  alignas(64) float tops[PADDED] = {}, before[PADDED] = {}, shift[PADDED], factors[PADDED];
  for (int r = 0; r < ROWS; ++r) {
    const vf* x = (const vf*)(s + r * KB);
    vf top = x[0];
    for (int i = 1; i < N; ++i) top = vmax(top, x[i]);
    tops[r] = largest(top);
    before[r] = state.largest[r];
  }
  for (int r = 0; r < PADDED; r += VL) {
    const vf old = *(vf*)(before + r), now = vmax(old, *(vf*)(tops + r) * unit);
    const vf base = select(now == splat(NEG_INF), vf{}, now);
    *(vf*)(factors + r) = select(old == now, splat(1.0f), exp2v<C::ROUGH>(old - base));
    *(vf*)(shift + r) = -base;
    *(vf*)(tops + r) = now;
  }
  for (int r = 0; r < ROWS; ++r) {
    const vf* from = (const vf*)(s + r * KB);
    const vf base = splat(shift[r]);
    vf x[N], total = vf{};
    for (int i = 0; i < N; ++i) total += x[i] = exp2v<C::ROUGH>(from[i] * unit + base);
    if constexpr (SCALED)
      for (int i = 0; i < N; ++i) x[i] *= *(const vf*)(value_scales + i * VL);
    C::weights(x, out + r * (KB / C::PAIR));
    state.sum[r] = state.sum[r] * factors[r] + total;
    state.largest[r] = tops[r];
    factor[r] = factors[r];
  }
}

// Keys and values as they lie in the pool.
template <class T>
struct PoolRows {
  static constexpr bool SCALED = false;
  static constexpr const float *key_scales = nullptr, *value_scales = nullptr;
  const int group, key_dim, value_dim;  // query heads per KV head; elements
  Head<T> head;

  PoolRows(const Attention& a, const Item& item)
      : group(a.num_heads / a.kv_heads), key_dim(a.k_dim), value_dim(a.v_dim), head(a, item.seq, item.head) {}

  void rows(long j, int n, const T** keys, const T** values) { head.rows(j, n, keys, values); }
};

// Rows: where keys and values come from.
template <class C, class T, class Rows = PoolRows<T>>
class Tile {
 public:
  typedef typename C::elem elem;

  Tile(const Attention& args, const Item& item, Scratch& scratch) : a(args), item(item), source(args, item) {
    group = source.group;
    count = (item.q1 - item.q0) * group;
    padded_count = (int)round_up(count, ROWS);
    steps = (int)round_up((source.key_dim + C::PAIR - 1) / C::PAIR, Products<C>::STEPS);
    width = (int)round_up(steps, 16);
    padded = (int)round_up(source.value_dim, VL);
    const size_t sizes[] = {(size_t)padded_count * width * 4, (size_t)steps * KB * 4, (size_t)KB / C::PAIR * padded * 4,
                            (size_t)padded_count * padded * 4, padded_count * sizeof(vf), padded_count * sizeof(float)};
    size_t bytes = 0;
    for (size_t size : sizes) bytes += round_up(size, 64);
    char* at = scratch.get<char>(bytes);
    void* parts[6];
    for (int i = 0; i < 6; ++i) parts[i] = at, at += round_up(sizes[i], 64);
    if (Products<C>::STEPS > 1) std::memset(parts[1], 0, sizes[1]);  // packing leaves the steps beyond key_dim alone
    q = (elem*)parts[0], keys = (elem*)parts[1], values = (elem*)parts[2], out = (float*)parts[3];
    state = {(float*)parts[5], (vf*)parts[4]};
    start = a.context_lens[item.seq] - (a.query_starts[item.seq + 1] - a.query_starts[item.seq]);
    tree = a.is_tree(item.seq);
  }

  void run() {
    [[maybe_unused]] const typename Products<C>::Unit unit;
    begin();
    const long last = start + item.q1 - 1, first = tree ? a.tree_starts[item.seq] : start + item.q0;
    const long low = a.window ? std::max<long>(0, first - a.window + 1) : 0;
    for (long j = low / KB * KB; j <= last; j += KB) {
      const int n = (int)std::min<long>(KB, last + 1 - j);
      const T *key_rows[KB], *value_rows[KB];
      source.rows(j, n, key_rows, value_rows);
      C::pack_keys(key_rows, n, source.key_dim, keys);
      C::pack_values(value_rows, n, source.value_dim, padded, values);
      for (int r = 0; r < padded_count; r += ROWS) rows_of(r, j);
    }
    finish();
  }

 private:
  static constexpr int ROWS = Products<C>::ROWS;

  const Attention& a;
  const Item& item;
  Rows source;
  int group, count, padded_count, steps, width, padded;
  long start;  // slot of the sequence's first new token
  bool tree;   // whether its new tokens are nodes of one
  elem *q, *keys, *values;
  float* out;
  RowStates state;

  long slot(int row) const { return start + item.q0 + row / group; }
  long token(int row) const { return a.query_starts[item.seq] + item.q0 + row / group; }

  // Hide the columns of a tile at j that a token of a tree does not see: what is before its window, and in the tree all
  // but its ancestors and itself. Of these the lowest bits are those farthest from it.
  void hide_others(float* s, long token, long j) const {
    const long root = a.tree_starts[item.seq];
    uint64_t seen = a.ancestors[token];
    if (a.window) {
      const long low = std::min(root, std::max<long>(0, a.depth_position(item.seq, token) - a.window + 1));
      hide(s, (int)std::max<long>(0, low - j), KB - 1);
      for (int count = __builtin_popcountll(seen); count > a.window; --count) seen &= seen - 1;
    }
    for (long column = std::max<long>(0, root - j); column < KB; ++column) {
      const long bit = j + column - root;
      if (bit > 63 || !(seen >> bit & 1)) s[column] = NEG_INF;
    }
  }

  void begin() {
    for (int r = 0; r < padded_count; ++r) {
      if (r < count) {
        const T* x = (const T*)a.q + token(r) * a.q_token + (long)(item.head * group + r % group) * a.q_head;
        C::pack_row(x, source.key_dim, q + (long)r * width, width);
      } else {
        std::memset(q + (long)r * width, 0, width * sizeof(elem));
      }
      const bool sink = a.sinks && r < count;
      state.largest[r] = sink ? a.sinks[item.head * group + r % group] * LOG2E : NEG_INF;
      state.sum[r] = vf{};
      if (sink) state.sum[r][0] = 1.0f;
    }
    std::memset(out, 0, (size_t)padded_count * padded * sizeof(float));
  }

  void rows_of(int r, long j) {
    const int end = std::min(r + ROWS, count);
    if (slot(end - 1) < j) return;
    if (!tree && a.window && slot(r) - a.window + 1 > j + KB - 1) return;
    alignas(64) float s[ROWS * KB];
    alignas(64) elem p[ROWS * (KB / C::PAIR)];
    float factor[ROWS];
    Products<C>::scores(q + (long)r * width, width, keys, steps, s);
    if constexpr (Rows::SCALED)
      for (int i = 0; i < ROWS * KB; i += VL) *(vf*)(s + i) *= *(const vf*)(source.key_scales + i % KB);
    const float unit = settle<ROWS>(a, s);
    if (tree)
      for (int i = 0; i < ROWS; ++i) hide_others(s + i * KB, token(std::min(r + i, count - 1)), j);
    else if (j + KB - 1 > slot(r) || (a.window && j < slot(end - 1) - a.window + 1))
      for (int i = 0; i < ROWS; ++i) {
        const long at = slot(std::min(r + i, count - 1));
        hide(s + i * KB, a.window ? (int)std::max<long>(0, at - a.window + 1 - j) : 0, (int)std::min<long>(KB - 1, at - j));
      }
    soften<C, Rows::SCALED>(s, unit, {state.largest + r, state.sum + r}, source.value_scales, p, factor);
    Products<C>::add_values(p, values, padded, factor, out + (long)r * padded);
  }

  void finish() {
    for (int r = 0; r < count; ++r) {
      const float total = sum(state.sum[r]), inverse = total > 0 ? 1.0f / total : 0.0f;
      T* to = (T*)a.out + (token(r) * a.num_heads + item.head * group + r % group) * source.value_dim;
      for (int d = 0; d < source.value_dim; d += VL)
        store_upto(to + d, *(const vf*)(out + (long)r * padded + d) * inverse, source.value_dim - d);
    }
  }
};

}  // namespace baton
