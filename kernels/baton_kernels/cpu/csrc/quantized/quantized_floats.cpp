// Panels of quantized weights times inputs as float32: weights are unpacked to float32, too.
#include "quantized_panel.h"

namespace baton {
namespace {

class FloatPanel : public Panel {
 public:
  explicit FloatPanel(const Panel& panel) : Panel(panel) {}

  void multiply(const RowBlock<FloatInputs>* blocks, int count, float* tile) const {
    with_form(shape_.form, [&](auto form) { multiply_as<form>(blocks, count, tile); });
  }

 private:
  // Few rows: values are unpacked in registers. Many: a segment is unpacked once for all blocks.
  template <int form>
  void multiply_as(const RowBlock<FloatInputs>* blocks, int count, float* tile) const {
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

}  // namespace

void multiply(const Panel& panel, const RowBlock<FloatInputs>* blocks, int count, float* memory) {
  FloatPanel(panel).multiply(blocks, count, memory);
}

}  // namespace baton
