// The decode kernel: one new token or a few, the few query heads that share a KV head, keys and values read once, in order.
// Bound by memory: rows are used as they lie in the pool, and the next tile is fetched while this one is worked on.
#pragma once
#include "ahead.h"

namespace baton {

// 2 VL elements as two vectors, in whichever order is cheapest: even and odd elements for bfloat16 (a shift and a mask),
// else neighbours. Queries and outputs go through the same order, so it cancels out.
template <class S>
inline void load2(const S* x, long left, vf& a, vf& b) {
  a = load_upto(x, left);
  b = left > VL ? load_upto(x + VL, left - VL) : vf{};
}
inline void load2(const bf16* x, long left, vf& a, vf& b) {
  vu pairs;
  if (left >= 2 * VL) {
    std::memcpy(&pairs, x, sizeof pairs);
  } else {
    pairs = vu{};
    std::memcpy(&pairs, x, left * sizeof(bf16));
  }
  a = (vf)(pairs << 16);
  b = (vf)(pairs & 0xffff0000u);
}
// Whether int8 is multiplied as it is: queries and weights become 16-bit integers, to 15 bits of the largest one, and
// products are summed in 32 bits. For models of 16 bits, whose own numbers have eight to eleven.
template <class T, class S>
constexpr bool whole() {
#if defined(BATON_WHOLE)
  return std::is_same_v<S, q8> && sizeof(T) == 2;
#else
  return false;
#endif
}
constexpr float WHOLE_MAX = 32767.0f;

// 2 VL floats in a row as the two vectors, and back.
template <class S>
inline void part2(const float* x, vf& a, vf& b, const S*) {
  a = load(x), b = load(x + VL);
}
inline void part2(const float* x, vf& a, vf& b, const bf16*) {
  for (int i = 0; i < VL; ++i) a[i] = x[2 * i], b[i] = x[2 * i + 1];
}
template <class S>
inline void join2(float* out, vf a, vf b, const S*) {
  store(out, a), store(out + VL, b);
}
inline void join2(float* out, vf a, vf b, const bf16*) {
  for (int i = 0; i < VL; ++i) out[2 * i] = a[i], out[2 * i + 1] = b[i];
}

#if defined(BATON_AVX512)
constexpr int WIDE_GROUP = 6;  // up to so many query heads, two chunks of outputs fit into registers
#else
constexpr int WIDE_GROUP = 2;
#endif

// An item's tokens of one sequence, its KV heads, its keys in tiles: all heads of a tile before the next tile, so that
// memory is read in long runs. T: of queries and outputs; S: of the pool; G: query heads per KV head, times tokens: rows
// that meet the same keys, those of a token side by side. PAIRS: of bfloat16 are multiplied, weights rounded to it.
template <class T, class S, int G, bool PAIRS>
class Decode {
 public:
  Decode(const Attention& args, const Item& item, Scratch& scratch)
      : a(args),
        item(item),
        group(args.num_heads / args.kv_heads),
        token(args.query_starts[item.seq] + item.q0),
        slot(args.context_lens[item.seq] - (args.query_starts[item.seq + 1] - token)) {
    steps = (a.k_dim + 2 * VL - 1) / (2 * VL);
    chunks = (a.v_dim + 2 * VL - 1) / (2 * VL);
    const size_t queries = (size_t)2 * G * steps, outputs = (size_t)2 * G * chunks;
    const size_t states = (item.heads * sizeof(State) + sizeof(vf) - 1) / sizeof(vf);
    const int parts = 2 * std::max(steps, chunks);
    q = scratch.get<vf>(item.heads * (queries + outputs) + parts + states);
    out = q + item.heads * queries;
    row = (float*)(out + item.heads * outputs);
    state = (State*)(row + VL * parts);
  }

  // partials: null, or where to leave largest, sum and the unscaled output of each row for merging. next: what
  // this thread will probably do after this, or null.
  void run(float* partials, const Item* next) {
    for (int h = 0; h < item.heads; ++h) begin(h);
    const S *keys[KB], *values[KB];
    Ahead<S> ahead;
    for (long j = item.begin; j < item.end; j += KB) {
      const int n = (int)std::min<long>(KB, item.end - j);
      ahead.begin_tile(a, item, next, j + n, (long)item.heads * round_up(n, VL));
      for (int h = 0; h < item.heads; ++h) {
        const Head<S> head(a, item.seq, item.head + h);
        head.rows(j, n, keys, values);
        if constexpr (Storage<S>::SCALED) head.scales(j, n, key_scales, value_scales);
        tile(keys, values, j, n, h, ahead);
      }
    }
    for (int h = 0; h < item.heads; ++h) finish(h, partials ? partials + (long)h * G * (a.v_dim + 2) : nullptr);
  }

