// Attention of a ragged batch over a paged KV pool: what the kernels (tile.h, decode.h) share.
#pragma once
#include <algorithm>
#include <vector>

#include "storage.h"
#include "../team.h"

namespace baton {

constexpr int KB = 64;          // keys per tile
constexpr int MAX_GROUP = 8;    // rows (query heads of a KV head, times tokens) that the decode kernel takes at a time

// The arguments of one call; laid out as the ctypes structure of the same name. Sizes and strides in elements.
struct Attention {
  const void *q, *k, *v;
  void *k_pool, *v_pool, *out;
  const float* sinks;  // [num_heads] or null
  const int32_t *query_starts, *context_lens, *block_tables;
  const float *cos, *sin;        // [positions, rotary / 2] or null: q and k are rotated already
  const void *q_norm, *k_norm;   // [k_dim] or null: RMS norm of each head before the rotation
  // Null, or what heads' keys and values are made of out of latents: [num_heads][nope][v_dim], [num_heads][v_dim][up_dim].
  // Queries are those of expanded heads then, and the results too: [tokens][num_heads][up_dim].
  const void *key_up, *value_up;
  // int8: bfloat16 [blocks][kv_heads][block_size], `scale_stride` from block to block. fp8: float [kv_heads]. Else null.
  const void *k_scales, *v_scales;
  // Null, or of tokens that are nodes of a tree: [tokens] bits of the slots that each sees from `tree_starts` [num_seqs] of
  // its sequence on, its own among them; 0: in no tree. All new tokens of a sequence are in a tree, or none is.
  const uint64_t* ancestors;
  const int32_t* tree_starts;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides
  int64_t block_stride, table_stride, scale_stride;
  int32_t dtype, num_seqs, num_heads, kv_heads, k_dim, v_dim, block_size, window, rotary, threads;
  int32_t pairs;  // multiply pairs of bfloat16 (vdpbf16ps) rather than float32: where that is faster
  float scale, softcap, norm_eps, norm_offset;
  int32_t amx;     // multiply bfloat16 in AMX's tiles
  int32_t latent;  // one KV head whose values are the first v_dim elements of its keys: v_pool is k_pool, v is not read
  int32_t rotate_pairs;  // neighbours are turned against each other, not the two halves of the rotary dims
  int32_t nope, up_dim;  // of expanded heads: elements of a key before its rotary part, and of a value
  int32_t storage;  // what lies in the pool: a dtype's number, or 3: int8, 4: fp8 e4m3

  // Elements from a value to the next one of its head.
  long v_row() const { return latent ? k_dim : v_dim; }
  // Whether a sequence's new tokens are nodes of a tree.
  bool is_tree(int seq) const { return ancestors && ancestors[query_starts[seq]]; }
  // Position in a tree, by depth: ancestors are all those before a token.
  long depth_position(int seq, long token) const {
    return tree_starts[seq] + __builtin_popcountll(ancestors[token]) - 1;
  }
};

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
