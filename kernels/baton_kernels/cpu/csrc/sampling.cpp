// From logits to a token per row: a mask, temperature, top-k, top-p and min-p, then a draw by an exponential race, in two
// rounds (chunks of CHUNK tokens, then the tokens of the chunk that won). Chunks that a mask forbids are never looked
// at. The definition is baton/engine/sample; the random numbers are the same, SplitMix64 keyed by seed and position.
#include <algorithm>
#include <functional>
#include <vector>

#include "operators.h"
#include "team.h"
#include "vec.h"

namespace baton {
namespace {

constexpr long CHUNK = 128, VECTORS = CHUNK / VL, WORDS = CHUNK / 32;  // tokens, vectors of them, and words of a mask
constexpr long SAMPLE = 128, MARGIN = 14;  // weights that bracket a threshold, and how many of them on each side
constexpr long MOST_KEPT = 8;
constexpr long TOLD = 4;  // tokens that are told together: one by one, ten calls a step of 16 rows became three
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u, TOKENS = 1ull << 32;

// Wait a little, in a loop that waits for another thread.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// What all random numbers of a draw come from.
inline uint64_t key_of(uint64_t seed, uint64_t position) { return mix(seed + (position + 1) * GOLDEN); }

// The key of a draw that follows the one of a key: a number of that key, 2^63, which no draw uses.
inline uint64_t next_key(uint64_t key) { return mix(key + ((1ull << 63) + 1) * GOLDEN); }

// The i-th number of a draw, between 0 and 1; minus its logarithm is exponentially distributed with mean 1.
inline double uniform(uint64_t key, uint64_t i) {
  return ((double)(mix(key + (i + 1) * GOLDEN) >> 11) + 0.5) * 0x1p-53;
}

#if defined(__AVX2__) && !defined(BATON_AVX512)
// By the bits of a mask: the lanes that it has, one a byte, and behind them any.
struct Lanes {
  uint64_t of[256];
  constexpr Lanes() : of{} {
    for (int bits = 0; bits < 256; ++bits)
      for (int lane = 0, count = 0; lane < 8; ++lane)
        if (bits >> lane & 1) of[bits] |= (uint64_t)lane << 8 * count++;
  }
};
constexpr Lanes LANES;
#endif

inline bool any(vi mask) {
#if defined(BATON_AVX512)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask);
#else
  int32_t found = 0;
  for (int i = 0; i < VL; ++i) found |= mask[i];
  return found;
#endif
}

// Append the lanes of x that a mask has to `out`, which has room for VL more; returns the new end.
inline float* append(float* out, vf x, vi mask) {
#if defined(BATON_AVX512)
  const __mmask16 bits = _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
  _mm512_storeu_ps(out, _mm512_maskz_compress_ps(bits, (__m512)x));
  return out + __builtin_popcount(bits);
#elif defined(__AVX2__)
  const int bits = _mm256_movemask_ps((__m256)mask);
  const __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)LANES.of[bits]));
  _mm256_storeu_ps(out, _mm256_permutevar8x32_ps((__m256)x, lanes));
  return out + __builtin_popcount(bits);
#else
  if (any(mask))
    for (int i = 0; i < VL; ++i) {
      *out = x[i];
      out += mask[i] != 0;
    }
  return out;
#endif
}

// Sums of many floats: lanes are emptied into a double before they lose digits.
class Sum {
 public:
  void add(vf x) {
    lanes_ += x;
    if (++count_ == 64) flush();
  }
  double value() {
    flush();
    return total_;
  }

 private:
  void flush() {
    total_ += sum(lanes_);
    lanes_ = vf{};
    count_ = 0;
  }
  vf lanes_{};
  double total_ = 0;
  int count_ = 0;
};

// The lanes whose bit is among the lowest of `bits`.
inline vi lanes_of(uint32_t bits) {
  vi own;
  for (int i = 0; i < VL; ++i) own[i] = 1 << i;
  return ((vi{} + (int32_t)bits) & own) == own;
}

