// Products of integers where an instruction sums two products of bytes in 16 bits, saturating (vpmaddubsw): nearly
// twice as many a cycle as of values widened to 16 bits. Sums stay in 16 bits for a burst of four steps, and are exact
// all the same:
//
// - 4-bit weights: 8 times two products of 15 * 127 fit.
// - 8-bit weights are multiplied as u = w + 128, from 0 to 255. No pair of products saturates while, of two inputs, the
//   positive ones sum to no more than 128, and so the negative ones. What exceeds that is cut off an input and is
//   multiplied apart (`rests`): it is rare, since the largest input of a row is 127.
// - Sums of 16 bits may overflow on their way: they are right modulo 2^16. Beginning with -128 times the sum of inputs
//   (`shifts`), they end as the sum of w times inputs, and that one fits where the product of both vectors' lengths is
//   less than 2^15 (Cauchy and Schwarz). The squared lengths of weights (`bounds`, of a panel's longest one) are
//   found when these are packed, those of inputs (`squares`, of a block's longest one) when they are laid out.
// - A burst of which that cannot be told goes by magnitudes and signs: |w| times an input with the sign of w never
//   saturates, and each pair of products is widened at once.
#pragma once
#include "quantized_integers.h"

#if defined(BATON_NARROW_SUMS)
namespace baton {

#if defined(BATON_AVX512)
#define BATON_STORE "vmovdqa32"
typedef __m512i Bytes;
inline vu pairs_of_bytes(vu a, vu b) { return (vu)_mm512_maddubs_epi16((Bytes)a, (Bytes)b); }
inline vi pairs_of_shorts(vu a, vu b) { return (vi)_mm512_madd_epi16((Bytes)a, (Bytes)b); }
inline vu subtract16(vu a, vu b) { return (vu)_mm512_sub_epi16((Bytes)a, (Bytes)b); }
inline vu magnitude8(vu a) { return (vu)_mm512_abs_epi8((Bytes)a); }
inline vu with_sign8(vu a, vu of) {  // what meets a zero does not matter
  return (vu)_mm512_mask_sub_epi8((Bytes)a, _mm512_movepi8_mask((Bytes)of), Bytes{}, (Bytes)a);
}
#else
#define BATON_STORE "vmovdqa"
typedef __m256i Bytes;
inline vu pairs_of_bytes(vu a, vu b) { return (vu)_mm256_maddubs_epi16((Bytes)a, (Bytes)b); }
inline vi pairs_of_shorts(vu a, vu b) { return (vi)_mm256_madd_epi16((Bytes)a, (Bytes)b); }
inline vu subtract16(vu a, vu b) { return (vu)_mm256_sub_epi16((Bytes)a, (Bytes)b); }
inline vu magnitude8(vu a) { return (vu)_mm256_abs_epi8((Bytes)a); }
inline vu with_sign8(vu a, vu of) { return (vu)_mm256_sign_epi8((Bytes)a, (Bytes)of); }
#endif

// sum += pairs of products, in 16 bits. One instruction behind the other, as registers are scarce: compilers gather the
// products first, and put them into memory.
inline void add_pairs_of_bytes(Bytes& sum, vu unsigned_bytes, vu b) {
  Bytes products;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sum), "=&v"(products) : "v"(unsigned_bytes), "v"(b));
}

// sum += pairs of sums of 16 bits. It stays in memory.
inline void add_pairs_of_shorts(vi& sum, Bytes shorts, vu ones) {
  asm("vpmaddwd %2, %1, %1\n\tvpaddd %0, %1, %1\n\t" BATON_STORE " %1, %0" : "+m"(sum), "+v"(shorts) : "v"(ones));
}

// Sums of 16 bits of R rows, which are added to those of 32 bits where these are: in memory, as registers are for what
// each step adds to.
template <int R>
struct NarrowSums {
  Bytes of[R][2];

  void add_to(vi (&sums)[R][2]) const {
    const vu ones = splat_word(0x00010001u);
    repeat<R>([&](auto r) __attribute__((always_inline)) {
      repeat<2>([&](auto v) __attribute__((always_inline)) {
        if constexpr (R > 2) {
          add_pairs_of_shorts(sums[r][v], of[r][v], ones);
        } else {
          sums[r][v] += pairs_of_shorts((vu)of[r][v], ones);
        }
      });
    });
  }
};