 private:
  struct State {
    float largest[G], sum[G];
    float unit[G];  // of queries, where they are integers
  };

  const Attention& a;
  const Item& item;
  const int group;
  const long token, slot;  // of the first row
  int steps, chunks;
  vf *q, *out;  // [heads][steps][2][G] and [heads][chunks][2][G]
  float* row;
  State* state;  // [heads]
  alignas(64) float key_scales[KB], value_scales[KB];  // of a tile

  int head_of(int h, int g) const { return (item.head + h) * group + g % group; }
  long token_of(int g) const { return token + g / group; }

  void begin(int h) {
    const bool sink = a.sinks && item.first;  // counted once where a decode is split
    vf *queries = q + (size_t)h * 2 * G * steps, *outputs = out + (size_t)h * 2 * G * chunks;
    for (int g = 0; g < G; ++g) {
      const int head = head_of(h, g);
      const T* x = (const T*)a.q + token_of(g) * a.q_token + (long)head * a.q_head;
      for (int d = 0; d < 2 * VL * steps && !PAIRS; d += VL)
        store(row + d, d < a.k_dim ? load_upto(x + d, a.k_dim - d) : vf{});
      if constexpr (PAIRS)
        for (int s = 0; s < steps; ++s) queries[s * G + g] = (vf)load_pairs(x + s * 2 * VL, a.k_dim - s * 2 * VL);
      else if constexpr (whole<T, S>())
        state[h].unit[g] = this->whole_query(g, (int16_t*)queries);
      else
        for (int s = 0; s < steps; ++s)
          part2(row + s * 2 * VL, queries[s * 2 * G + g], queries[s * 2 * G + G + g], (const S*)nullptr);
      state[h].largest[g] = sink ? a.sinks[head] * LOG2E : NEG_INF;
      state[h].sum[g] = sink ? 1.0f : 0.0f;
    }
    for (int i = 0; i < 2 * G * chunks; ++i) outputs[i] = vf{};
  }

#if defined(BATON_WHOLE)
  // A query in `row` as integers [steps][G][2 VL]; returns their unit.
  float whole_query(int g, int16_t* to) const {
    float largest = 0;
    for (int d = 0; d < a.k_dim; ++d) largest = std::max(largest, std::fabs(row[d]));
    const float unit = largest > 0 ? largest / WHOLE_MAX : 1.0f;
    for (int s = 0; s < steps; ++s)
      for (int i = 0; i < 2 * VL; ++i) to[((long)s * G + g) * 2 * VL + i] = (int16_t)std::lrintf(row[s * 2 * VL + i] / unit);
    return unit;
  }

