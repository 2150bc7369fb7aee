// Attention of a ragged batch over a paged KV pool: what the kernels (tile.h, decode.h) share.
#pragma once
#include <algorithm>
#include <vector>

#include "storage.h"
#include "../operators.h"
#include "../team.h"

namespace baton {

constexpr int KB = 64;          // keys per tile
constexpr int MAX_GROUP = 8;    // rows (query heads of a KV head, times tokens) that the decode kernel takes at a time

// One KV head of one sequence, whose pool holds elements of type S.
template <class S>
struct Head {
  const Attention& a;
  const int32_t* table;
  const S *k, *v;
  const int head;

  Head(const Attention& args, int seq, int head)
      : a(args),
        table(args.block_tables + seq * args.table_stride),
        k((const S*)args.k_pool + (long)head * args.block_size * args.k_dim),
        v((const S*)args.v_pool + (long)head * args.block_size * args.v_dim),
        head(head) {}

  // Rows of n keys and values from position j on.
  void rows(long j, int n, const S** keys, const S** values) const {
    int i = 0;
    while (i < n) {
      const long block = (j + i) / a.block_size, offset = (j + i) % a.block_size;
      const int run = (int)std::min<long>(n - i, a.block_size - offset);
      const S* key = k + table[block] * a.block_stride + offset * a.k_dim;
      const S* value = v + table[block] * a.block_stride + offset * a.v_row();
      for (int r = 0; r < run; ++r, ++i) {
        keys[i] = key + (long)r * a.k_dim;
        values[i] = value + r * a.v_row();
      }
    }
  }

  // Scales of n keys and values from position j on, 0 behind them: float [KB] each.
  void scales(long j, int n, float* of_keys, float* of_values) const {
    for (int i = n; i < KB; ++i) of_keys[i] = of_values[i] = 0;
    if constexpr (Storage<S>::PER_HEAD) {
      const float by_key = ((const float*)a.k_scales)[head], by_value = ((const float*)a.v_scales)[head];
      for (int i = 0; i < n; ++i) of_keys[i] = by_key, of_values[i] = by_value;
    } else {
      for (int i = 0; i < n;) {
        const long block = (j + i) / a.block_size, offset = (j + i) % a.block_size;
        const int run = (int)std::min<long>(n - i, a.block_size - offset);
        const long at = table[block] * a.scale_stride + (long)head * a.block_size + offset;
        const bf16 *by_key = (const bf16*)a.k_scales + at, *by_value = (const bf16*)a.v_scales + at;
        for (int r = 0; r < run; ++r, ++i) of_keys[i] = as_float(by_key[r]), of_values[i] = as_float(by_value[r]);
      }
    }
  }
};

// Scores come in as raw dot products; out they are in units of log2, ready for exp2.
inline vf scaled(const Attention& a, vf s) {
  if (a.softcap > 0) return tanhv(s * (a.scale / a.softcap)) * (a.softcap * LOG2E);
  return s * (a.scale * LOG2E);
}

// Part of the work: query tokens q0 to q1 of one head of a sequence (a tile), or of some heads over keys begin to end (a
// decode, of few tokens). `part`: -1, or the row where the partial results of a decode that is split over keys begin.
struct Item {
  int32_t seq, head, heads, q0, q1, begin, end, part;
  bool first;
  int64_t cost;

  int tokens() const { return q1 - q0; }
};

}  // namespace baton
