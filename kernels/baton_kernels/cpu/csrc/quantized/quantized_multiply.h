// A panel of quantized weights times rows of inputs, in blocks of a register tile each.
#pragma once
#include "quantized_inputs.h"

namespace baton {

// Some rows of inputs as FloatInputs or Int8Inputs puts them, and the sums for a panel [rows][PW].
template <class I>
struct RowBlock {
  int rows;
  const typename I::Word* x;
  const typename I::Sum* input_sums;  // [segments][rows]
  float* sums;
};

constexpr long TILE_INPUTS = 4096 / PW;  // of a panel as float32, which stay in the first-level cache

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
  using Guard = int;                                    // what a thread holds while it multiplies
  static constexpr size_t MEMORY = TILE_INPUTS * PW;  // floats

  Panel(const QuantizedShape& shape, const PackedLayout& layout, const float* table, const uint8_t* at)
      : shape_(shape), layout_(layout), table_(table), at_(at) {}

  // sums = inputs times this panel, for each block. tile: MEMORY.
  void multiply(const RowBlock<Int8Inputs>* blocks, int count, float*) const {
    clear(blocks, count);
    shape_.form == INT8 ? multiply_integers<Dot8>(blocks, count) : multiply_integers<Dot4>(blocks, count);
  }

  void multiply(const RowBlock<FloatInputs>* blocks, int count, float* tile) const {
    switch (shape_.form) {
      case INT8: return multiply_floats<INT8>(blocks, count, tile);
      case INT4: return multiply_floats<INT4>(blocks, count, tile);
      case FP8: return multiply_floats<FP8>(blocks, count, tile);
      default: return multiply_floats<TABLE>(blocks, count, tile);
    }
  }

 protected:
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

 private:
  static constexpr long STEP_BYTES = sizeof(vu) * 2;
  static constexpr long CACHED = 8 * 1024;  // bytes of a panel that stay in the first-level cache

  // Some segments at a time, which stay in the first-level cache while blocks of rows go over them. Each block fetches
  // its share of the next ones.
  template <class D>
  void multiply_integers(const RowBlock<Int8Inputs>* blocks, int count) const {
    const long bytes = std::min(layout_.segment_steps, layout_.group_steps) * STEP_BYTES;
    const long at_once = count == 1 ? layout_.segments : std::max<long>(1, CACHED / bytes);
    for (long first = 0; first < layout_.segments; first += at_once) {
      const long end = std::min(layout_.segments, first + at_once);
      const char* from = (const char*)weights(segment_of(layout_, first));
      if (count == 1) return add_block<D>(first, end, blocks[0], {from + QUANTIZED_AHEAD, STEP_BYTES});
      for (int b = 0; b < count; ++b)
        add_block<D>(first, end, blocks[b], {from + at_once * bytes * (count + b) / count, STEP_BYTES / count});
    }
  }

  // Segments `first` to `end`.
  template <class D>
  void add_block(long first, long end, const RowBlock<Int8Inputs>& block, Ahead ahead) const {
    switch (block.rows) {
#define BATON_ADD(R) add_rows<D, R>(first, end, block, ahead)
      BATON_BLOCK_ROWS(BATON_ADD)
#undef BATON_ADD
    }
  }

  template <class D, int R>
  BATON_OWN_REGISTERS void add_rows(long first, long end, const RowBlock<Int8Inputs>& block, Ahead ahead) const {
    const D dot(layout_, block.x, R, at_);
    float* const sums = block.sums;
    Segment segment = segment_of(layout_, first);
    for (long i = first; i < end; ++i, segment = next_segment(layout_, segment)) {
      vi products[R][2];
      repeat<R>([&](auto r) __attribute__((always_inline)) { products[r][0] = products[r][1] = vi{}; });
      dot.template add<R>(segment, i, weights(segment), ahead, products);
      ahead.at += segment.steps * ahead.step;
      const Numbers numbers(head(segment), shape_);
      const float* input_sums = block.input_sums + i * R;
      repeat<R>([&](auto r) __attribute__((always_inline)) {
        repeat<2>([&](auto v) __attribute__((always_inline)) {
          float* to = sums + r * PW + v * VL;
          store(to, load(to) + scaled(numbers, products[r][v], input_sums[r], D::BASE, v));
        });
      });
    }
  }

  // Few rows: values are unpacked in registers. Many: a segment is unpacked once for all blocks.
  template <int form>
  void multiply_floats(const RowBlock<FloatInputs>* blocks, int count, float* tile) const {
    clear(blocks, count);
    const Values<form> values(table_);
    if (count <= (form == TABLE ? 1 : 2)) {
      for (long i = 0; i < layout_.segments; ++i)
        for (int b = 0; b < count; ++b) add_few(values, segment_of(layout_, i), i, blocks[b]);
      return;
    }
    constexpr long STEPS = TILE_INPUTS / inputs_per_step(form);
    long filled = 0, at = 0;  // steps in the tile, and the first of them
    for (long i = 0; i < layout_.segments; ++i) {
      const Segment segment = segment_of(layout_, i);
      for (long s = 0; s < segment.steps;) {
        const long steps = std::min(STEPS - filled, segment.steps - s);
        unpack(values, segment, s, steps, tile + filled * inputs_per_step(form) * PW);
        filled += steps, s += steps;
        if (filled < STEPS && at + filled < layout_.all_steps()) continue;
        for (int b = 0; b < count; ++b) add_tile(tile, at, filled, blocks[b]);
        at += filled, filled = 0;
      }
    }
  }