  // Scores of up to VL keys from j on, in the units of queries and keys. FULL: no step is of fewer than 2 VL numbers.
  template <bool FULL>
  void whole_scores(const S** keys, int j, int n, const int16_t* queries, vf* scores, Ahead<S>& ahead) const {
    vi parts[G][VL];
    for (int i = 0; i < VL; ++i) {
      ahead.some();
      const S* key = keys[j + i < n ? j + i : 0];
      vi acc[G] = {};
      for (int t = 0; t < steps; ++t) {
        const vs x = load_whole(key + t * 2 * VL, FULL ? 2 * VL : a.k_dim - t * 2 * VL);
        const vs* factors = (const vs*)queries + (long)t * G;
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) acc[g] = add_pair_products(acc[g], x, factors[g]);
      }
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) parts[g][i] = acc[g];
    }
    for (int g = 0; g < G; ++g) scores[g] = __builtin_convertvector(sums(parts[g]), vf);
  }

  // Weights of a tile as pairs of integers [KB / 2]; returns their unit, which is no number if one of them is none.
  static float whole_weights(const float* p, int n, uint32_t* to) {
    vf top = vf{}, total = vf{};
    const int full = (int)round_up(n, VL);
    for (int i = 0; i < full; i += VL) top = vmax(top, *(const vf*)(p + i)), total += *(const vf*)(p + i);
    const float all = sum(total), most = largest(top);
    if (!(all < std::numeric_limits<float>::infinity())) {
      std::memset(to, 0, full / 2 * sizeof *to);
      return all;
    }
    const float unit = most > 0 ? most / WHOLE_MAX : 1.0f, factor = 1.0f / unit;
    for (int i = 0; i < full; i += VL)
      *(vh*)((uint16_t*)to + i) =
          __builtin_convertvector(__builtin_convertvector(*(const vf*)(p + i) * factor + 0.5f, vi), vh);
    return unit;
  }

  // As add_values, of one chunk, with weights as pairs of integers.
  template <bool FULL>
  void add_whole(const uint32_t (*p)[KB / 2], const S** values, int n, const float* factor, const float* unit, int chunk,
                 vf* outputs) const {
    vi sums[2][G] = {};
    vf* at = outputs + (size_t)chunk * 2 * G;
    const long d = (long)chunk * 2 * VL, left = FULL ? 2 * VL : a.v_dim - d;
    for (int j = 0; j < n; j += 2) {
      vs low, high;
      const vs first = load_whole(values[j] + d, left);
      pair_up(first, j + 1 < n ? load_whole(values[j + 1] + d, left) : vs{}, low, high);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        const vs weight = (vs)((vu{} + p[g][j / 2]));
        sums[0][g] = add_pair_products(sums[0][g], low, weight);
        sums[1][g] = add_pair_products(sums[1][g], high, weight);
      }
    }
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      at[g] = at[g] * factor[g] + __builtin_convertvector(sums[0][g], vf) * unit[g];
      at[G + g] = at[G + g] * factor[g] + __builtin_convertvector(sums[1][g], vf) * unit[g];
    }
  }
#endif

#if defined(BATON_AVX512_BF16)
  // Scores of up to VL keys from j on.
  void pair_scores(const S** keys, int j, int n, const vf* queries, vf* scores, Ahead<S>& ahead) const {
    vf parts[G][VL];
    for (int i = 0; i < VL; ++i) {
      ahead.some();
      const S* key = keys[j + i < n ? j + i : 0];
      __m512 acc[G] = {};
      for (int t = 0; t < steps; ++t) {
        const __m512bh x = (__m512bh)load_pairs(key + t * 2 * VL, a.k_dim - t * 2 * VL);
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) acc[g] = _mm512_dpbf16_ps(acc[g], x, (__m512bh)queries[t * G + g]);
      }
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) parts[g][i] = (vf)acc[g];
    }
    for (int g = 0; g < G; ++g) scores[g] = sums(parts[g]);
  }

  // As add_values, with pairs of weights.
  template <int C>
  void add_pairs(const uint32_t (*p)[KB / 2], const S** values, int n, const float* factor, int chunk,
                 vf* outputs) const {
    __m512 sums[C][2][G];
    vf* at = outputs + (size_t)chunk * 2 * G;
    const long d = (long)chunk * 2 * VL, left = a.v_dim - d;
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g)
        for (int half = 0; half < 2; ++half) sums[c][half][g] = (__m512)(at[(c * 2 + half) * G + g] * factor[g]);
    for (int j = 0; j < n; j += 2) {
      __m512bh low[C], high[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        const long from = d + c * 2 * VL, some = left - c * 2 * VL;
        const __m512i first = load_pairs(values[j] + from, some);
        const __m512i second = j + 1 < n ? load_pairs(values[j + 1] + from, some) : __m512i{};
        low[c] = (__m512bh)_mm512_unpacklo_epi16(first, second);
        high[c] = (__m512bh)_mm512_unpackhi_epi16(first, second);
      }
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        const __m512bh weight = (__m512bh)_mm512_set1_epi32((int)p[g][j / 2]);
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
          sums[c][0][g] = _mm512_dpbf16_ps(sums[c][0][g], weight, low[c]);
          sums[c][1][g] = _mm512_dpbf16_ps(sums[c][1][g], weight, high[c]);
        }
      }
    }
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g)
        for (int half = 0; half < 2; ++half) at[(c * 2 + half) * G + g] = (vf)sums[c][half][g];
  }