// A row while it is sampled, padded to whole chunks. Memory of one thread. Values of a chunk whose maximum is -inf, and
// weights of one whose sum is 0, are not written.
struct Row {
  float *values, *maxima, *sums, *spare, *other;  // [padded], [chunks], [chunks], twice [padded + VL]
  long vocab, chunks;
};

// Load a chunk, padded with -inf. `allowed` has a bit per token.
template <bool MASKED, class T>
inline void load_chunk(const T* logits, const uint32_t* allowed, long vocab, long c, vf* x) {
  const long begin = c * CHUNK;
  for (long i = 0; i < VECTORS; ++i) {
    const long d = begin + i * VL;
    if (d + VL <= vocab) {
      x[i] = load(logits + d);
    } else {
      x[i] = splat(NEG_INF);
      for (long j = d; j < vocab; ++j) x[i][j - d] = load_part(logits + j, 1)[0];
    }
    if constexpr (MASKED) x[i] = select(lanes_of(allowed[i * VL / 32] >> i * VL % 32), x[i], splat(NEG_INF));
  }
}

// Call each(c, x) with the vectors of all chunks, null for those of which a mask has nothing: these are not looked at.
template <class T, class F>
inline void each_chunk(const T* logits, const uint32_t* mask, long vocab, long chunks, F each) {
  const long words = (vocab + 31) / 32;
  vf x[VECTORS];
  for (long c = 0; c < chunks; ++c) {
    uint32_t allowed[WORDS] = {}, some = 0, every = ~0u;
    if (mask) {
      for (long i = 0; i < WORDS && c * WORDS + i < words; ++i) allowed[i] = mask[c * WORDS + i];
      for (uint32_t word : allowed) some |= word, every &= word;
      if (!some) {
        each(c, nullptr);
        continue;
      }
    }
    if (every == ~0u)
      load_chunk<false>(logits, nullptr, vocab, c, x);
    else
      load_chunk<true>(logits, allowed, vocab, c, x);
    each(c, x);
  }
}

// The greatest of a chunk's values; lanes of `odd` are set where there is a NaN.
inline float greatest_of(const vf* x, vi& odd) {
  vf most = x[0];
  for (long i = 0; i < VECTORS; ++i) most = vmax(most, x[i]), odd |= x[i] != x[i];
  return largest(most);
}

// Read a row: values, maxima of chunks; returns the maximum of what the mask allows, NaN if there is any.
template <class T>
float read(const T* logits, const uint32_t* mask, Row& row) {
  float all = NEG_INF;
  vi odd{};
  each_chunk(logits, mask, row.vocab, row.chunks, [&](long c, const vf* x) {
    row.maxima[c] = NEG_INF;
    if (!x) return;
    row.maxima[c] = greatest_of(x, odd);
    all = std::max(all, row.maxima[c]);
    for (long i = 0; i < VECTORS; ++i) store(row.values + c * CHUNK + i * VL, x[i]);
  });
  return any(odd) ? NAN : all;
}

long first_of(const Row& row, float value) {
  long c = 0;
  while (row.maxima[c] != value) ++c;
  long i = c * CHUNK;
  while (row.values[i] != value) ++i;
  return i;
}

// The k-th greatest value. Of the chunks' maxima the k-th greatest is a bound: few values are above it.
float kth_greatest(Row& row, long k) {
  float* end = row.spare;
  float bound = NEG_INF;
  if (k <= row.chunks) {
    std::copy(row.maxima, row.maxima + row.chunks, row.spare);
    std::nth_element(row.spare, row.spare + (k - 1), row.spare + row.chunks, std::greater<float>());
    bound = row.spare[k - 1];
  }
  for (long c = 0; c < row.chunks; ++c) {
    if (row.maxima[c] < bound || row.maxima[c] == NEG_INF) continue;
    for (long d = c * CHUNK; d < (c + 1) * CHUNK; d += VL) {
      const vf x = load(row.values + d);
      end = append(end, x, x >= splat(bound));
    }
  }
  if (end - row.spare < k) return NEG_INF;
  std::nth_element(row.spare, row.spare + (k - 1), end, std::greater<float>());
  return row.spare[k - 1];
}

