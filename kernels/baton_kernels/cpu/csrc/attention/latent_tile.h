// Keys and values of one head, made of the latents in the pool tile by tile (multi-head latent attention, expanded).
//
// For many query rows this takes fewer operations than attending over the latents themselves: a tile is made once for
// all rows of an item, and its keys and values are a fraction of a latent's length. Nothing but a tile is ever there.
#pragma once
#include "tile.h"

namespace baton {

constexpr int LEAST_ROWS = 512;     // of an item: fewer make a tile's expansion dearer than a thread that waits
constexpr int MOST_ROWS = 4096;     // of an item: bounds what a thread keeps of queries and outputs

template <class C, class T>
class ExpandedRows {
 public:
  typedef typename C::elem elem;
  static constexpr int group = 1;
  static constexpr bool SCALED = false;
  static constexpr const float *key_scales = nullptr, *value_scales = nullptr;
  const int key_dim, value_dim;

  ExpandedRows(const Attention& args, const Item& item)
      : key_dim(args.nope + args.k_dim - args.v_dim), value_dim(args.up_dim), a(args), latents(args, item.seq, 0) {
    steps = (int)round_up((a.v_dim + C::PAIR - 1) / C::PAIR, Products<C>::STEPS);
    width = (int)round_up(steps, 16);
    panel = round_up(a.v_dim, KB) / C::PAIR * KB;
    const int key_panels = (a.nope + KB - 1) / KB, value_panels = (a.up_dim + KB - 1) / KB;
    const size_t sizes[] = {(size_t)(key_panels + value_panels) * panel * sizeof(elem),
                            (size_t)round_up(KB, ROWS) * width * sizeof(elem), (size_t)KB * key_dim * sizeof(T),
                            (size_t)KB * value_dim * sizeof(T)};
    size_t bytes = 0;
    for (size_t size : sizes) bytes += round_up(size, 64);
    static thread_local Scratch scratch;
    char* at = scratch.get<char>(bytes);
    char* parts[4];
    for (int i = 0; i < 4; ++i) parts[i] = at, at += round_up(sizes[i], 64);
    key_up = (elem*)parts[0], value_up = key_up + key_panels * panel, packed = (elem*)parts[1];
    keys = (T*)parts[2], values = (T*)parts[3];
    pack(item.head);
  }

  void rows(long j, int n, const T** key_rows, const T** value_rows) {
    const T *from[KB], *unused[KB];
    latents.rows(j, n, from, unused);
    for (int i = 0; i < n; ++i) C::pack_row(from[i], a.v_dim, packed + (long)i * width, width);
    const int end = (int)round_up(n, ROWS);
    std::memset(packed + (long)n * width, 0, (size_t)(end - n) * width * sizeof(elem));
    expand(n, key_up, a.nope, keys, key_dim);
    expand(n, value_up, value_dim, values, value_dim);
    for (int i = 0; i < n; ++i) {
      std::memcpy(keys + (long)i * key_dim + a.nope, from[i] + a.v_dim, (key_dim - a.nope) * sizeof(T));
      key_rows[i] = keys + (long)i * key_dim, value_rows[i] = values + (long)i * value_dim;
    }
  }

 private:
  static constexpr int ROWS = Products<C>::ROWS;

  const Attention& a;
  Head<T> latents;
  int steps, width;
  long panel;                // elements of one
  elem *key_up, *value_up;   // panels of KB columns: [steps][KB]
  elem* packed;              // latents [KB][width]
  T *keys, *values;          // [KB][key_dim], [KB][value_dim]

  void pack(int head) {
    const int rank = a.v_dim;
    std::memset(key_up, 0, (value_up - key_up) * sizeof(elem));  // packing leaves the steps beyond the rank alone
    const T* weight = (const T*)a.key_up + (long)head * a.nope * rank;
    for (int d = 0; d < a.nope; d += KB) {
      const T* from[KB];
      const int n = std::min(KB, a.nope - d);
      for (int i = 0; i < n; ++i) from[i] = weight + (long)(d + i) * rank;
      C::pack_keys(from, n, rank, key_up + d / KB * panel);
    }
    weight = (const T*)a.value_up + (long)head * rank * value_dim;
    for (int d = 0; d < value_dim; d += KB)
      for (int r = 0; r < rank; r += KB) {
        const T* from[KB];
        const int n = std::min(KB, rank - r);
        for (int i = 0; i < n; ++i) from[i] = weight + (long)(r + i) * value_dim + d;
        C::pack_values(from, n, std::min(KB, value_dim - d), KB, value_up + d / KB * panel + (long)r / C::PAIR * KB);
      }
  }

  // out [n][stride] = latents [n] x panels of `columns` columns, rounded to the storage type.
  void expand(int n, const elem* panels, int columns, T* out, long stride) {
    alignas(64) float s[ROWS * KB];
    for (int d = 0; d < columns; d += KB, panels += panel)
      for (int r = 0; r < n; r += ROWS) {
        Products<C>::scores(packed + (long)r * width, width, panels, steps, s);
        for (int i = 0; i < std::min(ROWS, n - r); ++i)
          for (int c = 0; c < KB && d + c < columns; c += VL)
            store_upto(out + (r + i) * stride + d + c, *(const vf*)(s + i * KB + c), columns - d - c);
      }
  }
};

}  // namespace baton
