// The tile instructions that the quantized operators use, in plain C++: for tests on processors that have none.
#pragma once
#include <cstdint>
#include <cstring>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbf16ps

namespace amx_emulation {

struct Tile {
  uint8_t rows[16][64];
};
inline thread_local Tile tiles[8];
inline thread_local bool configured;

template <class T>
T read(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

inline void zero(int t) { tiles[t] = {}; }
inline void load(int t, const void* from, long stride) {
  if (!configured) __builtin_trap();  // as the processor would
  for (int r = 0; r < 16; ++r) std::memcpy(tiles[t].rows[r], (const uint8_t*)from + r * stride, 64);
}
inline void store(int t, void* to, long stride) {
  for (int r = 0; r < 16; ++r) std::memcpy((uint8_t*)to + r * stride, tiles[t].rows[r], 64);
}
template <class Sum, class F>
void products(int to, F product) {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      Sum sum = read<Sum>(tiles[to].rows[m] + 4 * n);
      for (int k = 0; k < 16; ++k) sum += product(m, n, k);
      std::memcpy(tiles[to].rows[m] + 4 * n, &sum, 4);
    }
}
inline void add_bytes(int to, int a, int b) {
  products<int32_t>(to, [&](int m, int n, int k) {
    int32_t sum = 0;
    for (int i = 0; i < 4; ++i) sum += (int8_t)tiles[a].rows[m][4 * k + i] * tiles[b].rows[k][4 * n + i];
    return sum;
  });
}
inline float widened(const uint8_t* at) {
  const uint32_t bits = (uint32_t)read<uint16_t>(at) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void add_bf16(int to, int a, int b) {
  products<float>(to, [&](int m, int n, int k) {
    float sum = 0;
    for (int i = 0; i < 2; ++i)
      sum += widened(tiles[a].rows[m] + 4 * k + 2 * i) * widened(tiles[b].rows[k] + 4 * n + 2 * i);
    return sum;
  });
}

}  // namespace amx_emulation

#define _tile_loadconfig(shapes) ((void)(shapes), amx_emulation::configured = true)
#define _tile_release() (amx_emulation::configured = false)
#define _tile_zero(t) amx_emulation::zero(t)
#define _tile_loadd(t, from, stride) amx_emulation::load(t, from, stride)
#define _tile_stored(t, to, stride) amx_emulation::store(t, to, stride)
#define _tile_dpbsud(to, a, b) amx_emulation::add_bytes(to, a, b)
#define _tile_dpbf16ps(to, a, b) amx_emulation::add_bf16(to, a, b)