class Dot4 {
 public:
  static constexpr int BASE = 0;

  static long words(const PackedLayout& a) { return a.all_steps() * 2; }

  static void lay(const PackedLayout& a, const int8_t* q, int r, int rows, uint32_t* out) {
    for (long w = 0; w < words(a); ++w) std::memcpy(out + w * rows + r, q + 4 * w, 4);
  }

  Dot4(const PackedLayout&, const uint32_t* inputs, int rows, const uint8_t*) : x_(inputs), rows_(rows) {}

  long step() const { return 2 * rows_; }
  const uint32_t* at(const Segment& segment) const { return x_ + segment.at * step(); }

  template <int R>
  void add(const Segment& segment, long, const vu* weights, Ahead ahead, vi (&sums)[R][2]) const {
    const uint32_t* x = at(segment);
    long s = 0;
    for (; s + BURST <= segment.steps; s += BURST, weights += 2 * BURST, x += 2 * R * BURST)
      add_steps<BURST, R>(x, weights, ahead, sums);
    for (; s < segment.steps; ++s, weights += 2, x += 2 * R) add_steps<1, R>(x, weights, ahead, sums);
  }

 private:
  template <int STEPS, int R>
  static inline __attribute__((always_inline)) void add_steps(const uint32_t* x, const vu* weights, Ahead& ahead,
                                                              vi (&sums)[R][2]) {
    NarrowSums<R> narrow;
    repeat<STEPS>([&](auto s) __attribute__((always_inline)) {
      ahead.fetch();
      repeat<2>([&](auto half) __attribute__((always_inline)) {
        const vu low = half_of(weights[2 * s], half), high = half_of(weights[2 * s + 1], half);
        repeat<R>([&](auto r) __attribute__((always_inline)) {
          const vu inputs = splat_word(x[(2 * s + half) * R + r]);
          if constexpr (s + half == 0) {
            narrow.of[r][0] = (Bytes)pairs_of_bytes(low, inputs), narrow.of[r][1] = (Bytes)pairs_of_bytes(high, inputs);
          } else {
            add_pairs_of_bytes(narrow.of[r][0], low, inputs), add_pairs_of_bytes(narrow.of[r][1], high, inputs);
          }
        });
      });
    });
    narrow.add_to(sums);
  }

  const uint32_t* x_;
  int rows_;
};

class Dot8 {
 public:
  static constexpr int BASE = 128;

  static long words(const PackedLayout& a) {
    return a.all_steps() + 2 * a.bursts + a.segments + 1 + 2 * most_rests(a);
  }

  // One row is read from memory as fast by magnitudes and signs, and is only copied.
  static void lay(const PackedLayout& a, const int8_t* q, int r, int rows, uint32_t* out) {
    if (rows == 1) {
      std::memcpy(out, q, 4 * a.all_steps());
      return;
    }
    const Places to(a, out, rows);
    uint32_t *x = out + r, *shift = to.shifts + r, *square = to.squares, *end = to.ends + r;
    Rests rests(to.rests + r * 2 * most_rests(a), most_rests(a));
    *end = 0;
    const long segments = a.segments;
    for (long i = 0; i < segments; ++i) {
      const Segment segment = segment_of(a, i);
      for (long s = 0; s < segment.steps; s += BURST, shift += rows) {
        const int count = (int)std::min(BURST, segment.steps - s);
        Burst burst(q + 4 * (segment.at + s), count);
        const bool fits = burst.cut(segment.at + s, rests);
        for (int k = 0; k < count; ++k, x += rows) std::memcpy(x, burst.bytes + 4 * k, 4);
        *shift = burst.shift();
        const uint32_t length = fits ? burst.square() : ~0u;
        *square = r ? std::max(*square, length) : length, ++square;
      }
      *(end += rows) = (uint32_t)rests.count;
    }
  }

  Dot8(const PackedLayout& a, const uint32_t* inputs, int rows, const uint8_t* panel)
      : layout_(a), places_(a, const_cast<uint32_t*>(inputs), rows), x_(inputs), rows_(rows), panel_(panel) {}

