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

template <class T, int G>
class Decode {
 public:
  Decode(const Attention& args, const Item& item, Scratch& scratch) : a(args), item(item), head(args, item.seq, item.head) {
    steps = (a.k_dim + 2 * VL - 1) / (2 * VL);
    chunks = (a.v_dim + 2 * VL - 1) / (2 * VL);
    q = scratch.get<vf>((size_t)2 * G * (steps + chunks) + 2 * chunks);
    out = q + (size_t)2 * G * steps;
    row = (float*)(out + (size_t)2 * G * chunks);
  }

  // partial: null, or where to leave largest, sum and the unscaled output of each head for merging.
  void run(float* partial) {
    begin();
    const T *keys[2][KB], *values[2][KB];
    int n = (int)std::min<long>(KB, item.end - item.begin), now = 0;
    head.rows(item.begin, n, keys[0], values[0]);
    for (long j = item.begin; j < item.end; j += KB) {
      const int next = (int)std::max<long>(0, std::min<long>(KB, item.end - j - KB));
      if (next) head.rows(j + KB, next, keys[now ^ 1], values[now ^ 1]);
      tile(keys[now], values[now], n, keys[now ^ 1], values[now ^ 1], next);
      n = next, now ^= 1;
    }
    finish(partial);
  }

 private:
  const Attention& a;
  const Item& item;
  Head<T> head;
  int steps, chunks;
  vf *q, *out;  // [steps][2][G] and [chunks][2][G]
  float* row;
  float largest_[G], sum_[G];

  void begin() {
    const long token = a.query_starts[item.seq];
    const bool sink = a.sinks && item.first;  // counted once where a decode is split
    for (int g = 0; g < G; ++g) {
      const T* x = (const T*)a.q + token * a.q_token + (long)(item.head * G + g) * a.q_head;
      for (int s = 0; s < steps; ++s)
        load2(x + s * 2 * VL, a.k_dim - s * 2 * VL, q[s * 2 * G + g], q[s * 2 * G + G + g]);
      largest_[g] = sink ? a.sinks[item.head * G + g] * LOG2E : NEG_INF;
      sum_[g] = sink ? 1.0f : 0.0f;
    }
    for (int i = 0; i < 2 * G * chunks; ++i) out[i] = vf{};
  }

  static void prefetch(const T* row, int dim) {
    for (long at = 0; at < dim * (long)sizeof(T); at += 64) __builtin_prefetch((const char*)row + at, 0, 3);
  }

  void tile(const T** keys, const T** values, int n, const T** next_keys, const T** next_values, int next) {
    alignas(64) float s[G][KB];
    for (int j = 0; j < n; j += VL) {
      vf parts[G][VL];
      for (int i = 0; i < VL; ++i) {
        if (j + i < next) prefetch(next_keys[j + i], a.k_dim);
        const T* key = keys[j + i < n ? j + i : 0];
        vf acc[G] = {};
        for (int t = 0; t < steps; ++t) {
          vf x, y;
          load2(key + t * 2 * VL, a.k_dim - t * 2 * VL, x, y);
          const vf* factors = q + t * 2 * G;
#pragma GCC unroll 8
          for (int g = 0; g < G; ++g) acc[g] += x * factors[g], acc[g] += y * factors[G + g];
        }
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) parts[g][i] = acc[g];
      }
      for (int g = 0; g < G; ++g) *(vf*)(s[g] + j) = scaled(a, sums(parts[g]));
    }
    float factor[G];
    for (int g = 0; g < G; ++g) factor[g] = soften(s[g], n, g);
    for (int i = 0; i < next; ++i) prefetch(next_values[i], a.v_dim);
    for (int c = 0; c < chunks; ++c) add_values(s, values, n, factor, c);
  }

  float soften(float* s, int n, int g) {
    const int full = (int)round_up(n, VL);
    for (int i = n; i < full; ++i) s[i] = NEG_INF;
    vf top = splat(NEG_INF), total = vf{};
    for (int i = 0; i < full; i += VL) top = vmax(top, *(vf*)(s + i));
    const float before = largest_[g], now = std::max(before, largest(top));
    for (int i = 0; i < full; i += VL) {
      const vf p = exp2v<sizeof(T) == 2>(*(vf*)(s + i) - now);
      total += p;
      *(vf*)(s + i) = p;
    }
    const float factor = before == now ? 1.0f : exp2f(before - now);
    largest_[g] = now;
    sum_[g] = sum_[g] * factor + sum(total);
    return factor;
  }

  void add_values(const float (*p)[KB], const T** values, int n, const float* factor, int chunk) {
    vf x[G], y[G], *at = out + (size_t)chunk * 2 * G;
    const long d = (long)chunk * 2 * VL, left = a.v_dim - d;
    for (int g = 0; g < G; ++g) x[g] = at[g] * factor[g], y[g] = at[G + g] * factor[g];
    for (int j = 0; j < n; ++j) {
      vf v, w;
      load2(values[j] + d, left, v, w);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        const vf weight = splat(p[g][j]);
        x[g] += weight * v, y[g] += weight * w;
      }
    }
    for (int g = 0; g < G; ++g) at[g] = x[g], at[G + g] = y[g];
  }

  void finish(float* partial) {
    const long token = a.query_starts[item.seq];
    for (int g = 0; g < G; ++g) {
      for (int c = 0; c < chunks; ++c)
        store2(row + c * 2 * VL, out[c * 2 * G + g], out[c * 2 * G + G + g], (const T*)nullptr);
      if (partial) {
        float* to = partial + (long)g * (a.v_dim + 2);
        to[0] = largest_[g], to[1] = sum_[g];
        std::memcpy(to + 2, row, a.v_dim * sizeof(float));
        continue;
      }
      const float inverse = sum_[g] > 0 ? 1.0f / sum_[g] : 0.0f;
      T* to = (T*)a.out + (token * a.num_heads + item.head * G + g) * a.v_dim;
      for (int d = 0; d < a.v_dim; d += VL) store_upto(to + d, load(row + d) * inverse, a.v_dim - d);
    }
  }
};

template <class T>
void decode(const Attention& a, const Item& item, Scratch& scratch, float* partial) {
  switch (a.num_heads / a.kv_heads) {
#define BATON_GROUP(G) \
  case G:              \
    return Decode<T, G>(a, item, scratch).run(partial);
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
