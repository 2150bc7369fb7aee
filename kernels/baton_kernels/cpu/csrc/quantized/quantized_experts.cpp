// A mixture of experts (experts.cpp) with quantized weights: the rows of all experts as in quantized_linear.cpp, inputs
// of both products as they are or rounded to int8.
#include "../activation.h"
#include "quantized_amx.h"
#include "quantized_pairs.h"

namespace baton {
namespace {

constexpr long MOST_SLOTS = 4096;  // (token, expert) pairs at a time: bounds the memory between the products
constexpr int MOST_BLOCKS = 10;    // of rows that go over a panel at a time

template <class I>
class Run {
 public:
  using Word = typename I::Word;
  using Sum = typename I::Sum;

  Run(const QuantizedExperts& a, const Plan& plan, Scratch& memory, long from, long count)
      : a_(a),
        plan_(plan),
        first_(a.gate_up),
        second_(a.down),
        from_(from),
        count_(count),
        inner_(round_up(a.down.in_features, VL)),
        hidden_(second_.panels * PW),
        words_(round_up(std::max(I::words(first_, a.gate_up.form), I::words(second_, a.down.form)) * I::ROWS, 64)),
        sums_(round_up(std::max(first_.segments, second_.segments) * I::ROWS, 16)) {
    const long slots = round_up((long)plan.token.size(), 16), groups = (long)plan.groups.size();
    h_ = memory.get<float>(slots * (inner_ + hidden_ + 1) + groups * (words_ * sizeof(Word) / 4 + sums_));
    y_ = h_ + slots * inner_;
    scales_ = y_ + slots * hidden_;
    laid_ = (Word*)(scales_ + slots);
    laid_sums_ = (Sum*)(laid_ + groups * words_);
  }

  void work(const Team& team, std::atomic<long>* next, Scratch& scratch) {
    [[maybe_unused]] const typename I::Guard guard{};
    float* tile = scratch.get<float>(I::MEMORY + MOST_BLOCKS * I::ROWS * PW);
    float* results = tile + I::MEMORY;
    const long groups = (long)plan_.groups.size(), active = (long)plan_.active.size();
    team.share(groups, [&](long g) {
      lay(g, first_, a_.gate_up, [&](long slot) { return token(slot); });
    });
    team.barrier();
    take(next[0], active * first_.panels, [&](long i) {
      first(plan_.active[i / first_.panels], i % first_.panels, tile, results);
    });
    team.barrier();
    team.share(groups, [&](long g) {
      lay(g, second_, a_.down,
          [&](long slot) { return InputRow{h_ + slot * inner_, a_.down_order, 0}; });
    });
    team.barrier();
    take(next[1], active * second_.panels, [&](long i) {
      second(plan_.active[i / second_.panels], i % second_.panels, tile, results);
    });
    team.barrier();
    team.share(count_, [&](long t) { finish(t); });
  }

 private:
  InputRow token(long slot) const {
    const long width = a_.dtype == 0 ? 4 : 2;
    return {(const uint8_t*)a_.x + plan_.token[slot] * a_.x_stride * width, a_.gate_up_order, a_.dtype};
  }

  template <class F>
  void lay(long g, const PackedLayout& layout, const QuantizedShape& shape, F row_of) {
    const Group& group = plan_.groups[g];
    LaidRow row(layout);
    for (int r = 0; r < group.rows; ++r)
      scales_[group.first + r] = I::put(layout, shape.form, row.fill(row_of(group.first + r)), 0.0f, r, group.rows,
                                        laid_ + g * words_, laid_sums_ + g * sums_);
  }

  // Call each(slot, sums [PW]) for the rows of an expert, multiplied with a panel.
  template <class F>
  void multiply(int expert, const Panel& panel, float* tile, float* results, F each) {
    const int end = plan_.first_group[expert + 1];
    for (int g = plan_.first_group[expert]; g < end; g += MOST_BLOCKS) {
      RowBlock<I> blocks[MOST_BLOCKS];
      const int count = std::min(MOST_BLOCKS, end - g);
      for (int b = 0; b < count; ++b) {
        blocks[b] = {plan_.groups[g + b].rows, laid_ + (g + b) * words_, laid_sums_ + (g + b) * sums_,
                     results + (long)b * I::ROWS * PW};
      }
      baton::multiply(panel, blocks, count, tile);
      for (int b = 0; b < count; ++b)
        for (int r = 0; r < blocks[b].rows; ++r) each(plan_.groups[g + b].first + r, blocks[b].sums + r * PW);
    }
  }

  // A panel of gates and ups of one expert.
  void first(int expert, long p, float* tile, float* results) {
    switch (a_.activation) {
      case SILU: return first_of<SILU>(expert, p, tile, results);
      case GELU_TANH: return first_of<GELU_TANH>(expert, p, tile, results);
      case CLIPPED_SWISH: return first_of<CLIPPED_SWISH>(expert, p, tile, results);
    }
  }

