// Which experts a token goes through, and with which weights, from the router's logits.
#include <vector>

#include "operators.h"
#include "team.h"
#include "vec.h"

namespace baton {
namespace {

constexpr long TOKENS_PER_THREAD = 64;  // fewer are not worth waking another thread

// As Python numbers them (`Scoring` in experts.py).
enum ScoringKind : int32_t { SOFTMAX = 0, SOFTMAX_OF_CHOSEN = 1, SIGMOID = 2 };

// The `count` largest of n, the first ones among equals, largest first.
void largest_of(const float* x, int n, int count, int32_t* out) {
  int found = 0;
  for (int i = 0; i < n; ++i) {
    if (found == count && !(x[i] > x[out[count - 1]])) continue;
    int at = found < count ? found++ : count - 1;
    for (; at > 0 && x[i] > x[out[at - 1]]; --at) out[at] = out[at - 1];
    out[at] = i;
  }
}

// Scores of experts outside of the best groups become minus infinity; a group is as good as its two best together.
void keep_best_groups(const Routing& a, float* choice, float* sums, int32_t* best) {
  const int each = a.experts / a.groups;
  for (int g = 0; g < a.groups; ++g) {
    float first = NEG_INF, second = NEG_INF;
    for (int i = 0; i < each; ++i) {
      const float x = choice[g * each + i];
      if (x > first)
        second = first, first = x;
      else
        second = std::max(second, x);
    }
    sums[g] = first + second;
  }
  largest_of(sums, a.groups, a.top_groups, best);
  for (int g = 0; g < a.groups; ++g)
    if (std::find(best, best + a.top_groups, g) == best + a.top_groups)
      std::fill(choice + g * each, choice + (g + 1) * each, NEG_INF);
}

// Exponentials of x - its largest, in place; returns their sum.
float exponentials(float* x, int n) {
  const float top = *std::max_element(x, x + n);
  float total = 0;
  for (int i = 0; i < n; ++i) total += x[i] = std::exp(x[i] - top);
  return total;
}

template <class T>
void route(const Routing& a, long t, float* scores, float* choice, float* sums, int32_t* best) {
  const T* logits = (const T*)a.logits + t * a.experts;
  int32_t* ids = a.ids + t * a.top_k;
  float* weights = a.weights + t * a.top_k;
  for (int e = 0; e < a.experts; e += VL) store_upto(scores + e, load_upto(logits + e, a.experts - e), a.experts - e);
  float total = 1;
  if (a.scoring == SOFTMAX) total = exponentials(scores, a.experts);
  if (a.scoring == SIGMOID)
    for (int e = 0; e < a.experts; ++e) scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
  for (int e = 0; e < a.experts; ++e) choice[e] = scores[e] + (a.bias ? a.bias[e] : 0.0f);
  if (a.groups > 1) keep_best_groups(a, choice, sums, best);
  largest_of(choice, a.experts, a.top_k, ids);
  for (int k = 0; k < a.top_k; ++k) weights[k] = scores[ids[k]];
  if (a.scoring == SOFTMAX_OF_CHOSEN) total = exponentials(weights, a.top_k);
  if (a.normalize) {
    total = 0;
    for (int k = 0; k < a.top_k; ++k) total += weights[k];
    if (a.scoring == SIGMOID) total += 1e-20f;
  }
  for (int k = 0; k < a.top_k; ++k) weights[k] = weights[k] / total * a.scale;
}

template <class T>
void run(const Routing& a) {
  const int threads = (int)std::max<long>(1, std::min<long>(a.threads, a.tokens / TOKENS_PER_THREAD));
  parallel(threads, [&](const Team& team) {
    std::vector<float> work(2 * a.experts + a.groups);
    std::vector<int32_t> best(a.groups);
    float *scores = work.data(), *choice = scores + a.experts, *sums = choice + a.experts;
    team.share(a.tokens, [&](long t) { route<T>(a, t, scores, choice, sums, best.data()); });
  });
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" void baton_route(const Routing* a) {
  if (a->dtype == 0) return run<float>(*a);
  run<bf16>(*a);
}
