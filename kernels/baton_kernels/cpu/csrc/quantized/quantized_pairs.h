// Panels of quantized weights times inputs that are bfloat16: pairs of them are multiplied by pairs of values, which
// bfloat16 holds exactly too (integers of 8 bits, fp8, tables whose values have no more bits), and summed in float32.
// Scales and zeros come in where a segment ends, as in quantized_multiply.h.
#pragma once
#include "quantized_multiply.h"

#if defined(BATON_AVX512_BF16)
namespace baton {

// Which two inputs of a step stand together: j and j + 2, as their values do in a lane of the weights.
constexpr int first_of_pair(int form, int p) { return inputs_per_step(form) == 4 ? p : p / 2 + p % 2 * 4; }

// Pair p of a vector of weights, as bfloat16.
template <int form>
struct PairValues {  // by float32, whose lower halves are empty
  Values<form> values;

  explicit PairValues(const float* table) : values(table) {}
  vu operator()(vu weights, int p) const { return (vu)values(weights, p) >> 16 | (vu)values(weights, p + 2); }
  static constexpr float factor(int j) { return Values<form>::factor(j); }
};

// Values of 4 bits are looked up where they stand: a lane's halves begin with the values 0 and 2, those behind them are
// shifted there. What stands above 4 bits is looked up too, in a table that repeats itself, or ignored.
struct LookedUp {
  __m512i table;

  explicit LookedUp(const float* from) {
    uint16_t twice[32];
    for (int i = 0; i < 32; ++i) std::memcpy(twice + i, (const uint8_t*)(from + i % 16) + 2, 2);
    table = _mm512_loadu_si512(twice);
  }
  vu operator()(vu weights, int p) const {
    return (vu)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)weights, 4 * p), table);
  }
  static constexpr float factor(int) { return 1.0f; }
};

template <>
struct PairValues<INT4> : LookedUp {
  static constexpr float INTEGERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  explicit PairValues(const float*) : LookedUp(INTEGERS) {}
};
template <>
struct PairValues<TABLE> : LookedUp {
  using LookedUp::LookedUp;
};

// Inputs as bfloat16. A block of rows: [all_steps * inputs / 2][rows], a pair each.
struct PairInputs {
  using Word = uint32_t;
  using Sum = float;
  static constexpr int ROWS = ROW_GROUP;

  static long words(const PackedLayout& a, int) { return a.all_steps() * a.inputs / 2; }

  // Whether values of a weight are exact: a table's may have more bits than bfloat16.
  static bool hold(const QuantizedShape& shape, const float* table) {
    if (shape.form != TABLE) return true;
    for (int i = 0; i < 16; ++i) {
      uint32_t bits;
      std::memcpy(&bits, table + i, 4);
      if (bits & 0xffff) return false;
    }
    return true;
  }

  static float put(const PackedLayout& a, int form, const float* x, float, int r, int rows, uint32_t* out,
                   float* sums) {
    const long pairs = a.inputs / 2;
    int at[4];
    float factors[8];
    for (int p = 0; p < pairs; ++p) at[p] = first_of_pair(form, p);
    for (int j = 0; j < 8; ++j) factors[j] = form == INT8 ? PairValues<INT8>::factor(j % 4) : 1.0f;
    const long steps = a.all_steps();
    for (long s = 0; s < steps; ++s)
      for (long p = 0; p < pairs; ++p) {
        const float *low = x + s * a.inputs + at[p], *high = low + 2;
        out[(s * pairs + p) * rows + r] =
            rounded(*low * factors[at[p]]) >> 16 | (rounded(*high * factors[at[p] + 2]) & 0xffff0000u);
      }
    put_sums<float>(a, x, r, rows, sums);
    return 1.0f;
  }

 private:
  // To what bfloat16 holds, in the upper half: inputs of an expert's second product have more bits.
  static uint32_t rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits + (0x7fff + (bits >> 16 & 1));
  }
};

// As Panel.
class PairPanel : public Panel {
 public:
  static constexpr size_t MEMORY = SEGMENT_INPUTS / 2 * PW;  // words
  using Panel::Panel;

  void multiply(const RowBlock<PairInputs>* blocks, int count, float* memory) const {
    switch (shape_.form) {
      case INT8: return multiply_pairs<INT8>(blocks, count, (vu*)memory);
      case INT4: return multiply_pairs<INT4>(blocks, count, (vu*)memory);
      case FP8: return multiply_pairs<FP8>(blocks, count, (vu*)memory);
      default: return multiply_pairs<TABLE>(blocks, count, (vu*)memory);
    }
  }

