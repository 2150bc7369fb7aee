// Panels of quantized weights times pairs of inputs.
#include "quantized_pairs.h"

#if defined(BATON_AVX512_BF16)
namespace baton {
namespace {

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

class PairPanel : public Panel {
 public:
  explicit PairPanel(const Panel& panel) : Panel(panel) {}

  void multiply(const RowBlock<PairInputs>* blocks, int count, vu* tile) const {
    with_form(shape_.form, [&](auto form) { multiply_as<form>(blocks, count, tile); });
  }

 private:
  // One or two blocks: values are unpacked in registers. More: a segment is unpacked once for all of them.
  template <int form>
  void multiply_as(const RowBlock<PairInputs>* blocks, int count, vu* tile) const {
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

}  // namespace

void multiply(const Panel& panel, const RowBlock<PairInputs>* blocks, int count, float* memory) {
  PairPanel(panel).multiply(blocks, count, (vu*)memory);
}

}  // namespace baton
#endif
