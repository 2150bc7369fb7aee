// Keys and values of a pool of another type than the queries', for the tile kernel: made to floats tile by tile.
//
// Numbers of int8 and fp8 are exact in all float types, and so are bfloat16's in float32; scales are applied to scores and
// weights instead, a factor per key. So nothing is rounded twice, and a tile is converted once for all rows that go over it.
#pragma once
#include "tile.h"

namespace baton {

template <class T, class S>
class StoredRows {
 public:
  static constexpr bool SCALED = Storage<S>::SCALED;
  const int group, key_dim, value_dim;
  alignas(64) float key_scales[KB], value_scales[KB];

  StoredRows(const Attention& a, const Item& item)
      : group(a.num_heads / a.kv_heads), key_dim(a.k_dim), value_dim(a.v_dim), head_(a, item.seq, item.head) {
    static thread_local Scratch scratch;
    key_row_ = round_up(key_dim, VL), value_row_ = round_up(value_dim, VL);
    keys_ = scratch.get<T>((size_t)KB * (key_row_ + value_row_)), values_ = keys_ + (size_t)KB * key_row_;
  }

  void rows(long j, int n, const T** keys, const T** values) {
    const S *from[KB], *of[KB];
    head_.rows(j, n, from, of);
    if constexpr (SCALED) head_.scales(j, n, key_scales, value_scales);
    for (int i = 0; i < n; ++i) {
      T *key = keys_ + i * key_row_, *value = values_ + i * value_row_;
      for (int d = 0; d < key_dim; d += VL) store(key + d, load_upto(from[i] + d, key_dim - d));
      for (int d = 0; d < value_dim; d += VL) store(value + d, load_upto(of[i] + d, value_dim - d));
      keys[i] = key, values[i] = value;
    }
  }

 private:
  Head<S> head_;
  long key_row_, value_row_;  // elements from row to row
  T *keys_, *values_;
};

}  // namespace baton