  template <int form>
  void add_few(const Values<form>& values, const Segment& segment, long index, const RowBlock<FloatInputs>& b) const {
    switch (b.rows) {
#define BATON_ADD(R) add_few_rows<form, R>(values, segment, index, b)
      BATON_BLOCK_ROWS(BATON_ADD)
#undef BATON_ADD
    }
  }

  template <int form, int R>
  void add_few_rows(const Values<form>& values, const Segment& segment, long index,
                    const RowBlock<FloatInputs>& block) const {
    constexpr int INPUTS = inputs_per_step(form);
    vf products[R][2];
    repeat<R>([&](auto r) __attribute__((always_inline)) { products[r][0] = products[r][1] = vf{}; });
    const vu* at = weights(segment);
    const float* x = block.x + segment.at * INPUTS * R;
    Ahead ahead = {(const char*)at + QUANTIZED_AHEAD, STEP_BYTES};
    for (long s = 0; s < segment.steps; ++s, at += 2, x += INPUTS * R) {
      ahead.fetch();
      const vu low = at[0], high = at[1];
      repeat<INPUTS>([&](auto j) __attribute__((always_inline)) {
        const vf first = values(low, j), second = values(high, j);
        repeat<R>([&](auto r) __attribute__((always_inline)) {
          const vf inputs = splat(x[j * R + r]);
          products[r][0] += inputs * first, products[r][1] += inputs * second;
        });
      });
    }
    const Numbers numbers(head(segment), shape_);
    repeat<R>([&](auto r) __attribute__((always_inline)) {
      repeat<2>([&](auto v) __attribute__((always_inline)) {
        float* to = block.sums + r * PW + v * VL;
        vf exact = products[r][v];
        if (has_zeros(form)) exact -= numbers.zero[v] * block.input_sums[index * R + r];
        store(to, load(to) + numbers.scale[v] * exact);
      });
    });
  }

  template <int form>
  void unpack(const Values<form>& values, const Segment& segment, long first, long steps, float* tile) const {
    constexpr int INPUTS = inputs_per_step(form);
    const Numbers numbers(head(segment), shape_);
    vf offsets[INPUTS][2];
    for (int j = 0; j < INPUTS; ++j)
      for (int v = 0; v < 2; ++v)
        offsets[j][v] = has_zeros(form) ? numbers.zero[v] * numbers.scale[v] * (-1.0f / Values<form>::factor(j)) : vf{};
    const vu* at = weights(segment) + first * 2;
    for (long s = 0; s < steps; ++s, at += 2)
#pragma GCC unroll 8
      for (int j = 0; j < INPUTS; ++j, tile += PW)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) store(tile + v * VL, values(at[v], j) * numbers.scale[v] + offsets[j][v]);
  }

  void add_tile(const float* tile, long first, long steps, const RowBlock<FloatInputs>& block) const {
    switch (block.rows) {
#define BATON_ADD(R) add_tile_rows<R>(tile, first * layout_.inputs, steps * layout_.inputs, block)
      BATON_BLOCK_ROWS(BATON_ADD)
#undef BATON_ADD
    }
  }

  template <int R>
  BATON_OWN_REGISTERS void add_tile_rows(const float* tile, long first, long inputs,
                                         const RowBlock<FloatInputs>& block) const {
    const float* x = block.x + first * R;
    vf sums[R][2];
    repeat<R>([&](auto r) __attribute__((always_inline)) {
      sums[r][0] = load(block.sums + r * PW), sums[r][1] = load(block.sums + r * PW + VL);
    });
    for (long k = 0; k < inputs; ++k, tile += PW, x += R) {
      const vf low = load(tile), high = load(tile + VL);
      repeat<R>([&](auto r) __attribute__((always_inline)) {
        sums[r][0] += splat(x[r]) * low, sums[r][1] += splat(x[r]) * high;
      });
    }
    repeat<R>([&](auto r) __attribute__((always_inline)) {
      store(block.sums + r * PW, sums[r][0]), store(block.sums + r * PW + VL, sums[r][1]);
    });
  }
};

// Rows in blocks of at most so many, as even as they come.
struct Blocks {
  long rows, count;
  Blocks(long n, int most) : rows(n), count(ceil_div(n, most)) {}
  long begin(long b) const { return rows * b / count; }
  int size(long b) const { return (int)(begin(b + 1) - begin(b)); }
};

// The panel that multiplies inputs of a kind.
template <class I>
struct PanelOf {
  using Type = Panel;
};

}  // namespace baton
