// Which rows go through which expert: (token, expert) pairs sorted by expert, so that each one's weights are read once.
#pragma once
#include <vector>

#include "vec.h"

namespace baton {

#if defined(BATON_AVX512)
constexpr int ROW_GROUP = 12;  // rows of a register tile
#elif defined(__AVX2__)
constexpr int ROW_GROUP = 6;
#else
constexpr int ROW_GROUP = 4;
#endif

// Rows of one expert that a register tile takes: slots `first` to first + rows of those sorted by expert.
struct Group {
  int32_t expert, first, rows;
};

// What the rows of some tokens have to go through, sorted by expert.
struct Plan {
  std::vector<int32_t> token, slot, begins, first_group, active;  // slot: of (token, choice), or -1
  std::vector<float> weight;
  std::vector<Group> groups;

  // Of tokens from..from+count; all_ids and all_weights: [tokens][top_k]; most: rows of a group.
  void make(const int32_t* all_ids, const float* all_weights, int top_k, int experts, long from, long count,
            int most = ROW_GROUP) {
    const long total = count * top_k;
    const int32_t* ids = all_ids + from * top_k;
    begins.assign(experts + 1, 0), first_group.assign(experts + 1, 0);
    slot.assign(total, -1), groups.clear(), active.clear();
    const auto known = [&](long i) { return ids[i] >= 0 && ids[i] < experts; };
    for (long i = 0; i < total; ++i)
      if (known(i)) ++begins[ids[i] + 1];
    for (int e = 0; e < experts; ++e) {
      const int rows = begins[e + 1], parts = (rows + most - 1) / most;
      begins[e + 1] += begins[e];
      first_group[e] = (int32_t)groups.size();
      if (rows) active.push_back(e);
      for (int p = 0; p < parts; ++p) {
        const int at = rows * p / parts, until = rows * (p + 1) / parts;
        groups.push_back({e, begins[e] + at, until - at});
      }
    }
    first_group[experts] = (int32_t)groups.size();
    token.resize(begins[experts]), weight.resize(begins[experts]);
    std::vector<int32_t>& next = cursor_;
    next.assign(begins.begin(), begins.end() - 1);
    for (long i = 0; i < total; ++i)
      if (known(i)) {
        const int32_t s = next[ids[i]]++;
        slot[i] = s, token[s] = (int32_t)(from + i / top_k), weight[s] = all_weights[from * top_k + i];
      }
  }

 private:
  std::vector<int32_t> cursor_;
};

}  // namespace baton