#endif

  // Hide from rows of scores the keys j to j + n that their tokens do not see.
  void hide_others(float (*s)[KB], long j, int n) const {
    for (int g = 0; g < G; ++g) {
      const long at = slot + g / group - j, low = a.window ? at - a.window + 1 : 0;
      for (long i = 0; i < std::min<long>(low, n); ++i) s[g][i] = NEG_INF;
      for (long i = std::max<long>(0, at + 1); i < n; ++i) s[g][i] = NEG_INF;
    }
  }

  // Keys `begin` to begin + n.
  void tile(const S** keys, const S** values, long begin, int n, int h, Ahead<S>& ahead) {
    const vf* queries = q + (size_t)h * 2 * G * steps;
    alignas(64) float s[G][KB];
    for (int j = 0; j < n; j += VL) {
#if defined(BATON_AVX512_BF16)
      if constexpr (PAIRS) {
        vf scores[G];
        pair_scores(keys, j, n, queries, scores, ahead);
        for (int g = 0; g < G; ++g) *(vf*)(s[g] + j) = scaled(a, scores[g]);
        continue;
      }
#endif
#if defined(BATON_WHOLE)
      if constexpr (whole<T, S>()) {
        vf scores[G];
        if (a.k_dim % (2 * VL))
          whole_scores<false>(keys, j, n, (const int16_t*)queries, scores, ahead);
        else
          whole_scores<true>(keys, j, n, (const int16_t*)queries, scores, ahead);
        for (int g = 0; g < G; ++g)
          *(vf*)(s[g] + j) = scaled(a, scores[g] * state[h].unit[g] * *(vf*)(key_scales + j));
        continue;
      }
#endif
      vf parts[G][VL];
      for (int i = 0; i < VL; ++i) {
        ahead.some();
        const S* key = keys[j + i < n ? j + i : 0];
        vf acc[G] = {};
        for (int t = 0; t < steps; ++t) {
          vf x, y;
          load2(key + t * 2 * VL, a.k_dim - t * 2 * VL, x, y);
          const vf* factors = queries + t * 2 * G;
#pragma GCC unroll 8
          for (int g = 0; g < G; ++g) acc[g] += x * factors[g], acc[g] += y * factors[G + g];
        }
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) parts[g][i] = acc[g];
      }
      for (int g = 0; g < G; ++g) {
        vf score = sums(parts[g]);
        if constexpr (Storage<S>::SCALED) score *= *(vf*)(key_scales + j);
        *(vf*)(s[g] + j) = scaled(a, score);
      }
    }
    const long last = slot + item.tokens() - 1;
    if (begin + n - 1 > slot || (a.window && begin <= last - a.window)) hide_others(s, begin, n);
    float factor[G];
    for (int g = 0; g < G; ++g) factor[g] = soften(s[g], n, state[h].largest[g], state[h].sum[g]);
    if constexpr (Storage<S>::SCALED)
      for (int g = 0; g < G; ++g)
        for (int j = 0; j < n; j += VL) *(vf*)(s[g] + j) *= *(vf*)(value_scales + j);
    vf* outputs = out + (size_t)h * 2 * G * chunks;
    int c = 0;
#if defined(BATON_AVX512_BF16)
    if constexpr (PAIRS) {
      alignas(64) uint32_t p[G][KB / 2];
      for (int g = 0; g < G; ++g)
        for (int j = 0; j < n; j += VL) store((bf16*)p[g] + j, *(vf*)(s[g] + j));
      if (G <= WIDE_GROUP)
        for (; c + 2 <= chunks; c += 2) add_pairs<2>(p, values, n, factor, c, outputs);
      for (; c < chunks; ++c) add_pairs<1>(p, values, n, factor, c, outputs);
      return;
    }
#endif
#if defined(BATON_WHOLE)
    if constexpr (whole<T, S>()) {
      alignas(64) uint32_t p[G][KB / 2];
      float unit[G];
      for (int g = 0; g < G; ++g) unit[g] = whole_weights(s[g], n, p[g]);
      for (; c < chunks; ++c)
        if (a.v_dim - c * 2 * VL < 2 * VL)
          add_whole<false>(p, values, n, factor, unit, c, outputs);
        else
          add_whole<true>(p, values, n, factor, unit, c, outputs);
      return;
    }
