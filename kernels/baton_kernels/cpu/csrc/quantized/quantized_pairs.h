// Inputs that are bfloat16, in pairs: these are multiplied by pairs of values, which bfloat16 holds exactly too (integers
// of 8 bits, fp8, tables whose values have no more bits), and summed in float32. Scales and zeros come in where a segment
// ends, as in quantized_floats.cpp.
#pragma once
#include "quantized_panel.h"

#if defined(BATON_AVX512_BF16)
namespace baton {

// Which two inputs of a step stand together: j and j + 2, as their values do in a lane of the weights.
constexpr int first_of_pair(int form, int p) { return inputs_per_step(form) == 4 ? p : p / 2 + p % 2 * 4; }

// Inputs as bfloat16. A block of rows: [all_steps * inputs / 2][rows], a pair each.
struct PairInputs {
  using Word = uint32_t;
  using Sum = float;
  using Guard = int;
  static constexpr int ROWS = ROW_GROUP;
  static constexpr size_t MEMORY = SEGMENT_INPUTS / 2 * PW;

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
    for (int j = 0; j < 8; ++j) factors[j] = form == INT8 ? Values<INT8>::factor(j % 4) : 1.0f;
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

void multiply(const Panel& panel, const RowBlock<PairInputs>* blocks, int count, float* memory);

}  // namespace baton
#endif
