// Attention of a ragged batch over a paged KV pool: what the kernels (tile.h, decode.h) share.
#pragma once
#include <algorithm>
#include <vector>

#include "team.h"
#include "vec.h"

namespace baton {

constexpr int KB = 64;          // keys per tile
constexpr int MAX_GROUP = 8;    // query heads per KV head that the decode kernel takes; more go through tiles

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
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides
  int64_t block_stride, table_stride;
  int32_t dtype, num_seqs, num_heads, kv_heads, k_dim, v_dim, block_size, window, rotary, threads;
  int32_t pairs;  // multiply pairs of bfloat16 (vdpbf16ps) rather than float32: where that is faster
  float scale, softcap, norm_eps, norm_offset;
  int32_t amx;     // multiply bfloat16 in AMX's tiles
  int32_t latent;  // one KV head whose values are the first v_dim elements of its keys: v_pool is k_pool, v is not read
  int32_t rotate_pairs;  // neighbours are turned against each other, not the two halves of the rotary dims
  int32_t nope, up_dim;  // of expanded heads: elements of a key before its rotary part, and of a value

  // Elements from a value to the next one of its head.
  long v_row() const { return latent ? k_dim : v_dim; }
};

// One KV head of one sequence.
template <class T>
struct Head {
  const Attention& a;
  const int32_t* table;
  const T *k, *v;

  Head(const Attention& args, int seq, int head)
      : a(args),
        table(args.block_tables + seq * args.table_stride),
        k((const T*)args.k_pool + (long)head * args.block_size * args.k_dim),
        v((const T*)args.v_pool + (long)head * args.block_size * args.v_dim) {}

  // Rows of n keys and values from position j on.
  void rows(long j, int n, const T** keys, const T** values) const {
    int i = 0;
    while (i < n) {
      const long block = (j + i) / a.block_size, offset = (j + i) % a.block_size;
      const int run = (int)std::min<long>(n - i, a.block_size - offset);
      const T* key = k + table[block] * a.block_stride + offset * a.k_dim;
      const T* value = v + table[block] * a.block_stride + offset * a.v_row();
      for (int r = 0; r < run; ++r, ++i) {
        keys[i] = key + (long)r * a.k_dim;
        values[i] = value + r * a.v_row();
      }
    }
  }
};

// Scores come in as raw dot products; out they are in units of log2, ready for exp2.
inline vf scaled(const Attention& a, vf s) {
  if (a.softcap > 0) return tanhv(s * (a.scale / a.softcap)) * (a.softcap * LOG2E);
  return s * (a.scale * LOG2E);
}

// Part of the work: query tokens q0 to q1 of one head of a sequence (a tile), or one decode over keys begin to end of
// some heads. `part`: -1, or where the partial results of a decode that is split over keys begin.
struct Item {
  int32_t seq, head, heads, q0, q1, begin, end, part;
  bool first;
  int64_t cost;
};

}  // namespace baton
