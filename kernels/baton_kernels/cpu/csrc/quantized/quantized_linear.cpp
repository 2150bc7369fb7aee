// Linear layers with quantized weights (quantized.h), inputs as they are or rounded to int8 by the token.
#include "quantized_amx.h"
#include "quantized_pairs.h"

namespace baton {
namespace {

constexpr long MOST_BLOCKS = 10;  // of rows that are laid out at a time

template <class I>
class Run {
 public:
  using Word = typename I::Word;
  using Sum = typename I::Sum;
  static constexpr long MOST_ROWS = MOST_BLOCKS * I::ROWS, SCALES = round_up(MOST_ROWS, 16);

  explicit Run(const QuantizedLinear& a)
      : a_(a),
        layout_(a.shape),
        words_(round_up(I::words(layout_, a.shape.form) * I::ROWS, 64)),
        sums_(round_up(layout_.segments * I::ROWS, 64)) {}

  // Bytes of the inputs of most rows, laid out.
  size_t input_bytes() const {
    const size_t blocks = Blocks(std::min<long>(a_.rows, MOST_ROWS), I::ROWS).count;
    return SCALES * sizeof(float) + blocks * (words_ * sizeof(Word) + sums_ * sizeof(Sum));
  }

  // Run by every thread of the team; `shared` is null where each lays the inputs out for itself.
  void work(const Team& team, uint8_t* shared, Shares& shares, Scratch& scratch) const {
    [[maybe_unused]] const typename I::Guard guard{};
    const size_t results_size = MOST_ROWS * PW;
    float* memory = scratch.get<float>(I::MEMORY + results_size + (shared ? 0 : input_bytes() / 4 + 16));
    float* results = memory + I::MEMORY;
    uint8_t* inputs = shared ? shared : (uint8_t*)(results + results_size);
    for (long first = 0; first < a_.rows; first += MOST_ROWS) {
      const Blocks blocks(std::min(MOST_ROWS, a_.rows - first), I::ROWS);
      float* scales = (float*)inputs;
      Word* words = (Word*)(scales + SCALES);
      Sum* sums = (Sum*)(words + blocks.count * words_);
      RowBlock<I> laid[MOST_BLOCKS];
      for (long b = 0; b < blocks.count; ++b)
        laid[b] = {blocks.size(b), words + b * words_, sums + b * sums_, results + b * I::ROWS * PW};
      const auto lay = [&](long b) {
        LaidRow row(layout_);
        for (int r = 0; r < blocks.size(b); ++r) {
          const long at = blocks.begin(b) + r;
          scales[at] = I::put(layout_, a_.shape.form, row.fill(input(first + at)), a_.scale, r, blocks.size(b),
                              words + b * words_, sums + b * sums_);
        }
      };
      if (shared) {
        team.share(blocks.count, lay);
        team.barrier();
      } else {
        for (long b = 0; b < blocks.count; ++b) lay(b);
      }
      shares.take(team, layout_.panels, first / MOST_ROWS, [&](long p) {
        const Panel panel(a_.shape, layout_, a_.table, a_.packed + p * layout_.panel_bytes);
        multiply(panel, laid, (int)blocks.count, memory);
        for (long b = 0; b < blocks.count; ++b)
          for (long r = 0; r < laid[b].rows; ++r) {
            const long at = blocks.begin(b) + r;
            finish(first + at, p * PW, scales[at], laid[b].sums + r * PW);
          }
      });
      if (shared) team.barrier();
    }
  }

 private:
  InputRow input(long row) const {
    const long width = a_.dtype == 0 ? 4 : 2;
    return {(const uint8_t*)a_.x + row * a_.x_stride * width, a_.order, a_.dtype};
  }

  void finish(long row, long column, float scale, const float* sums) const {
    switch (a_.dtype) {
      case 0: return finish_as<float>(row, column, scale, sums);
      case 1: return finish_as<bf16>(row, column, scale, sums);
      default: return finish_as<f16>(row, column, scale, sums);
    }
  }

  // Columns `column` to column + PW of a row of the output: bias and residual added, rounded once.
  template <class T>
  void finish_as(long row, long column, float scale, const float* sums) const {
    const long width = std::min<long>(PW, a_.shape.out_features - column);
    T* to = (T*)a_.out + row * a_.out_stride + column;
    const T* residual = a_.residual ? (const T*)a_.residual + row * a_.residual_stride + column : nullptr;
    for (long c = 0; c < width; c += VL) {
      vf y = load(sums + c) * scale;
      if (a_.bias) y += load_upto(a_.bias + column + c, width - c);
      if (residual) y += load_upto(residual + c, width - c);
      store_upto(to + c, y, width - c);
    }
  }

  const QuantizedLinear& a_;
  const PackedLayout layout_;
  const long words_, sums_;  // of a block of rows
};

template <class I>
void run(const QuantizedLinear& a) {
  static thread_local Scratch inputs;
  if (a.rows == 0) return;
  const Run<I> work(a);
  // One block is laid out by each thread for itself, which takes no longer than waiting for another one that does.
  uint8_t* shared = a.rows > I::ROWS ? inputs.get<uint8_t>(work.input_bytes()) : nullptr;
  Shares shares;
  parallel(a.threads, [&](const Team& team) {
    static thread_local Scratch scratch;
    work.work(team, shared, shares, scratch);
  });
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" void baton_quantized_linear(const QuantizedLinear* a) {
#if defined(BATON_AMX)
  if (a->amx && a->rows >= AMX_LEAST_ROWS) {
    if (a->int8_inputs) return run<AmxInt8Inputs>(*a);
    if (a->dtype == 1) return run<AmxBf16Inputs>(*a);  // others would lose what they have beyond bfloat16
  }
#endif
#if defined(BATON_AVX512_BF16)
  if (a->pairs && !a->int8_inputs && a->dtype == 1 && PairInputs::hold(a->shape, a->table)) return run<PairInputs>(*a);
#endif
  a->int8_inputs ? run<Int8Inputs>(*a) : run<FloatInputs>(*a);
}
