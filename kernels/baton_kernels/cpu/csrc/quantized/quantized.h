// Packed quantized weights, which the quantized linear layers and experts read.
//
// Columns of the output stand in panels of PW, and a panel's inputs in steps: a 32-bit lane per column, with four 8-bit
// values of consecutive inputs, or eight 4-bit ones: those of inputs 0 to 3 in the low halves of its bytes. So one
// vector is what an instruction for sums of products of bytes takes. Steps stand in groups that share scales; scales,
// and zeros where groups have their own, stand before the steps of their group, so that a panel is read in order. The
// last step of a group is filled up with values that meet inputs of zero. Where integers are summed in 16 bits
// (quantized_narrow.h), the bounds of a panel's bursts of 8-bit values stand at its end.
#pragma once
#include <algorithm>

#include "../operators.h"
#include "../team.h"
#include "../vec.h"

// Which instruction sums products of bytes: of four in 32 bits, or of two in 16, saturating.
#if (defined(BATON_AVX512) && defined(__AVX512VNNI__)) || (defined(__AVX2__) && defined(__AVXVNNI__))
#define BATON_VNNI 1
#elif defined(__AVX2__)
#define BATON_NARROW_SUMS 1
#endif

namespace baton {

constexpr int PW = 2 * VL;  // columns of a panel of weights
constexpr long BURST = 4;   // steps whose sums are kept in 16 bits

// How values are stored; as Python numbers them.
enum Form : int32_t { INT8 = 0, INT4 = 1, FP8 = 2, TABLE = 3 };

constexpr long SEGMENT_INPUTS = 8 * 1024 / PW;

constexpr long inputs_per_step(int form) { return form == INT8 || form == FP8 ? 4 : 8; }
constexpr long ceil_div(long n, long unit) { return (n + unit - 1) / unit; }

// Where things are in packed weights; sizes in bytes.
struct PackedLayout {
  long inputs, group, in_features, groups, group_steps, last_steps;
  long group_bursts, bursts;
  long number_bytes, head, group_bytes, bounds, panel_bytes, panels;  // bounds: where they are in a panel
  long segment_steps, group_segments, segments;

  explicit PackedLayout(const QuantizedShape& a)
      : inputs(inputs_per_step(a.form)),
        group(std::min<long>(a.group, a.in_features)),
        in_features(a.in_features),
        groups(ceil_div(a.in_features, group)),
        group_steps(ceil_div(group, inputs)),
        last_steps(ceil_div(a.in_features - (groups - 1) * group, inputs)),
        group_bursts(ceil_div(group_steps, BURST)),
        bursts((groups - 1) * group_bursts + ceil_div(last_steps, BURST)),
        number_bytes(a.narrow == 0 ? 4 : 2),
        head(number_bytes * PW * (a.own_zeros ? 2 : 1)),
        group_bytes(head + group_steps * PW * 4),
        bounds((groups - 1) * group_bytes + head + last_steps * PW * 4),
        panel_bytes(round_up(bounds + (has_bounds(a) ? bursts * (long)sizeof(uint16_t) : 0), 64)),
        panels(a.gated ? ceil_div(a.out_features / 2, VL) : ceil_div(a.out_features, PW)),
        segment_steps(SEGMENT_INPUTS / inputs),
        group_segments(ceil_div(group_steps, segment_steps)),
        segments((groups - 1) * group_segments + ceil_div(last_steps, segment_steps)) {}

  long steps(long g) const { return g + 1 == groups ? last_steps : group_steps; }
  // The row of the weight that column c of a panel is, or -1: none.
  static long row(const QuantizedShape& a, long panel, long c) {
    const long count = a.gated ? a.out_features / 2 : a.out_features;
    const long at = a.gated ? panel * VL + c % VL : panel * PW + c;
    if (at >= count) return -1;
    return a.gated && c >= VL ? count + at : at;
  }
  static bool has_bounds([[maybe_unused]] const QuantizedShape& a) {
#if defined(BATON_NARROW_SUMS)
    return a.form == INT8;
#else
    return false;
#endif
  }
  // Of all groups, and so of a row of inputs that is laid out for them.
  long all_steps() const { return (groups - 1) * group_steps + last_steps; }
};

// Scales and zeros of a group's columns.
struct Numbers {
  vf scale[2], zero[2];

  Numbers(const uint8_t* head, const QuantizedShape& a) {
    const long bytes = PW * (a.narrow == 0 ? 4 : 2);
    for (int v = 0; v < 2; ++v) {
      scale[v] = number(head, a.narrow, v);
      zero[v] = a.own_zeros ? number(head + bytes, a.narrow, v) : splat((float)a.zero);
    }
  }

 private:
  static vf number(const uint8_t* at, int narrow, int v) {
    switch (narrow) {
      case 0: return load((const float*)at + v * VL);
      case 1: return load((const bf16*)at + v * VL);
      default: return load((const f16*)at + v * VL);
    }
  }
};

// A stretch of a panel's steps that share scales; it stays in the first-level cache.
struct Segment {
  long group, first, steps, at;  // first: step of its group; at: of the panel

  long burst(const PackedLayout& a) const { return group * a.group_bursts + first / BURST; }  // its first one
};
static_assert(SEGMENT_INPUTS % (8 * BURST) == 0, "segments begin with a burst");

// The one behind it.
inline Segment next_segment(const PackedLayout& a, Segment s) {
  s.at += s.steps, s.first += s.steps;
  if (s.first == a.steps(s.group)) ++s.group, s.first = 0;
  s.steps = std::min(a.segment_steps, a.steps(s.group) - s.first);
  return s;
}

inline Segment segment_of(const PackedLayout& a, long index) {
  const long g = a.group_segments == 1 ? index : index / a.group_segments;
  const long first = (index - g * a.group_segments) * a.segment_steps;
  return {g, first, std::min(a.segment_steps, a.steps(g) - first), g * a.group_steps + first};
}

}  // namespace baton
