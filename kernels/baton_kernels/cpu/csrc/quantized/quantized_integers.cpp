// Panels of quantized weights of 8 and 4 bits times inputs that were rounded to int8.
#include "quantized_panel.h"

namespace baton {
namespace {

class IntegerPanel : public Panel {
 public:
  explicit IntegerPanel(const Panel& panel) : Panel(panel) {}

  void multiply(const RowBlock<Int8Inputs>* blocks, int count) const {
    clear(blocks, count);
    shape_.form == INT8 ? multiply_as<Dot8>(blocks, count) : multiply_as<Dot4>(blocks, count);
  }

 private:
  static constexpr long CACHED = 8 * 1024;  // bytes of a panel that stay in the first-level cache

  // Some segments at a time, which stay in the first-level cache while blocks of rows go over them. Each block fetches
  // its share of the next ones.
  template <class D>
  void multiply_as(const RowBlock<Int8Inputs>* blocks, int count) const {
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
};

}  // namespace

void multiply(const Panel& panel, const RowBlock<Int8Inputs>* blocks, int count, float*) {
  IntegerPanel(panel).multiply(blocks, count);
}

}  // namespace baton
