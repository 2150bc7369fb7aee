// Fetching the pool ahead of decodes.
#pragma once
#include "paged_attention.h"

namespace baton {

// Fetches a tile's keys and values a little at a time, in the order in which they lie: a block's keys of neighbouring
// heads are contiguous, so are its values, and long runs are what memory delivers fast.
template <class S>
class Ahead {
 public:
  // Positions from..to of an item's sequence, for its KV heads, to be fetched by `calls` calls of some().
  void begin(const Attention& args, const Item& item, long from, long to, long calls) {
    const Head<S> head(args, item.seq, item.head);
    a_ = &args, table_ = head.table, k_ = head.k, v_ = head.v, heads_ = item.heads;
    const long block = args.block_size;
    next_ = from < to ? from / block : 0, stop_ = from < to ? (to + block - 1) / block : 0;
    values_next_ = false, at_ = end_ = nullptr;
    lines_ = ((stop_ - next_) * (bytes(args.k_dim) + bytes(args.latent ? 0 : args.v_dim)) / 64 + calls) / calls;
  }

  // The tile of an item that begins at position j, or the first one of the item after it.
  void begin_tile(const Attention& args, const Item& item, const Item* next, long j, long calls) {
    if (j >= item.end && next)
      begin(args, *next, next->begin, std::min<long>(next->end, next->begin + KB), calls);
    else
      begin(args, item, j, std::min<long>(item.end, j + KB), calls);
  }

  void some(int calls = 1) {
    for (long i = 0; i < lines_ * calls; ++i, at_ += 64) {
      if (at_ >= end_ && !more()) return;
      __builtin_prefetch(at_, 0, 2);
    }
  }

 private:
  const Attention* a_;
  const int32_t* table_;
  const S *k_, *v_;
  const char *at_, *end_;
  long next_, stop_, lines_;
  int heads_;
  bool values_next_;

  long bytes(int dim) const { return (long)heads_ * a_->block_size * dim * (long)sizeof(S); }

  bool more() {
    if (next_ >= stop_) return false;
    const long block = table_[next_] * a_->block_stride;
    at_ = (const char*)((values_next_ ? v_ : k_) + block);
    end_ = at_ + bytes(values_next_ ? a_->v_dim : a_->k_dim);
    next_ += values_next_ || a_->latent;
    values_next_ = !values_next_ && !a_->latent;
    return true;
  }
};

}  // namespace baton
