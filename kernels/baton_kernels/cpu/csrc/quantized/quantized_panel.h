// A panel of quantized weights times rows of inputs, in blocks of a register tile each. Products with each kind of inputs
// are a file of their own, compiled once for linear layers and experts: tables of functions by form and rows take most
// of the time that the operators take to compile.
#pragma once
#include "quantized_inputs.h"

namespace baton {

// Some rows of inputs as a kind of inputs puts them, and the sums for a panel [rows][PW].
template <class I>
struct RowBlock {
  int rows;
  const typename I::Word* x;
  const typename I::Sum* input_sums;  // [segments][rows]
  float* sums;
};

// Where such a function is inlined, sums that are added to in each turn of its loop may land in memory.
#define BATON_OWN_REGISTERS __attribute__((noinline))

#define BATON_FEW_ROWS(call) \
  case 1: return call(1);    \
  case 2: return call(2);    \
  case 3: return call(3);    \
  case 4: return call(4);
#if defined(BATON_AVX512)
#define BATON_BLOCK_ROWS(call)                                                                        \
  BATON_FEW_ROWS(call)                                                                                \
  case 5: return call(5);                                                                             \
  case 6: return call(6);                                                                             \
  case 7: return call(7);                                                                             \
  case 8: return call(8);                                                                             \
  case 9: return call(9);                                                                             \
  case 10: return call(10);                                                                           \
  case 11: return call(11);                                                                           \
  case 12: return call(12);
#elif defined(__AVX2__)
#define BATON_BLOCK_ROWS(call) \
  BATON_FEW_ROWS(call)         \
  case 5: return call(5);      \
  case 6: return call(6);
#else
#define BATON_BLOCK_ROWS(call) BATON_FEW_ROWS(call)
#endif

// One panel of a weight.
class Panel {
 public:
  Panel(const QuantizedShape& shape, const PackedLayout& layout, const float* table, const uint8_t* at)
      : shape_(shape), layout_(layout), table_(table), at_(at) {}

 protected:
  static constexpr long STEP_BYTES = sizeof(vu) * 2;

  template <class I>
  static void clear(const RowBlock<I>* blocks, int count) {
    for (int b = 0; b < count; ++b) std::fill(blocks[b].sums, blocks[b].sums + blocks[b].rows * PW, 0.0f);
  }

  const uint8_t* head(const Segment& segment) const { return at_ + segment.group * layout_.group_bytes; }
  const vu* weights(const Segment& segment) const {
    return (const vu*)(head(segment) + layout_.head) + segment.first * 2;
  }

  // Products with integers, of weights that are less by `base`, as what they stand for. Exact but for the last factor:
  // a segment's sums are integers that float32 holds.
  static vf scaled(const Numbers& numbers, vi products, float input_sum, int base, int v) {
    return numbers.scale[v] * (__builtin_convertvector(products, vf) - (numbers.zero[v] - (float)base) * input_sum);
  }

  const QuantizedShape& shape_;
  const PackedLayout& layout_;
  const float* table_;
  const uint8_t* at_;
};

// sums = inputs times a panel, for each block. memory: I::MEMORY floats, while a thread holds I::Guard.
void multiply(const Panel& panel, const RowBlock<FloatInputs>* blocks, int count, float* memory);
void multiply(const Panel& panel, const RowBlock<Int8Inputs>* blocks, int count, float* memory);

// Rows in blocks of at most so many, as even as they come.
struct Blocks {
  long rows, count;
  Blocks(long n, int most) : rows(n), count(ceil_div(n, most)) {}
  long begin(long b) const { return rows * b / count; }
  int size(long b) const { return (int)(begin(b + 1) - begin(b)); }
};

}  // namespace baton
