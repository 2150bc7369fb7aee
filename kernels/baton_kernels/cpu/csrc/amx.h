// Intel's tile multiplier (AMX): 16 x 16 sums of 32 products of bfloat16, or 64 of int8, per
// instruction.
#pragma once
#include "vec.h"

#if defined(BATON_AMX_EMULATION)  // a header that has the instructions' functions, for tests without such a processor
#define BATON_AMX 1
#include BATON_AMX_EMULATION
#elif defined(BATON_AVX512_BF16) && defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define BATON_AMX 1
#endif
#if defined(BATON_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace baton {

constexpr int AMX_ROWS = 16;   // of a tile
constexpr int AMX_PAIRS = 16;  // of bfloat16 in a row of it

// Shapes of the eight tiles; as the instruction wants them.
struct AmxShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  void set(int tile, int tile_rows, int bytes) { rows[tile] = (uint8_t)tile_rows, row_bytes[tile] = (uint16_t)bytes; }
};
static_assert(sizeof(AmxShapes) == 64, "a configuration is 64 bytes");

// While one lives, this thread can use the tiles.
class AmxTiles {
 public:
  AmxTiles(const AmxShapes& shapes = {}) { _tile_loadconfig(&shapes); }
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

// GCC's intrinsics do not say that they read and write memory: call this between them and other code.
inline void amx_fence() { asm volatile("" ::: "memory"); }

// Four sums of 16 x 16, in two rows of tiles (0 1 / 2 3). Strides in bytes.
inline void amx_zero4() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline void amx_load4(const float* c, long stride) {
  const char *top = (const char*)c, *bottom = top + AMX_ROWS * stride;
  _tile_loadd(0, top, stride);
  _tile_loadd(1, top + 64, stride);
  _tile_loadd(2, bottom, stride);
  _tile_loadd(3, bottom + 64, stride);
}

inline void amx_store4(float* c, long stride) {
  char *top = (char*)c, *bottom = top + AMX_ROWS * stride;
  _tile_stored(0, top, stride);
  _tile_stored(1, top + 64, stride);
  _tile_stored(2, bottom, stride);
  _tile_stored(3, bottom + 64, stride);
}

// One step of 16 pairs: a: 32 rows of pairs, b: 16 rows (pairs) of 32 columns.
inline void amx_step4(const void* a, long a_stride, const void* b, long b_stride) {
  _tile_loadd(4, a, a_stride);
  _tile_loadd(6, b, b_stride);
  _tile_loadd(7, (const char*)b + 64, b_stride);
  _tile_loadd(5, (const char*)a + AMX_ROWS * a_stride, a_stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Whether the processor has tiles and multiplies bfloat16 and int8 in them; all that have tiles do.
inline bool amx_present() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
}

// Ask the kernel for the tiles' registers, which it keeps for those who ask; for the whole process.
inline bool amx_permitted() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

}  // namespace baton
#endif