 private:
  // One or two blocks: values are unpacked in registers. More: a segment is unpacked once for all of them.
  template <int form>
  void multiply_pairs(const RowBlock<PairInputs>* blocks, int count, vu* tile) const {
    constexpr int PAIRS = inputs_per_step(form) / 2;
    clear(blocks, count);
    const PairValues<form> values(table_);
    Segment segment = segment_of(layout_, 0);
    for (long i = 0; i < layout_.segments; ++i, segment = next_segment(layout_, segment)) {
      const vu* at = weights(segment);
      if (count <= 2) {
        for (int b = 0; b < count; ++b) add_block<form>(values, at, segment, i, blocks[b]);
        continue;
      }
      vu* to = tile;
      for (long s = 0; s < segment.steps; ++s, at += 2) {
        __builtin_prefetch((const char*)at + QUANTIZED_AHEAD), __builtin_prefetch((const char*)at + QUANTIZED_AHEAD + 64);
        repeat<PAIRS>([&](auto p) __attribute__((always_inline)) {
          *to++ = values(at[0], p), *to++ = values(at[1], p);
        });
      }
      for (int b = 0; b < count; ++b) add_block<form>(Unpacked{}, tile, segment, i, blocks[b]);
    }
  }

  // Pairs that stand one behind the other.
  struct Unpacked {};

  template <int form, class V>
  void add_block(const V& values, const vu* from, const Segment& segment, long index,
                 const RowBlock<PairInputs>& block) const {
    switch (block.rows) {
#define BATON_ADD(R) add_rows<form, R>(values, from, segment, index, block)
      BATON_BLOCK_ROWS(BATON_ADD)
#undef BATON_ADD
    }
  }

  // Few rows keep several sums apart, so that no addition waits for the one before.
  template <int form, int R, class V>
  BATON_OWN_REGISTERS void add_rows(const V& given, const vu* from, const Segment& segment, long index,
                                    const RowBlock<PairInputs>& block) const {
    constexpr int PAIRS = inputs_per_step(form) / 2, APART = R == 1 ? PAIRS : R <= 3 ? 2 : 1;
    constexpr bool unpacked = std::is_same<V, Unpacked>::value;
    const V values = given;
    __m512 sums[APART][R][2];
    repeat<APART>([&](auto u) __attribute__((always_inline)) {
      repeat<R>([&](auto r) __attribute__((always_inline)) { sums[u][r][0] = sums[u][r][1] = __m512{}; });
    });
    const uint32_t* x = block.x + segment.at * PAIRS * R;
    for (long s = 0; s < segment.steps; ++s, x += PAIRS * R, from += unpacked ? 2 * PAIRS : 2) {
      if (!unpacked)
        __builtin_prefetch((const char*)from + QUANTIZED_AHEAD),
            __builtin_prefetch((const char*)from + QUANTIZED_AHEAD + 64);
      repeat<PAIRS>([&](auto p) __attribute__((always_inline)) {
        vu low, high;
        if constexpr (unpacked) low = from[2 * p], high = from[2 * p + 1];
        else low = values(from[0], p), high = values(from[1], p);
        repeat<R>([&](auto r) __attribute__((always_inline)) {
          const __m512bh inputs = (__m512bh)_mm512_set1_epi32((int)x[p * R + r]);
          auto& to = sums[p % APART][r];
          to[0] = _mm512_dpbf16_ps(to[0], inputs, (__m512bh)low);
          to[1] = _mm512_dpbf16_ps(to[1], inputs, (__m512bh)high);
        });
      });
    }
    const Numbers numbers(head(segment), shape_);
    repeat<R>([&](auto r) __attribute__((always_inline)) {
      repeat<2>([&](auto v) __attribute__((always_inline)) {
        vf exact = (vf)sums[0][r][v];
        repeat<APART - 1>([&](auto u) __attribute__((always_inline)) { exact += (vf)sums[u + 1][r][v]; });
        if (has_zeros(form)) exact -= numbers.zero[v] * block.input_sums[index * R + r];
        float* to = block.sums + r * PW + v * VL;
        store(to, load(to) + numbers.scale[v] * exact);
      });
    });
  }
};

template <>
struct PanelOf<PairInputs> {
  using Type = PairPanel;
};

}  // namespace baton
#endif
