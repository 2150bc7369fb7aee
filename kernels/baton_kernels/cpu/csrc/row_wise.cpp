// Row-wise operations between the linears: RMS norm (and a residual added to it), and activation(gate) * up.
#include <algorithm>

#include "activation.h"
#include "operators.h"
#include "team.h"

namespace baton {
namespace {

constexpr long ROWS_PER_THREAD = 4;  // fewer are not worth waking another thread

template <class T>
void rms_norm_row(const RowOp& a, const T* x, const T* residual, T* out) {
  const long n = a.dim;
  vf squares = vf{};
  for (long d = 0; d < n; d += VL) {
    const vf v = load_upto(x + d, n - d);
    squares += v * v;
  }
  const float scale = 1.0f / std::sqrt(sum(squares) / n + a.eps);
  const T* weight = (const T*)a.weight;
  for (long d = 0; d < n; d += VL) {
    vf y = load_upto(x + d, n - d) * scale * (load_upto(weight + d, n - d) + a.offset);
    if (residual) y += load_upto(residual + d, n - d);
    store_upto(out + d, y, n - d);
  }
}

template <class T, int kind>
void gated_row(const RowOp& a, const T* x, T* out) {
  const long n = a.dim;
  for (long d = 0; d < n; d += VL) {
    const vf gate = load_upto(x + d, n - d), up = load_upto(x + n + d, n - d);
    store_upto(out + d, gated<kind>(gate, up, a.alpha, a.limit), n - d);
  }
}

template <class Row>
void rows_of(const RowOp& a, Row row) {
  const int threads = (int)std::max<long>(1, std::min<long>(a.threads, a.rows / ROWS_PER_THREAD));
  parallel(threads, [&](const Team& team) { team.share(a.rows, row); });
}

template <class T>
void rms_norm(const RowOp& a) {
  rows_of(a, [&](long r) {
    const T* residual = a.residual ? (const T*)a.residual + r * a.dim : nullptr;
    rms_norm_row(a, (const T*)a.x + r * a.x_stride, residual, (T*)a.out + r * a.dim);
  });
}
template <class T, int kind>
void gated_rows(const RowOp& a) {
  rows_of(a, [&](long r) { gated_row<T, kind>(a, (const T*)a.x + r * a.x_stride, (T*)a.out + r * a.dim); });
}
template <class T>
void gated_mul(const RowOp& a) {
  switch (a.activation) {
    case SILU: return gated_rows<T, SILU>(a);
    case GELU_TANH: return gated_rows<T, GELU_TANH>(a);
    case CLIPPED_SWISH: return gated_rows<T, CLIPPED_SWISH>(a);
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

// x [rows][dim], residual [rows][dim] or null -> out [rows][dim]
extern "C" void baton_rms_norm(const RowOp* a) {
  switch (a->dtype) {
    case 0: return rms_norm<float>(*a);
    case 1: return rms_norm<bf16>(*a);
    case 2: return rms_norm<f16>(*a);
  }
}

// x [rows][2 dim], gates first -> out [rows][dim]
extern "C" void baton_gated_mul(const RowOp* a) {
  switch (a->dtype) {
    case 0: return gated_mul<float>(*a);
    case 1: return gated_mul<bf16>(*a);
    case 2: return gated_mul<f16>(*a);
  }
}