  template <int kind>
  void first_of(int expert, long p, float* tile, float* results) {
    const uint8_t* at = a_.packed_gate_up + (expert * first_.panels + p) * first_.panel_bytes;
    const long inner = a_.down.in_features, column = p * VL;
    vf gate_bias = vf{}, up_bias = vf{};
    if (a_.gate_up_bias) {
      const float* bias = a_.gate_up_bias + expert * 2 * inner + column;
      gate_bias = load_upto(bias, inner - column), up_bias = load_upto(bias + inner, inner - column);
    }
    const Panel panel(a_.gate_up, first_, a_.gate_up_table, at);
    multiply(expert, panel, tile, results, [&](long slot, const float* sums) {
      const float scale = scales_[slot];
      store(h_ + slot * inner_ + column,
            gated<kind>(load(sums) * scale + gate_bias, load(sums + VL) * scale + up_bias, a_.alpha, a_.limit));
    });
  }

  // A panel of the outputs of one expert, weighted.
  void second(int expert, long p, float* tile, float* results) {
    const uint8_t* at = a_.packed_down + (expert * second_.panels + p) * second_.panel_bytes;
    const long hidden = a_.down.out_features, column = p * PW;
    vf low = vf{}, high = vf{};
    if (a_.down_bias) {
      const float* bias = a_.down_bias + expert * hidden + column;
      low = load_upto(bias, hidden - column);
      if (column + VL < hidden) high = load_upto(bias + VL, hidden - column - VL);
    }
    multiply(expert, Panel(a_.down, second_, a_.down_table, at), tile, results, [&](long slot, const float* sums) {
      float* to = y_ + slot * hidden_ + column;
      const float weight = plan_.weight[slot], scale = scales_[slot];
      store(to, (load(sums) * scale + low) * weight), store(to + VL, (load(sums + VL) * scale + high) * weight);
    });
  }

  // A token's row of the output.
  void finish(long t) const {
    switch (a_.dtype) {
      case 0: return finish_as<float>(t);
      case 1: return finish_as<bf16>(t);
      default: return finish_as<f16>(t);
    }
  }

  template <class T>
  void finish_as(long t) const {
    const long hidden = a_.down.out_features;
    const int32_t* slots = plan_.slot.data() + t * a_.top_k;
    const T* residual = a_.residual ? (const T*)a_.residual + (from_ + t) * a_.residual_stride : nullptr;
    T* out = (T*)a_.out + (from_ + t) * hidden;
    for (long d = 0; d < hidden; d += VL) {
      vf y = residual ? load_upto(residual + d, hidden - d) : vf{};
      for (int k = 0; k < a_.top_k; ++k)
        if (slots[k] >= 0) y += load(y_ + slots[k] * hidden_ + d);
      store_upto(out + d, y, hidden - d);
    }
  }

  const QuantizedExperts& a_;
  const Plan& plan_;
  const PackedLayout first_, second_;
  const long from_, count_, inner_, hidden_, words_, sums_;  // words_, sums_: of a group, laid out
  float *h_, *y_, *scales_;
  Word* laid_;
  Sum* laid_sums_;
};

template <class I>
void run(const QuantizedExperts& a) {
  static thread_local Plan plan;
  static thread_local Scratch memory;
  const long step = std::max<long>(1, MOST_SLOTS / a.top_k);
  for (long from = 0; from < a.tokens; from += step) {
    const long count = std::min(step, a.tokens - from);
    plan.make(a.ids, a.weights, a.top_k, a.experts, from, count, I::ROWS);
    Run<I> part(a, plan, memory, from, count);
    std::atomic<long> next[2] = {{0}, {0}};
    parallel(a.threads, [&](const Team& team) {
      static thread_local Scratch scratch;
      part.work(team, next, scratch);
    });
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" void baton_quantized_experts(const QuantizedExperts* a) {
#if defined(BATON_AMX)
  if (a->amx && a->tokens * a->top_k >= a->experts * AMX_LEAST_ROWS) {
    if (a->int8_inputs) return run<AmxInt8Inputs>(*a);
    if (a->dtype == 1) return run<AmxBf16Inputs>(*a);
  }
#endif
#if defined(BATON_AVX512_BF16)
  const bool held = PairInputs::hold(a->gate_up, a->gate_up_table) && PairInputs::hold(a->down, a->down_table);
  if (a->pairs && !a->int8_inputs && a->dtype == 1 && held) return run<PairInputs>(*a);
#endif
  a->int8_inputs ? run<Int8Inputs>(*a) : run<FloatInputs>(*a);
}
