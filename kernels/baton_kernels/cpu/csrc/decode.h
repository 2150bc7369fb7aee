// The decode kernel: one new token, the few query heads that share a KV head, keys and values read once, in order.
// Bound by memory: rows are used as they lie in the pool, and the next tile is fetched while this one is worked on.
#pragma once
#include "paged_attention.h"

namespace baton {

// 2 VL elements as two vectors, in whichever order is cheapest: neighbours for 32-bit storage, even and odd elements for
// bfloat16 (a shift and a mask). Queries and outputs go through the same order, so it cancels out.
template <class T>
inline void load2(const T* x, long left, vf& a, vf& b) {
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
template <class T>
inline void store2(float* out, vf a, vf b, const T*) {
  store(out, a), store(out + VL, b);
}
inline void store2(float* out, vf a, vf b, const bf16*) {
  for (int i = 0; i < VL; ++i) out[2 * i] = a[i], out[2 * i + 1] = b[i];
}

#if defined(BATON_AVX512)
constexpr int WIDE_GROUP = 6;  // up to so many query heads, two chunks of outputs fit into registers
#else
constexpr int WIDE_GROUP = 2;
#endif

// Fetches a tile's keys and values a little at a time, in the order in which they lie: a block's keys of neighbouring
// heads are contiguous, so are its values, and long runs are what memory delivers fast.
template <class T>
class Ahead {
 public:
  // Positions from..to of an item's sequence, for its KV heads, to be fetched by `calls` calls of some().
  void begin(const Attention& args, const Item& item, long from, long to, long calls) {
    const Head<T> head(args, item.seq, item.head);
    a_ = &args, table_ = head.table, k_ = head.k, v_ = head.v, heads_ = item.heads;
    const long block = args.block_size;
    next_ = from < to ? from / block : 0, stop_ = from < to ? (to + block - 1) / block : 0;
    values_next_ = false, at_ = end_ = nullptr;
    lines_ = ((stop_ - next_) * (bytes(args.k_dim) + bytes(args.latent ? 0 : args.v_dim)) / 64 + calls) / calls;
  }

  // The tile of an item that begins at position j, or the first one of the item after it.
  void begin_tile(const Attention& args, const Item& item, const Item* next, long j, long calls) {
    if (j >= item.end && next)
      begin(args, *next, next->begin, std::min<long>(next->end, next->begin + KB), calls);
    else
      begin(args, item, j, std::min<long>(item.end, j + KB), calls);
  }

  void some(int calls = 1) {
    for (long i = 0; i < lines_ * calls; ++i, at_ += 64) {
      if (at_ >= end_ && !more()) return;
      __builtin_prefetch(at_, 0, 2);
    }
  }

 private:
  const Attention* a_;
  const int32_t* table_;
  const T *k_, *v_;
  const char *at_, *end_;
  long next_, stop_, lines_;
  int heads_;
  bool values_next_;

  long bytes(int dim) const { return (long)heads_ * a_->block_size * dim * (long)sizeof(T); }

  bool more() {
    if (next_ >= stop_) return false;
    const long block = table_[next_] * a_->block_stride;
    at_ = (const char*)((values_next_ ? v_ : k_) + block);
    end_ = at_ + bytes(values_next_ ? a_->v_dim : a_->k_dim);
    next_ += values_next_ || a_->latent;
    values_next_ = !values_next_ && !a_->latent;
    return true;
  }
};

// One token of one sequence, the KV heads of an item, its keys in tiles: all heads of a tile before the next tile, so that
// memory is read in long runs.
template <class T, int G>
class Decode {
 public:
  Decode(const Attention& args, const Item& item, Scratch& scratch) : a(args), item(item) {
    steps = (a.k_dim + 2 * VL - 1) / (2 * VL);
    chunks = (a.v_dim + 2 * VL - 1) / (2 * VL);
    const size_t queries = (size_t)2 * G * steps, outputs = (size_t)2 * G * chunks;
    const size_t states = (item.heads * sizeof(State) + sizeof(vf) - 1) / sizeof(vf);
    q = scratch.get<vf>(item.heads * (queries + outputs) + 2 * chunks + states);
    out = q + item.heads * queries;
    row = (float*)(out + item.heads * outputs);
    state = (State*)(row + 2 * VL * chunks);
  }

  // partials: null, or where to leave largest, sum and the unscaled output of each query head for merging. next: what
  // this thread will probably do after this, or null.
  void run(float* partials, const Item* next) {
    for (int h = 0; h < item.heads; ++h) begin(h);
    const T *keys[KB], *values[KB];
    Ahead<T> ahead;
    for (long j = item.begin; j < item.end; j += KB) {
      const int n = (int)std::min<long>(KB, item.end - j);
      ahead.begin_tile(a, item, next, j + n, (long)item.heads * round_up(n, VL));
      for (int h = 0; h < item.heads; ++h) {
        Head<T>(a, item.seq, item.head + h).rows(j, n, keys, values);
        tile(keys, values, n, h, ahead);
      }
    }
    for (int h = 0; h < item.heads; ++h) finish(h, partials ? partials + (long)h * G * (a.v_dim + 2) : nullptr);
  }

 private:
  struct State {
    float largest[G], sum[G];
  };

  const Attention& a;
  const Item& item;
  int steps, chunks;
  vf *q, *out;  // [heads][steps][2][G] and [heads][chunks][2][G]
  float* row;
  State* state;  // [heads]

  void begin(int h) {
    const long token = a.query_starts[item.seq];
    const bool sink = a.sinks && item.first;  // counted once where a decode is split
    vf *queries = q + (size_t)h * 2 * G * steps, *outputs = out + (size_t)h * 2 * G * chunks;
    for (int g = 0; g < G; ++g) {
      const int head = (item.head + h) * G + g;
      const T* x = (const T*)a.q + token * a.q_token + (long)head * a.q_head;
      for (int s = 0; s < steps; ++s)
        load2(x + s * 2 * VL, a.k_dim - s * 2 * VL, queries[s * 2 * G + g], queries[s * 2 * G + G + g]);
      state[h].largest[g] = sink ? a.sinks[head] * LOG2E : NEG_INF;
      state[h].sum[g] = sink ? 1.0f : 0.0f;
    }
    for (int i = 0; i < 2 * G * chunks; ++i) outputs[i] = vf{};
  }

  void tile(const T** keys, const T** values, int n, int h, Ahead<T>& ahead) {
    const vf* queries = q + (size_t)h * 2 * G * steps;
    alignas(64) float s[G][KB];
    for (int j = 0; j < n; j += VL) {
      vf parts[G][VL];
      for (int i = 0; i < VL; ++i) {
        ahead.some();
        const T* key = keys[j + i < n ? j + i : 0];
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
      for (int g = 0; g < G; ++g) *(vf*)(s[g] + j) = scaled(a, sums(parts[g]));
    }
    float factor[G];
    for (int g = 0; g < G; ++g) factor[g] = soften(s[g], n, state[h].largest[g], state[h].sum[g]);
    vf* outputs = out + (size_t)h * 2 * G * chunks;
    int c = 0;
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
    for (int i = 0; i < full; i += VL) {
      const vf p = exp2v<sizeof(T) == 2>(*(vf*)(s + i) - now);
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
  void add_values(const float (*p)[KB], const T** values, int n, const float* factor, int chunk, vf* outputs) const {
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

  void finish(int h, float* partial) {
    const long token = a.query_starts[item.seq];
    const vf* outputs = out + (size_t)h * 2 * G * chunks;
    for (int g = 0; g < G; ++g) {
      for (int c = 0; c < chunks; ++c)
        store2(row + c * 2 * VL, outputs[c * 2 * G + g], outputs[c * 2 * G + G + g], (const T*)nullptr);
      const float total = state[h].sum[g];
      if (partial) {
        float* to = partial + (long)g * (a.v_dim + 2);
        to[0] = state[h].largest[g], to[1] = total;
        std::memcpy(to + 2, row, a.v_dim * sizeof(float));
        continue;
      }
      const float inverse = total > 0 ? 1.0f / total : 0.0f;
      T* to = (T*)a.out + (token * a.num_heads + (item.head + h) * G + g) * a.v_dim;
      for (int d = 0; d < a.v_dim; d += VL) store_upto(to + d, load(row + d) * inverse, a.v_dim - d);
    }
  }
};

template <class T>
void decode(const Attention& a, const Item& item, const Item* next, Scratch& scratch, float* partials) {
  switch (a.num_heads / a.kv_heads) {
#define BATON_GROUP(G) \
  case G:              \
    return Decode<T, G>(a, item, scratch).run(partials, next);
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