// Weights divided by two bounds: those in [low, high) were appended from `begin` to `end`; sums of them and of those above.
struct Division {
  float *begin, *end;
  double between, above;
};

class Divider {
 public:
  Divider(float low, float high, float* out) : low_(splat(low)), high_(splat(high)), begin_(out), end_(out) {}
  void add(vf x) {
    const vi over = x >= high_, inside = (x >= low_) & ~over & (x > vf{});
    above_.add(select(over, x, vf{}));
    between_.add(select(inside, x, vf{}));
    end_ = append(end_, x, inside);
  }
  Division result() { return {begin_, end_, between_.value(), above_.value()}; }

 private:
  vf low_, high_;
  float *begin_, *end_;
  Sum between_, above_;
};

Division divide(const Row& row, float low, float high) {
  Divider divider(low, high, row.spare);
  for (long c = 0; c < row.chunks; ++c)
    if (row.sums[c] > 0.0f)
      for (long d = c * CHUNK; d < (c + 1) * CHUNK; d += VL) divider.add(load(row.values + d));
  return divider.result();
}
Division divide(const float* values, long n, float low, float high, float* out) {
  Divider divider(low, high, out);
  for (long d = 0; d < n; d += VL) divider.add(load_upto(values + d, n - d));  // zeros behind the end are in no part
  return divider.result();
}

// A sample of a row's weights, sorted down, in which each stands for the same part of their sum.
void sample_by_weight(const Row& row, double total, float* sample) {
  long c = 0;
  double before = 0;  // of the chunks before this one
  for (long i = 0; i < SAMPLE; ++i) {
    const double want = (i + 0.5) * total / SAMPLE;
    while (c + 1 < row.chunks && before + row.sums[c] < want) before += row.sums[c++];
    const float* at = row.values + c * CHUNK;
    const float* const last = at + CHUNK - VL;
    double seen = before;
    for (; at < last; at += VL) {
      const float more = sum(load(at));
      if (seen + more >= want) break;
      seen += more;
    }
    long lane = 0;
    while (lane + 1 < VL && (seen += at[lane]) < want) ++lane;
    sample[i] = at[lane];
  }
  std::sort(sample, sample + SAMPLE, std::greater<float>());
}

// The least of the fewest greatest weights whose sum reaches `target`. A sample brackets it; what lies in the bracket is
// looked at again, until it is few. The weights are left as they are.
float nucleus(Row& row, double total, double target) {
  const float inf = std::numeric_limits<float>::infinity();
  float sample[SAMPLE];
  sample_by_weight(row, total, sample);
  long at = std::min<long>(SAMPLE - 1, (long)(target / total * SAMPLE));
  const long margin = 2 + (long)(2.5 * std::sqrt(at * (1.0 - (double)at / SAMPLE)));
  // All weights below the second bound have less together than what may be left out.
  const float needless = (float)(0.5 * (total - target) / (row.chunks * CHUNK));
  float high = at > margin ? sample[at - margin] : inf, low = at + margin < SAMPLE ? sample[at + margin] : needless;
  Division part = divide(row, low, high);
  double done = 0;  // the sum of the weights above all that are looked at
  if (part.above >= target) {  // the sample misled: it is above the bracket ...
    part = divide(row, high, inf);
  } else if (part.above + part.between < target) {  // ... or below
    done = part.above + part.between;
    part = divide(row, 0.0f, low);
  } else {
    done = part.above;
  }
  for (long n; (n = part.end - part.begin) > SAMPLE;) {
    const float* const values = part.begin;
    float* const to = values == row.spare ? row.other : row.spare;
    // Those left are much alike: a sample by number does.
    for (long i = 0; i < SAMPLE; ++i) sample[i] = values[i * n / SAMPLE];
    std::sort(sample, sample + SAMPLE, std::greater<float>());
    double seen = done;
    for (at = 0; at < SAMPLE; ++at)
      if ((seen += (double)sample[at] * n / SAMPLE) >= target) break;
    high = at > MARGIN ? sample[at - MARGIN] : inf, low = at + MARGIN < SAMPLE ? sample[at + MARGIN] : 0.0f;
    part = divide(values, n, low, high, to);
    if (done + part.above >= target) {
      part = divide(values, n, high, inf, to);
    } else if (done + part.above + part.between < target) {
      done += part.above + part.between;
      part = divide(values, n, 0.0f, low, to);
    } else {
      done += part.above;
    }
    if (part.end - part.begin == n) break;  // so many are equal
  }
  if (part.begin == part.end) return low;  // rounding: all of them together do not reach it
  std::sort(part.begin, part.end, std::greater<float>());
  const float* last = part.begin;
  for (double before = done; last < part.end && before < target; ++last) before += *last;
  return last == part.begin ? *last : last[-1];
}

