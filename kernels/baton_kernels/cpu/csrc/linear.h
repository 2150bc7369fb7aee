// What the two linear operators (linear.cpp, linear_amx.cpp) share.
#pragma once
#include <algorithm>

#include "operators.h"
#include "team.h"
#include "vec.h"

namespace baton {

constexpr int PW = 2 * VL;  // columns of a panel of weights

// Write columns `column` to column + PW of a row of the output: sums [PW], bias and residual added, rounded once.
inline void finish_row(const Linear& a, long row, long column, const float* sums) {
  const long width = std::min<long>(PW, a.out_features - column);
  bf16* to = (bf16*)a.out + row * a.out_stride + column;
  const bf16* residual = a.residual ? (const bf16*)a.residual + row * a.residual_stride + column : nullptr;
  for (long c = 0; c < width; c += VL) {
    vf y = load(sums + c);
    if (a.bias) y += load_upto(a.bias + column + c, width - c);
    if (residual) y += load_upto(residual + c, width - c);
    store_upto(to + c, y, width - c);
  }
}

}  // namespace baton
