// Rows of inputs as the products with quantized weights read them: in the order and with the gaps of the weights'
// groups, some rows side by side, and their sums by segment, which zeros of weights are multiplied with.
#pragma once
#include "../expert_plan.h"
#include "quantized_narrow.h"

namespace baton {

// Where a row of inputs comes from.
struct InputRow {
  const void* at;
  const int32_t* order;  // or null: where each input lies
  int32_t dtype;
};

// An input row as float32 with the gaps of groups: [all_steps * inputs].
class LaidRow {
 public:
  explicit LaidRow(const PackedLayout& layout) : layout_(layout) {
    const long padded = layout.all_steps() * layout.inputs, natural = round_up(layout.in_features, VL);
    gaps_ = layout.groups > 1 && layout.group % layout.inputs;
    values_ = scratch().get<float>(padded + VL + natural + VL);
    natural_ = values_ + padded + VL;
  }

  const float* fill(const InputRow& row) {
    switch (row.dtype) {
      case 0: return from((const float*)row.at, row.order);
      case 1: return from((const bf16*)row.at, row.order);
      default: return from((const f16*)row.at, row.order);
    }
  }

 private:
  static Scratch& scratch() {
    static thread_local Scratch memory;
    return memory;
  }

  template <class T>
  const float* from(const T* x, const int32_t* order) {
    const long n = layout_.in_features, padded = layout_.all_steps() * layout_.inputs;
    float* natural = order || gaps_ ? natural_ : values_;
    const long even = n - n % VL;
    for (long i = 0; i < even; i += VL) store(natural + i, load(x + i));
    if (even < n) store_part(natural + even, load_part(x + even, (int)(n - even)), (int)(n - even));
    if (gaps_) std::fill(values_, values_ + padded, 0.0f);
    else std::fill(values_ + n, values_ + padded, 0.0f);
    if (natural == values_) return values_;
    const long stride = layout_.group_steps * layout_.inputs;
    for (long g = 0; g < layout_.groups; ++g) {
      float* to = values_ + g * stride;
      const long first = g * layout_.group, count = std::min(layout_.group, n - first);
      for (long i = 0; i < count; ++i) to[i] = natural[order ? order[first + i] : first + i];
    }
    return values_;
  }

  const PackedLayout& layout_;
  bool gaps_;
  float *values_, *natural_;
};

// Kinds of laid out inputs have: Word and Sum, types of inputs and of sums of a segment's; ROWS of a block at most; Guard,
// what a thread holds while it multiplies them, and MEMORY, floats that it needs for that; words(), a block's words per
// row; put(), which writes row r of a block's `rows` and returns what the row's outputs are multiplied with. Sums are
// [segments][rows].

// The sums of a row's segments, each computed as a Sum.
template <class Sum, class T>
inline void put_sums(const PackedLayout& a, const T* x, int r, int rows, float* sums) {
  const long segments = a.segments;
  for (long i = 0; i < segments; ++i) {
    const Segment segment = segment_of(a, i);
    const T* from = x + segment.at * a.inputs;
    Sum sum = 0;
    for (long k = 0; k < segment.steps * a.inputs; ++k) sum += from[k];
    sums[i * rows + r] = (float)sum;
  }
}

constexpr long TILE_INPUTS = 4096 / PW;  // of a panel as float32, which stay in the first-level cache

// Inputs as float32, times the factors of values. A block of rows: [all_steps * inputs][rows].
struct FloatInputs {
  using Word = float;
  using Sum = float;
  using Guard = int;
  static constexpr int ROWS = ROW_GROUP;
  static constexpr size_t MEMORY = TILE_INPUTS * PW;

  static long words(const PackedLayout& a, int) { return a.all_steps() * a.inputs; }

  static float put(const PackedLayout& a, int form, const float* x, float, int r, int rows, float* out, float* sums) {
    const long n = words(a, form);
    float factors[8];
    for (int j = 0; j < 8; ++j) factors[j] = factor_of(form, j % (int)a.inputs);
    for (long i = 0; i < n; ++i) out[i * rows + r] = x[i] * factors[i % 8];
    put_sums<float>(a, x, r, rows, sums);
    return 1.0f;
  }
};

// Inputs rounded to int8, as Dot8 or Dot4 lays them out.
struct Int8Inputs {
  using Word = uint32_t;
  using Sum = float;  // of integers
  using Guard = int;
  static constexpr int ROWS = ROW_GROUP;
  static constexpr size_t MEMORY = 0;

  static long words(const PackedLayout& a, int form) { return form == INT8 ? Dot8::words(a) : Dot4::words(a); }

  // To q, which has room for VL more. Sets `scale` where it is 0. Returns 0, or no number where one of x is infinite or
  // none.
  static float round(const float* x, long n, float& scale, int8_t* q) {
    vf most = vf{}, damage = vf{};
    for (long i = 0; i < n; i += VL) {
      const vf v = load_upto(x + i, n - i);
      most = vmax(most, vmax(v, -v)), damage += v * 0.0f;
    }
    if (scale == 0) scale = largest(most) / 127.0f;
    const float inverse = scale > 1e-37f && scale < 1e37f ? 1.0f / scale : 0.0f;
    long i = 0;
#if defined(__AVX2__) && !defined(BATON_AVX512)
    for (; i + 4 * VL <= n; i += 4 * VL) {
      const auto whole = [&](int k) __attribute__((always_inline)) {
        return _mm256_cvtps_epi32((__m256)within(load(x + i + k * VL) * inverse));
      };
      const __m256i low = _mm256_packs_epi32(whole(0), whole(1)), high = _mm256_packs_epi32(whole(2), whole(3));
      const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      _mm256_storeu_si256((__m256i*)(q + i), _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
    }
#endif
    for (; i < n; i += VL) {
      const vf bounded = within(load_upto(x + i, n - i) * inverse);
      store_bytes(q + i, (vi)(bounded + 12582912.0f) - 0x4b400000);  // plus 1.5 * 2^23: rounded, in the low bits
    }
    return sum(damage);
  }

  // scale: of all rows, or 0: the row's largest magnitude is 127.
  static float put(const PackedLayout& a, int form, const float* x, float scale, int r, int rows, uint32_t* out,
                   float* sums) {
    static thread_local Scratch memory;
    const long n = a.all_steps() * a.inputs;
    int8_t* q = memory.get<int8_t>(n + 4 * VL);
    const float damage = round(x, n, scale, q);
    form == INT8 ? Dot8::lay(a, q, r, rows, out) : Dot4::lay(a, q, r, rows, out);
    put_sums<int32_t>(a, q, r, rows, sums);
    return scale + damage;
  }

 private:
  static vf within(vf x) {
    const vf bound = splat(127.0f);
#if defined(__AVX2__) && !defined(BATON_AVX512)
    return (vf)_mm256_max_ps(_mm256_min_ps((__m256)x, (__m256)bound), (__m256)-bound);
#else
    return select(x < bound, select(x > -bound, x, -bound), bound);
#endif
  }

  // The low bytes of VL integers.
  static void store_bytes(int8_t* to, vi x) {
#if defined(BATON_AVX512)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x));
#else
    typedef int8_t narrow __attribute__((vector_size(VL)));
    const narrow bytes = __builtin_convertvector(x, narrow);
    std::memcpy(to, &bytes, VL);
#endif
  }
};

}  // namespace baton