// Replace the values by weights, exp((x - greatest) / temperature), 0 below `bound`; returns their sum. `below`: null,
// or where the sum goes of what is below.
double weigh(Row& row, float greatest, float scale, float bound, double* below) {
  Sum total, rest;
  const vf top = splat(greatest), factor = splat(scale * LOG2E), least = splat(bound);
  for (long c = 0; c < row.chunks; ++c) {
    float* const at = row.values + c * CHUNK;
    vf all = vf{};
    if (row.maxima[c] >= bound && row.maxima[c] != NEG_INF) {
      for (long d = 0; d < CHUNK; d += VL) {
        const vf x = load(at + d), all_w = exp2v<false>((x - top) * factor);
        const vf w = select(x >= least, all_w, vf{});
        store(at + d, w);
        all += w;
        if (below) rest.add(all_w - w);
      }
    } else if (below && row.maxima[c] != NEG_INF) {
      for (long d = 0; d < CHUNK; d += VL) rest.add(exp2v<false>((load(at + d) - top) * factor));
    }
    row.sums[c] = sum(all);
    total.add(all);
  }
  if (below) *below = rest.value();
  return total.value();
}

// Write the tokens that the filters leave, padded with -1, if they would leave the same whichever others a mask forbids,
// and if they are few; else -1 alone. All of them being allowed, top-k and min-p leave the same: the greatest is among
// them. Top-p leaves the fewest whose weights reach a share of what is allowed, which is between their own sum and that
// of all tokens: it is the same if without the least (and its equals) they are below the share of their sum, and with
// them not below that of all.
void write_kept(const Row& row, float top_p, double all, int64_t* out) {
  long n = 0;
  double total = 0, equal = 0;
  float least = std::numeric_limits<float>::infinity();
  std::fill(out, out + MOST_KEPT, -1);
  for (long c = 0; c < row.chunks; ++c) {
    if (!(row.sums[c] > 0.0f)) continue;
    for (long i = c * CHUNK; i < (c + 1) * CHUNK; ++i) {
      const float w = row.values[i];
      if (!(w > 0.0f)) continue;
      if (n == MOST_KEPT) return void(out[0] = -1);
      out[n++] = i;
      total += w;
      if (w < least) least = w, equal = 0;
      if (w == least) equal += w;
    }
  }
  constexpr double ROUNDING = 1e-4;
  if (top_p >= 1.0f) return;
  if (total - equal >= (1 - ROUNDING) * top_p * total || total < (1 + ROUNDING) * top_p * all) out[0] = -1;
}