  long step() const { return rows_; }
  const uint32_t* at(const Segment& segment) const { return x_ + segment.at * rows_; }

  template <int R>
  void add(const Segment& segment, long index, const vu* weights, Ahead ahead, vi (&sums)[R][2]) const {
    if (R == 1) return add_signed<R>(at(segment), weights, segment.steps, ahead, sums);
    const long burst = segment.burst(layout_), whole = segment.steps / BURST, rest = segment.steps % BURST;
    const uint16_t* bound = (const uint16_t*)(panel_ + layout_.bounds) + burst;
    const uint32_t *square = places_.squares + burst, *shifts = places_.shifts + burst * R, *x = at(segment);
    for (long b = 0; b < whole; ++b, weights += 2 * BURST, x += BURST * R, shifts += R) {
      if (bound[b] * (uint64_t)square[b] <= FITTING) {
        add_burst<R>(x, shifts, weights, ahead, sums);
      } else {
        add_signed<R>(x, weights, BURST, ahead, sums);
      }
    }
    if (rest) add_signed<R>(x, weights, rest, ahead, sums);
    const uint32_t* ends = places_.ends + index * R;
    repeat<R>([&](auto r) __attribute__((always_inline)) {
      if (ends[r] < ends[R + r]) add_rests<R>(segment, (int)r, ends[r], ends[R + r], sums);
    });
  }

 private:
  // Of bounds, which are quarters of squares, times squares: below 2^15 squared.
  static constexpr uint64_t FITTING = (uint64_t)32767 * 32767 / 4;

  // Rests of a row: more than so many steps have go with all of their burst.
  static long most_rests(const PackedLayout& a) { return a.all_steps() / 8; }

  // Where things are in a laid out block: x [all_steps][rows], shifts [bursts][rows], squares [bursts], where the rests
  // of each segment begin and those of the last one end [segments + 1][rows], rests [rows][most][2]: steps and inputs.
  struct Places {
    uint32_t *shifts, *squares, *ends, *rests;

    Places(const PackedLayout& a, uint32_t* block, int rows)
        : shifts(block + a.all_steps() * rows),
          squares(shifts + a.bursts * rows),
          ends(squares + a.bursts * rows),
          rests(ends + (a.segments + 1) * rows) {}
  };

  struct Rests {
    uint32_t* at;
    long most, count = 0;

    Rests(uint32_t* to, long most) : at(to), most(most) {}
    bool add(long step, const int8_t* bytes) {
      if (count == most) return false;
      at[2 * count] = (uint32_t)step;
      std::memcpy(at + 2 * count++ + 1, bytes, 4);
      return true;
    }
  };

  // Inputs of a burst's steps, zeros behind them.
  struct Burst {
    alignas(16) int8_t bytes[4 * BURST] = {};

    Burst(const int8_t* from, int steps) {
      if (steps == BURST) {
        std::memcpy(bytes, from, sizeof bytes);
      } else {
        std::memcpy(bytes, from, 4 * steps);
      }
    }

    __m128i all() const { return _mm_load_si128((const __m128i*)bytes); }

    // Cut pairs that could saturate, and add what is cut off to the rests. False: there is no more room for it.
    bool cut(long step, Rests& rests) {
      const __m128i x = all(), zero = _mm_setzero_si128(), ones = _mm_set1_epi8(1);
      const __m128i above = _mm_maddubs_epi16(_mm_max_epi8(x, zero), ones);
      const __m128i below = _mm_maddubs_epi16(_mm_max_epi8(_mm_sub_epi8(zero, x), zero), ones);
      const int over = _mm_movemask_epi8(_mm_cmpgt_epi16(_mm_max_epi16(above, below), _mm_set1_epi16(128)));
      if (__builtin_expect(over == 0, 1)) return true;
      for (int s = 0; s < BURST; ++s) {
        if (!(over >> 4 * s & 15)) continue;
        int8_t cut[4] = {};
        for (int i = 0; i < 4; i += 2) {
          if (!(over >> (4 * s + i) & 1)) continue;
          const int sum = bytes[4 * s + i] + bytes[4 * s + i + 1];  // both have the same sign
          cut[i] = (int8_t)(sum > 0 ? sum - 128 : sum + 128);
        }
        if (!rests.add(step + s, cut)) return false;
        for (int i = 0; i < 4; ++i) bytes[4 * s + i] = (int8_t)(bytes[4 * s + i] - cut[i]);
      }
      return true;
    }

