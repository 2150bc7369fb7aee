// What gated MLPs do between their linears: activation(gate) * up.
#pragma once
#include "vec.h"

namespace baton {

// As Python numbers them (`Activation` in row_wise.py).
enum ActivationKind : int32_t { SILU = 0, GELU_TANH = 1, CLIPPED_SWISH = 2 };

inline vf vmin(vf a, vf b) { return -vmax(-a, -b); }

// 1 / (1 + e^-x); bounded below so that e^-x stays finite: further down it is as good as zero.
inline vf sigmoidv(vf x) { return 1.0f / (exp2v<false>(vmax(x, splat(-87.0f)) * -LOG2E) + 1.0f); }

// CLIPPED_SWISH: gate * sigmoid(alpha gate) * (up + 1), gate at most `limit`, up within +-limit.
template <int kind>
inline vf gated(vf gate, vf up, float alpha, float limit) {
  if (kind == SILU) {
    gate = vmax(gate, splat(-87.0f));  // the product with a sigmoid that is as good as zero
    return gate * sigmoidv(gate) * up;
  }
  if (kind == GELU_TANH) {
    gate = vmax(gate, splat(-87.0f));
    // (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (gate + 0.044715 gate^3)
    return gate * sigmoidv(gate * (gate * gate * 0.07135481627f + 1.59576912161f)) * up;
  }
  gate = vmin(gate, splat(limit));
  up = vmax(vmin(up, splat(limit)), splat(-limit));
  return vmax(gate, splat(-87.0f)) * sigmoidv(gate * alpha) * (up + 1.0f);
}

}  // namespace baton
