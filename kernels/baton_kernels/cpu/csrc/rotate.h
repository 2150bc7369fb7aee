// Stores new keys and values into the pool; on the way, where asked for, RMS norm of each head and rotary embedding.
#pragma once
#include "paged_attention.h"

namespace baton {

// out = rotate(norm(x)); `half`: the two halves of the first `rotary` dims are turned against each other.
template <class T>
inline void rotate_head(const Attention& a, const T* x, const T* weight, long position, float* work, T* out) {
  const int dim = a.k_dim, half = a.rotary / 2;
  for (int d = 0; d < dim; d += VL) store_upto(work + d, load_upto(x + d, dim - d), dim - d);
  if (weight) {
    vf squares = vf{};
    for (int d = 0; d < dim; d += VL) {
      const vf v = load_upto(work + d, dim - d);
      squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / dim + a.norm_eps);
    for (int d = 0; d < dim; d += VL) {
      const vf w = load_upto(weight + d, dim - d) + a.norm_offset;
      store_upto(work + d, load_upto(work + d, dim - d) * scale * w, dim - d);
    }
  }
  const float *cos = a.cos + position * half, *sin = a.sin + position * half;
  for (int d = 0; d < half; d += VL) {
    const int left = half - d;
    const vf c = load_upto(cos + d, left), s = load_upto(sin + d, left);
    const vf x0 = load_upto(work + d, left), x1 = load_upto(work + half + d, left);
    store_upto(out + d, x0 * c - x1 * s, left);
    store_upto(out + half + d, x1 * c + x0 * s, left);
  }
  for (int d = a.rotary; d < dim; d += VL) store_upto(out + d, load_upto(work + d, dim - d), dim - d);
}

// One new token: its keys and values to the pool, its queries, if they are to be rotated, in place.
template <class T>
inline void write_token(const Attention& a, int seq, long token, long position, float* work) {
  const long block = a.block_tables[seq * a.table_stride + position / a.block_size], offset = position % a.block_size;
  for (int h = 0; h < a.kv_heads; ++h) {
    T* k = (T*)a.k_pool + block * a.block_stride + ((long)h * a.block_size + offset) * a.k_dim;
    T* v = (T*)a.v_pool + block * a.block_stride + ((long)h * a.block_size + offset) * a.v_dim;
    const T* x = (const T*)a.k + token * a.k_token + h * a.k_head;
    if (a.cos)
      rotate_head(a, x, (const T*)a.k_norm, position, work, k);
    else
      std::memcpy(k, x, a.k_dim * sizeof(T));
    std::memcpy(v, (const T*)a.v + token * a.v_token + h * a.v_head, a.v_dim * sizeof(T));
  }
  if (!a.cos) return;
  for (int h = 0; h < a.num_heads; ++h) {
    T* x = (T*)a.q + token * a.q_token + h * a.q_head;
    rotate_head(a, x, (const T*)a.q_norm, position, work, x);
  }
}

}  // namespace baton