    // -128 times the sums of inputs 0 and 1, and of 2 and 3, of all steps.
    uint32_t shift() const {
      __m128i sums = _mm_maddubs_epi16(_mm_set1_epi8((char)128), all());
      sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0x4e));
      sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0xb1));
      return (uint32_t)_mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), sums));
    }

    // The larger one of their sums of squares.
    uint32_t square() const {
      const __m256i wide = _mm256_cvtepi8_epi16(all()), squares = _mm256_madd_epi16(wide, wide);
      __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(squares), _mm256_extracti128_si256(squares, 1));
      sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
      return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(sums, _mm_shuffle_epi32(sums, 0xb1)));
    }
  };

  template <int R>
  static inline __attribute__((always_inline)) void add_burst(const uint32_t* x, const uint32_t* shifts,
                                                              const vu* weights, Ahead& ahead, vi (&sums)[R][2]) {
    NarrowSums<R> narrow;
    repeat<R>([&](auto r) __attribute__((always_inline)) {
      narrow.of[r][0] = narrow.of[r][1] = (Bytes)splat_word(shifts[r]);
    });
    repeat<BURST>([&](auto s) __attribute__((always_inline)) {
      ahead.fetch();
      const vu low = weights[2 * s], high = weights[2 * s + 1];
      repeat<R>([&](auto r) __attribute__((always_inline)) {
        const vu inputs = splat_word(x[s * R + r]);
        add_pairs_of_bytes(narrow.of[r][0], low, inputs), add_pairs_of_bytes(narrow.of[r][1], high, inputs);
      });
    });
    narrow.add_to(sums);
  }

  // The same by magnitudes and signs, for any inputs.
  template <int R>
  static __attribute__((noinline)) void add_signed(const uint32_t* x, const vu* weights, long steps, Ahead& ahead,
                                                   vi (&sums)[R][2]) {
    const vu ones = splat_word(0x00010001u);
    vi acc[R][2];
    repeat<R>([&](auto r) __attribute__((always_inline)) { acc[r][0] = sums[r][0], acc[r][1] = sums[r][1]; });
    for (long s = 0; s < steps; ++s, weights += 2, x += R) {
      ahead.fetch();
      repeat<2>([&](auto v) __attribute__((always_inline)) {
        const vu values = weights[v] ^ 0x80808080u, magnitudes = magnitude8(values);
        repeat<R>([&](auto r) __attribute__((always_inline)) {
          const vu inputs = with_sign8(splat_word(x[r]), values);
          acc[r][v] += pairs_of_shorts(pairs_of_bytes(magnitudes, inputs), ones);
        });
      });
    }
    repeat<R>([&](auto r) __attribute__((always_inline)) { sums[r][0] = acc[r][0], sums[r][1] = acc[r][1]; });
  }

  // Rests `first` to `end` of row r, which are those of a segment.
  template <int R>
  __attribute__((noinline)) void add_rests(const Segment& segment, int r, long first, long end,
                                           vi (&sums)[R][2]) const {
    const vu ones = splat_word(0x00010001u), middle = splat_word(0x80808080u);
    const uint32_t* rest = places_.rests + 2 * (r * most_rests(layout_) + first);
    const vu* weights = (const vu*)(panel_ + segment.group * layout_.group_bytes + layout_.head);
    const long begin = segment.at - segment.first;  // of the group
    vi low = sums[r][0], high = sums[r][1];
    for (long i = first; i < end; ++i, rest += 2) {
      const vu inputs = splat_word(rest[1]), less = pairs_of_bytes(middle, inputs);
      const vu* at = weights + 2 * (rest[0] - begin);
      low += pairs_of_shorts(subtract16(pairs_of_bytes(at[0], inputs), less), ones);
      high += pairs_of_shorts(subtract16(pairs_of_bytes(at[1], inputs), less), ones);
    }
    sums[r][0] = low, sums[r][1] = high;
  }

  const PackedLayout& layout_;
  const Places places_;
  const uint32_t* x_;
  const int rows_;
  const uint8_t* panel_;
};

}  // namespace baton
#endif