// Drop the weights below `least`.
void drop(Row& row, float least) {
  for (long c = 0; c < row.chunks; ++c) {
    if (row.sums[c] == 0.0f) continue;
    float* const at = row.values + c * CHUNK;
    vf all = vf{};
    for (long d = 0; d < CHUNK; d += VL) {
      const vf x = load(at + d), w = select(x >= splat(least), x, vf{});
      store(at + d, w);
      all += w;
    }
    row.sums[c] = sum(all);
  }
}

// Which of n weights arrives first; those of 0 never do. A logarithm takes longer than all else here, and few are taken:
// as -log(u) > 1 - u, most arrive later than another one whatever theirs is.
long race(const float* weights, long n, uint64_t key, uint64_t first_number) {
  double soonest = std::numeric_limits<double>::infinity();
  long winner = 0;
  for (long i = 0; i < n; ++i) {
    if (!(weights[i] > 0.0f)) continue;
    const double u = uniform(key, first_number + i);
    if (1.0 - u > soonest * weights[i]) continue;
    const double arrival = -std::log(u) / weights[i];
    if (arrival < soonest) soonest = arrival, winner = i;
  }
  return winner;
}

// Draw from all that the mask has, or -1 as sample_row does. Weights are not kept, only the sums of chunks: relative to a
// value that is as good as the greatest, and seldom another one than for the chunk before. Then the chunk that won is
// looked at again. Reading a row once, and writing none of it, takes half the time of weighing the values that were read.
template <class T>
int64_t draw_freely(const T* logits, const uint32_t* mask, Row& row, float scale, uint64_t key) {
  constexpr float MOST = 30.0f;  // a weight's greatest exponent
  const float factor = scale * LOG2E;
  float base = NEG_INF, greatest = NEG_INF;
  vi odd{};
  each_chunk(logits, mask, row.vocab, row.chunks, [&](long c, const vf* x) {
    row.sums[c] = 0.0f, row.maxima[c] = base;
    if (!x) return;
    const float own = greatest_of(x, odd);
    greatest = std::max(greatest, own);
    if (!((own - base) * factor <= MOST)) row.maxima[c] = base = own;
    if (own == NEG_INF) return;
    const vf zero = splat(base), by = splat(factor);
    vf all{};
    for (long i = 0; i < VECTORS; ++i) all += exp2v<false>((x[i] - zero) * by);
    row.sums[c] = sum(all);
  });
  if (any(odd) || !std::isfinite(greatest)) return -1;
  for (long c = 0; c < row.chunks; c += VL) {
    const vf apart = (load_upto(row.maxima + c, row.chunks - c) - splat(base)) * splat(factor);
    const vf sums = load_upto(row.sums + c, row.chunks - c) * exp2v<false>(apart);
    for (long i = 0; i < VL && c + i < row.chunks; ++i) row.sums[c + i] = row.sums[c + i] > 0.0f ? sums[i] : 0.0f;
  }
  const long chunk = race(row.sums, row.chunks, key, 0), begin = chunk * CHUNK;
  uint32_t allowed[WORDS];
  for (long i = 0; i < WORDS; ++i) {
    const long word = chunk * WORDS + i;
    allowed[i] = !mask ? ~0u : word < (row.vocab + 31) / 32 ? mask[word] : 0;
  }
  vf x[VECTORS];
  load_chunk<true>(logits, allowed, row.vocab, chunk, x);
  const vf own = splat(greatest_of(x, odd));
  for (long i = 0; i < VECTORS; ++i) store(row.values + i * VL, exp2v<false>((x[i] - own) * splat(factor)));
  return std::min<long>(begin + race(row.values, CHUNK, key, TOKENS + begin), row.vocab - 1);
}

