// Row-wise operations between the linears: RMS norm, and silu(gate) * up.
#include <algorithm>

#include "team.h"
#include "vec.h"

namespace baton {
namespace {

constexpr long ROWS_PER_THREAD = 4;  // fewer are not worth waking another thread

struct RowOp {
  const void *x, *weight;
  void* out;
  int64_t rows, dim, x_stride;  // dim: elements of a row of `out`
  int32_t dtype, threads;
  float eps, offset;  // offset: added to the weight
};

template <class T>
void rms_norm_row(const RowOp& a, const T* x, T* out) {
  const long n = a.dim;
  vf squares = vf{};
  for (long d = 0; d < n; d += VL) {
    const vf v = load_upto(x + d, n - d);
    squares += v * v;
  }
  const float scale = 1.0f / std::sqrt(sum(squares) / n + a.eps);
  const T* weight = (const T*)a.weight;
  for (long d = 0; d < n; d += VL)
    store_upto(out + d, load_upto(x + d, n - d) * scale * (load_upto(weight + d, n - d) + a.offset), n - d);
}

template <class T>
void silu_mul_row(const RowOp& a, const T* x, T* out) {
  const long n = a.dim;
  for (long d = 0; d < n; d += VL) {
    // bounded below so that e^-gate stays finite: further down the result is as good as zero
    const vf gate = vmax(load_upto(x + d, n - d), splat(-87.0f)), up = load_upto(x + n + d, n - d);
    const vf e = exp2v<false>(gate * -LOG2E);
    store_upto(out + d, gate / (e + 1.0f) * up, n - d);
  }
}

template <class Row>
void rows_of(const RowOp& a, Row row) {
  const int threads = (int)std::max<long>(1, std::min<long>(a.threads, a.rows / ROWS_PER_THREAD));
  parallel(threads, [&](const Team& team) { team.share(a.rows, row); });
}

template <class T>
void rms_norm(const RowOp& a) {
  rows_of(a, [&](long r) { rms_norm_row(a, (const T*)a.x + r * a.x_stride, (T*)a.out + r * a.dim); });
}
template <class T>
void silu_mul(const RowOp& a) {
  rows_of(a, [&](long r) { silu_mul_row(a, (const T*)a.x + r * a.x_stride, (T*)a.out + r * a.dim); });
}

}  // namespace
}  // namespace baton

using namespace baton;

// x [rows][dim] -> out [rows][dim]
extern "C" void baton_rms_norm(const RowOp* a) {
  switch (a->dtype) {
    case 0: return rms_norm<float>(*a);
    case 1: return rms_norm<bf16>(*a);
    case 2: return rms_norm<f16>(*a);
  }
}

// x [rows][2 dim], gates first -> out [rows][dim]
extern "C" void baton_silu_mul(const RowOp* a) {
  switch (a->dtype) {
    case 0: return silu_mul<float>(*a);
    case 1: return silu_mul<bf16>(*a);
    case 2: return silu_mul<f16>(*a);
  }
}
