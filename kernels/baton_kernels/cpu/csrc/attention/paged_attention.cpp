// One call: write the new tokens' KV into the pool (on the way, where asked for, RMS norm of each head and rotary
// embedding), then attend, prompt chunks and decodes in one parallel loop.
#include "decode.h"
#include "decode_amx.h"
#include "latent_tile.h"
#include "stored_tile.h"

namespace baton {
namespace {

constexpr int ITEMS_PER_THREAD = 4;  // so that threads end together
constexpr long SPLIT_KEYS = 256;     // shortest part of a decode worth a merge

// A decode that is split over keys: its rows' partial results begin at `first` and at every `stride`th after it.
struct Split {
  int32_t seq, head, q0, rows, first, stride, count;
};

struct Plan {
  std::vector<Item> items;
  std::vector<Split> splits;
  int parts = 0;  // rows of partial results
};

// Tokens q0 to q1 of a sequence. `wanted`: keys, times heads, per item. Divided by heads first (nothing to merge), then by
// keys.
void add_decode(const Attention& a, int seq, int q0, int q1, long wanted, Plan& plan) {
  const long start = a.context_lens[seq] - (a.query_starts[seq + 1] - a.query_starts[seq]), end = start + q1;
  const long begin = a.window ? std::max<long>(0, start + q0 + 1 - a.window) : 0;
  const long keys = end - begin, pieces = std::max<long>(1, keys * a.kv_heads / wanted);
  const int heads = (int)((a.kv_heads + pieces - 1) / std::min<long>(pieces, a.kv_heads));
  const long parts = std::max<long>(1, std::min(keys / SPLIT_KEYS, keys / wanted));
  const long step = round_up((keys + parts - 1) / parts, KB);
  const int rows = a.num_heads / a.kv_heads * (q1 - q0);
  for (int head = 0; head < a.kv_heads; head += heads) {
    const int count = std::min(heads, a.kv_heads - head), first = plan.parts;
    for (long at = begin; at < end; at += step) {
      const long until = std::min(end, at + step);
      const int part = step >= keys ? -1 : plan.parts;
      if (part >= 0) plan.parts += count * rows;
      const long cost = (until - at) * count * (q1 - q0);
      plan.items.push_back({seq, head, count, q0, q1, (int)at, (int)until, part, at == begin, cost});
    }
    const int stride = count * rows;
    for (int h = 0; plan.parts > first && h < count; ++h)
      plan.splits.push_back({seq, head + h, q0, rows, first + h * rows, stride, (plan.parts - first) / stride});
  }
}

void add_tiles(const Attention& a, int seq, int tokens, int rows, Plan& plan) {
  const int group = a.num_heads / a.kv_heads, start = a.context_lens[seq] - tokens;
  const int step = std::max(1, rows / group);
  for (int head = 0; head < a.kv_heads; ++head)
    for (int at = 0; at < tokens; at += step) {
      const int until = std::min(tokens, at + step);
      const long keys = std::min<long>(start + until, a.window ? a.window + step : start + until);
      plan.items.push_back({seq, head, 1, at, until, 0, 0, -1, true, keys * (until - at) * group});
    }
}

// Heads whose keys and values are made on the way: as many rows to an item as leave work for all threads.
void add_expanded(const Attention& a, int seq, int tokens, Plan& plan) {
  const int start = a.context_lens[seq] - tokens;
  const int pieces = a.threads > 1 ? (ITEMS_PER_THREAD * a.threads + a.num_heads - 1) / a.num_heads : 1;
  const int step = std::min(MOST_ROWS, std::max(LEAST_ROWS, (tokens + pieces - 1) / pieces));
  for (int head = 0; head < a.num_heads; ++head)
    for (int at = 0; at < tokens; at += step) {
      const int until = std::min(tokens, at + step);
      plan.items.push_back({seq, head, 1, at, until, 0, 0, -1, true, (long)(start + until) * (until - at + LEAST_ROWS)});
    }
}

// Tokens of a sequence that the decode kernel takes at a time; 0: they go through tiles. `most`: rows of all of them.
int decode_tokens(const Attention& a, int seq, int most) {
  const int tokens = a.query_starts[seq + 1] - a.query_starts[seq], group = a.num_heads / a.kv_heads;
  if (a.key_up || a.is_tree(seq) || group > MAX_GROUP) return 0;
  return tokens == 1 || tokens * group <= most ? MAX_GROUP / group : 0;
}

// `rows`: about as many (token, head) rows make a tile. few: up to so many of a sequence with several tokens are decodes.
void make_plan(const Attention& a, int rows, int few, Plan& plan) {
  plan.items.clear(), plan.splits.clear(), plan.parts = 0;
  long decode_keys = 0;
  for (int seq = 0; seq < a.num_seqs; ++seq) {
    const int tokens = a.query_starts[seq + 1] - a.query_starts[seq], at_once = decode_tokens(a, seq, few);
    const long keys = std::min<long>(a.context_lens[seq], a.window ? a.window : a.context_lens[seq]);
    if (at_once) decode_keys += keys * ((tokens + at_once - 1) / at_once);
  }
  const long wanted = a.threads > 1 ? decode_keys * a.kv_heads / (a.threads * ITEMS_PER_THREAD) : decode_keys * a.kv_heads;
  for (int seq = 0; seq < a.num_seqs; ++seq) {
    const int tokens = a.query_starts[seq + 1] - a.query_starts[seq];
    if (a.key_up)
      add_expanded(a, seq, tokens, plan);
    else if (const int at_once = decode_tokens(a, seq, few))
      for (int at = 0; at < tokens; at += at_once)
        add_decode(a, seq, at, std::min(tokens, at + at_once), std::max(1l, wanted), plan);
    else if (tokens > 0)
      add_tiles(a, seq, tokens, rows, plan);
  }
  if (a.threads > 1)
    std::stable_sort(plan.items.begin(), plan.items.end(), [](const Item& x, const Item& y) { return x.cost > y.cost; });
}

// out = rotate(norm(x)); of the first `rotary` dims, the two halves, or neighbours, are turned against each other.
template <class T, class O>
inline void rotate_head(const Attention& a, const T* x, const T* weight, long position, float* work, O* out) {
  const int dim = a.k_dim, half = a.rotary / 2;
  for (int d = 0; d < dim; d += VL) store_upto(work + d, load_upto(x + d, dim - d), dim - d);
  if (weight) {
    vf squares = vf{};
    for (int d = 0; d < dim; d += VL) {
      const vf v = load_upto(work + d, dim - d);
      squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / dim + a.norm_eps);
    for (int d = 0; d < dim; d += VL) {
      const vf w = load_upto(weight + d, dim - d) + a.norm_offset;
      store_upto(work + d, load_upto(work + d, dim - d) * scale * w, dim - d);
    }
  }
  const float *cos = a.cos + position * half, *sin = a.sin + position * half;
  if (a.rotate_pairs) {
    float* turned = work + round_up(dim, VL);
    for (int i = 0; i < half; ++i) {
      const float even = work[2 * i], odd = work[2 * i + 1];
      turned[2 * i] = even * cos[i] - odd * sin[i], turned[2 * i + 1] = odd * cos[i] + even * sin[i];
    }
    for (int d = 0; d < a.rotary; d += VL) store_upto(out + d, load_upto(turned + d, a.rotary - d), a.rotary - d);
  }
  for (int d = 0; d < half && !a.rotate_pairs; d += VL) {
    const int left = half - d;
    const vf c = load_upto(cos + d, left), s = load_upto(sin + d, left);
    const vf x0 = load_upto(work + d, left), x1 = load_upto(work + half + d, left);
    store_upto(out + d, x0 * c - x1 * s, left);
    store_upto(out + half + d, x1 * c + x0 * s, left);
  }
  for (int d = a.rotary; d < dim; d += VL) store_upto(out + d, load_upto(work + d, dim - d), dim - d);
}

// Where the scale of a token's row is, or of a head's.
template <class S>
inline void* scale_of(const Attention& a, const void* scales, long block, long offset, int head) {
  if constexpr (Storage<S>::PER_HEAD) return (float*)scales + head;
  return (bf16*)scales + block * a.scale_stride + (long)head * a.block_size + offset;
}

// A head's key, rotated where asked for, and value of a token to a pool of the same type.
template <class T>
inline void write_head(const Attention& a, const T* key, const T* value, long position, float* work, T* k, T* v) {
  if (a.cos)
    rotate_head(a, key, (const T*)a.k_norm, position, work, k);
  else
    std::memcpy(k, key, a.k_dim * sizeof(T));
  if (!a.latent) std::memcpy(v, value, a.v_dim * sizeof(T));
}

// The same by way of floats, to a pool of another type.
template <class T, class S>
inline void write_stored(const Attention& a, const T* key, const T* value, long position, float* work, S* k, S* v,
                         void* k_scale, void* v_scale) {
  float* row = work + 2 * round_up(a.k_dim, VL);
  if (a.cos) {
    rotate_head(a, key, (const T*)a.k_norm, position, work, row);
  } else {
    for (int d = 0; d < a.k_dim; d += VL) store(row + d, load_upto(key + d, a.k_dim - d));
  }
  store_row(row, a.k_dim, k, k_scale);
  for (int d = 0; d < a.v_dim; d += VL) store(row + d, load_upto(value + d, a.v_dim - d));
  store_row(row, a.v_dim, v, v_scale);
}

// One new token: its keys and values to its slot of the pool, its queries, if they are to be rotated, in place.
template <class T, class S>
inline void write_token(const Attention& a, int seq, long token, long slot, float* work) {
  const long position = a.is_tree(seq) ? a.depth_position(seq, token) : slot;
  const long block = a.block_tables[seq * a.table_stride + slot / a.block_size], offset = slot % a.block_size;
  for (int h = 0; h < a.kv_heads; ++h) {
    S* k = (S*)a.k_pool + block * a.block_stride + ((long)h * a.block_size + offset) * a.k_dim;
    S* v = (S*)a.v_pool + block * a.block_stride + ((long)h * a.block_size + offset) * a.v_dim;
    const T *key = (const T*)a.k + token * a.k_token + h * a.k_head, *value = (const T*)a.v;
    if (!a.latent) value += token * a.v_token + h * a.v_head;
    if constexpr (std::is_same_v<T, S>)
      write_head(a, key, value, position, work, k, v);
    else
      write_stored(a, key, value, position, work, k, v, scale_of<S>(a, a.k_scales, block, offset, h),
                   scale_of<S>(a, a.v_scales, block, offset, h));
  }
  if (!a.cos) return;
  for (int h = 0; h < a.num_heads; ++h) {
    T* x = (T*)a.q + token * a.q_token + h * a.q_head;
    rotate_head(a, x, (const T*)a.q_norm, position, work, x);
  }
}

template <class T, class S>
void write(const Attention& a, const Team& team, Scratch& scratch) {
  float* work = scratch.get<float>(3 * round_up(std::max(a.k_dim, a.v_dim), VL));
  const long total = a.query_starts[a.num_seqs];
  const long from = total * team.thread / team.threads, to = total * (team.thread + 1) / team.threads;
  int seq = 0;
  for (long token = from; token < to; ++token) {
    while (a.query_starts[seq + 1] <= token) ++seq;
    write_token<T, S>(a, seq, token, a.context_lens[seq] - a.query_starts[seq + 1] + token, work);
  }
}

template <class C, class T, class S>
void attend(const Attention& a, const Plan& plan, size_t i, Scratch& scratch, float* partials) {
  const Item& item = plan.items[i];
  float* partial = item.part < 0 ? nullptr : partials + (long)item.part * (a.v_dim + 2);
  typedef std::conditional_t<std::is_same_v<T, S>, PoolRows<T>, StoredRows<T, S>> Rows;
  if constexpr (std::is_same_v<T, S>)
    if (a.key_up) return Tile<C, T, ExpandedRows<C, T>>(a, item, scratch).run();
  if (item.end == 0) return Tile<C, T, Rows>(a, item, scratch).run();
  const size_t after = i + a.threads;
  const Item* next = after < plan.items.size() && plan.items[after].end > 0 ? &plan.items[after] : nullptr;
#if defined(BATON_AMX)
  if constexpr (std::is_same_v<C, ComputeAmx> && std::is_same_v<T, S>)
    if (item.tokens() == 1 && DecodeAmx::takes(a)) return DecodeAmx(a, item, scratch).run(partial, next);
#endif
#if defined(BATON_AVX512_BF16)
  if constexpr (std::is_same_v<C, ComputeBF16> && std::is_same_v<S, bf16>)
    return decode<T, S, true>(a, item, next, scratch, partial);
#endif
  decode<T, S, false>(a, item, next, scratch, partial);
}

template <class T>
void merge(const Attention& a, const Split& split, const float* partials) {
  const int group = a.num_heads / a.kv_heads;
  const long row = a.v_dim + 2, part = split.stride * row;
  for (int g = 0; g < split.rows; ++g) {
    const float* first = partials + (split.first + g) * row;
    float top = NEG_INF, total = 0;
    for (int i = 0; i < split.count; ++i) top = std::max(top, first[i * part]);
    std::vector<float> factor(split.count);
    for (int i = 0; i < split.count; ++i) {
      factor[i] = top == NEG_INF ? 0.0f : exp2f(first[i * part] - top);
      total += factor[i] * first[i * part + 1];
    }
    const long token = a.query_starts[split.seq] + split.q0 + g / group;
    T* to = (T*)a.out + (token * a.num_heads + split.head * group + g % group) * a.v_dim;
    for (int d = 0; d < a.v_dim; d += VL) {
      vf acc = vf{};
      for (int i = 0; i < split.count; ++i) acc += load_upto(first + i * part + 2 + d, a.v_dim - d) * factor[i];
      store_upto(to + d, acc * (total > 0 ? 1.0f / total : 0.0f), a.v_dim - d);
    }
  }
}

template <class C, class T, class S>
void run(const Attention& a) {
  static thread_local Plan plan;
  static thread_local Scratch partial_scratch;
  make_plan(a, Products<C>::TILE_ROWS, Products<C>::FEW_ROWS, plan);
  const Plan& work = plan;
  float* partials = partial_scratch.get<float>((size_t)work.parts * (a.v_dim + 2));
  std::atomic<long> next{0};
  parallel(a.threads, [&](const Team& team) {
    static thread_local Scratch scratch;
    write<T, S>(a, team, scratch);
    team.barrier();
    take(next, (long)work.items.size(), [&](long i) { attend<C, T, S>(a, work, i, scratch, partials); });
    team.barrier();
    team.share((long)work.splits.size(), [&](long i) { merge<T>(a, work.splits[i], partials); });
  });
}

}  // namespace
}  // namespace baton

using namespace baton;

namespace {

// By what lies in the pool; returns 1 where it is nothing that T goes with.
template <class C, class T>
int run_stored(const Attention& a) {
  if (a.storage == a.dtype)
    run<C, T, T>(a);
  else if (a.latent)
    return 1;
  else if (a.storage == 3)
    run<C, T, q8>(a);
  else if (a.storage == 4)
    run<C, T, e4m3>(a);
  else if (a.storage == 1 && a.dtype == 0) {
    if constexpr (std::is_same_v<T, float>) run<C, T, bf16>(a);
  } else
    return 1;
  return 0;
}

}  // namespace

extern "C" int baton_paged_attention(const Attention* a) {
  switch (a->dtype) {
    case 0:
      return run_stored<ComputeF32, float>(*a);
    case 1:
#if defined(BATON_AMX)
      if (a->amx) return run_stored<ComputeAmx, bf16>(*a);
#endif
#if defined(BATON_AVX512_BF16)
      if (a->pairs) return run_stored<ComputeBF16, bf16>(*a);
#endif
      return run_stored<ComputeF32, bf16>(*a);
    case 2:
      return run_stored<ComputeF32, f16>(*a);
  }
  return 1;
}