#endif
    if (G <= WIDE_GROUP)
      for (; c + 2 <= chunks; c += 2) add_values<2>(s, values, n, factor, c, outputs);
    for (; c < chunks; ++c) add_values<1>(s, values, n, factor, c, outputs);
  }

  static float soften(float* s, int n, float& largest_so_far, float& sum_so_far) {
    const int full = (int)round_up(n, VL);
    for (int i = n; i < full; ++i) s[i] = NEG_INF;
    vf top = splat(NEG_INF), total = vf{};
    for (int i = 0; i < full; i += VL) top = vmax(top, *(vf*)(s + i));
    const float before = largest_so_far, now = std::max(before, largest(top));
    const float base = now == NEG_INF ? 0.0f : now;  // a token may see none of these keys
    for (int i = 0; i < full; i += VL) {
      const vf p = exp2v<sizeof(T) == 2>(*(vf*)(s + i) - base);
      total += p;
      *(vf*)(s + i) = p;
    }
    const float factor = before == now ? 1.0f : exp2f(before - now);
    largest_so_far = now;
    sum_so_far = sum_so_far * factor + sum(total);
    return factor;
  }

  // Chunks `chunk` to chunk + C of the outputs; more than one at a time so that sums needn't wait for each other.
  template <int C>
  void add_values(const float (*p)[KB], const S** values, int n, const float* factor, int chunk, vf* outputs) const {
    vf sums[C][2][G], *at = outputs + (size_t)chunk * 2 * G;
    const long d = (long)chunk * 2 * VL, left = a.v_dim - d;
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g)
        sums[c][0][g] = at[c * 2 * G + g] * factor[g], sums[c][1][g] = at[c * 2 * G + G + g] * factor[g];
    for (int j = 0; j < n; ++j) {
      vf v[C], w[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) load2(values[j] + d + c * 2 * VL, left - c * 2 * VL, v[c], w[c]);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        const vf weight = splat(p[g][j]);
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) sums[c][0][g] += weight * v[c], sums[c][1][g] += weight * w[c];
      }
    }
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) at[c * 2 * G + g] = sums[c][0][g], at[c * 2 * G + G + g] = sums[c][1][g];
  }

  // 2 VL outputs in a row, of the two vectors that they are summed in.
  static void join_outputs(float* to, vf x, vf y) {
    if constexpr (!PAIRS && !whole<T, S>()) return join2(to, x, y, (const S*)nullptr);
    for (int i = 0; i < VL; ++i) to[i / 4 * 8 + i % 4] = x[i], to[i / 4 * 8 + 4 + i % 4] = y[i];
  }

  void finish(int h, float* partial) {
    const vf* outputs = out + (size_t)h * 2 * G * chunks;
    for (int g = 0; g < G; ++g) {
      for (int c = 0; c < chunks; ++c)
        join_outputs(row + c * 2 * VL, outputs[c * 2 * G + g], outputs[c * 2 * G + G + g]);
      const float total = state[h].sum[g];
      if (partial) {
        float* to = partial + (long)g * (a.v_dim + 2);
        to[0] = state[h].largest[g], to[1] = total;
        std::memcpy(to + 2, row, a.v_dim * sizeof(float));
        continue;
      }
      const float inverse = total > 0 ? 1.0f / total : 0.0f;
      T* to = (T*)a.out + (token_of(g) * a.num_heads + head_of(h, g)) * a.v_dim;
      for (int d = 0; d < a.v_dim; d += VL) store_upto(to + d, load(row + d) * inverse, a.v_dim - d);
    }
  }
};

template <class T, class S, bool PAIRS>
void decode(const Attention& a, const Item& item, const Item* next, Scratch& scratch, float* partials) {
  switch (a.num_heads / a.kv_heads * item.tokens()) {
#define BATON_GROUP(G) \
  case G:              \
    return Decode<T, S, G, PAIRS>(a, item, scratch).run(partials, next);
    BATON_GROUP(1)
    BATON_GROUP(2)
    BATON_GROUP(3)
    BATON_GROUP(4)
    BATON_GROUP(5)
    BATON_GROUP(6)
    BATON_GROUP(7)
    BATON_GROUP(8)
#undef BATON_GROUP
  }
}

}  // namespace baton