template <class T>
int64_t sample_row(const SampleOp& a, long r, Row& row) {
  const long own = a.at ? a.at[r] : r;
  const T* const logits = (const T*)a.logits + own * a.stride;
  const uint32_t* const mask = a.masks ? a.masks[r] : nullptr;
  const Filter& filter = a.filters[r];
  const long k = filter.top_k;
  const bool filtered = k > 0 || filter.top_p < 1.0f || filter.min_p > 0.0f;
  const uint64_t key = key_of(a.seeds[own], a.positions[own]);
  if (a.kept) a.kept[r * MOST_KEPT] = -1;
  if (filter.temperature > 0.0f && !filtered)
    return draw_freely(logits, mask, row, 1.0f / filter.temperature, a.again ? next_key(key) : key);
  const float greatest = read(logits, mask, row);
  if (!std::isfinite(greatest)) return -1;
  if (filter.temperature == 0.0f) return first_of(row, greatest);
  const float bound = k > 0 && k < a.vocab ? kth_greatest(row, k) : NEG_INF;
  double below = 0;
  double* const rest = a.kept && bound != NEG_INF ? &below : nullptr;
  const double total = weigh(row, greatest, 1.0f / filter.temperature, bound, rest);
  float least = filter.min_p;
  if (filter.top_p < 1.0f) least = std::max(least, nucleus(row, total, filter.top_p * total));
  if (least > 0.0f) drop(row, least);
  if (a.kept) write_kept(row, filter.top_p, total + below, a.kept + r * MOST_KEPT);
  const long chunk = race(row.sums, row.chunks, key, 0);
  const long token = chunk * CHUNK + race(row.values + chunk * CHUNK, CHUNK, key, TOKENS + chunk * CHUNK);
  return std::min<long>(token, a.vocab - 1);
}

// The rows in the order in which they are taken: those that are watched come first.
std::vector<int64_t> order_of(const SampleOp& a) {
  std::vector<int64_t> order(a.watched, a.watched + a.num_watched);
  std::vector<bool> first(a.rows);
  for (const int64_t r : order) first[r] = true;
  for (int64_t r = 0; r < a.rows; ++r)
    if (!first[r]) order.push_back(r);
  return order;
}

template <class T>
void sample_rows(const SampleOp& a) {
  const long chunks = (a.vocab + CHUNK - 1) / CHUNK, padded = chunks * CHUNK;
  const std::vector<int64_t> order = order_of(a);
  std::atomic<long> next{0};
  std::vector<std::atomic<bool>> there(a.num_watched);
  parallel((int)std::max<long>(1, std::min<long>(a.threads, a.rows)), [&](const Team& team) {
    static thread_local Scratch scratch;
    float* const memory = scratch.get<float>(3 * padded + 2 * round_up(chunks, VL) + 2 * VL);
    Row row;
    row.values = memory, row.spare = memory + padded, row.other = row.spare + padded + VL;
    row.maxima = row.other + padded + VL;
    row.sums = row.maxima + round_up(chunks, VL), row.vocab = a.vocab, row.chunks = chunks;
    const auto choose = [&](long i) {
      a.tokens[order[i]] = sample_row<T>(a, order[i], row);
      if (i < a.num_watched) there[i].store(true, std::memory_order_release);
    };
    if (!a.num_watched || team.thread != 0) return take(next, a.rows, choose);
    // What this thread is told to do with tokens it does while others choose the next ones.
    bool left = true;
    for (long told = 0; told < a.num_watched || left;) {
      long end = told;
      while (end < a.num_watched && there[end].load(std::memory_order_acquire)) ++end;
      if (end - told >= TOLD || (end > told && (end == a.num_watched || !left))) {
        a.ready(told, end);
        told = end;
      } else if (left) {
        const long i = next.fetch_add(1, std::memory_order_relaxed);
        if ((left = i < a.rows)) choose(i);
      } else {
        relax();
      }
    }
  });
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" void baton_sample(const SampleOp* a) {
  switch (a->dtype) {
    case 0: return sample_rows<float>(*a);
    case 1: return sample_rows<bf16>(*a);
    case 2: return sample_rows<f16>(*a);
  }
}
