// The prefix index's table against a map: whatever is stored, removed, swept and widened in which order.
#include <array>
#include <map>
#include <set>
#include <vector>

#include "choices.h"

struct table;
extern "C" {
table *baton_table_new(uint64_t limit, uint64_t factor);
void baton_table_free(table *t);
uint64_t baton_table_count(const table *t);
int baton_table_widen(table *t, uint32_t words);
int64_t baton_table_store(table *t, uint32_t slot, const uint8_t *chain, size_t length);
uint64_t baton_table_remove(table *t, uint32_t slot, const uint8_t *chain, size_t length);
size_t baton_table_match(const table *t, const uint8_t *chain, size_t length, const uint64_t *slots, uint32_t *out);
void baton_table_match_any(const table *t, const uint8_t *chain, size_t length, const uint64_t *groups, size_t number,
                           uint32_t *out);
uint64_t baton_table_sweep(table *t, const uint64_t *dead, uint64_t from, uint64_t budget);
}

namespace {

constexpr size_t HASH = 32;
using Held = std::map<uint32_t, std::set<uint32_t>>;  // block -> slots, none of them empty

struct Chain {
    std::vector<uint32_t> names;
    Buffer<uint8_t> hashes;

    explicit Chain(Choices &from, uint32_t universe, uint32_t spread)
        : names(from.number(0, from.flag() ? 300 : 12)), hashes(names.size() * HASH) {
        uint32_t name = static_cast<uint32_t>(from.number(0, universe - 1)), step = from.flag() ? 1 : universe - 1;
        for (size_t i = 0; i < names.size(); i++, name = (name + step) % universe) {
            if (from.more() && from.byte() < 16) name = static_cast<uint32_t>(from.number(0, universe - 1));
            names[i] = name;
            const uint64_t head = static_cast<uint64_t>(name % spread) << 40, second = name;
            std::memcpy(&hashes[i * HASH], &head, 8);
            std::memcpy(&hashes[i * HASH + 8], &second, 8);
        }
    }
};

bool holds(const Held &held, uint32_t name, uint32_t slot) {
    const auto found = held.find(name);
    return found != held.end() && found->second.count(slot);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Choices from(data, size);
    const uint64_t limit = from.flag() ? from.number(1, 64) : 1 << 20;
    const uint32_t universe = static_cast<uint32_t>(from.number(1, 3000));
    const uint32_t spread = from.flag() ? universe : 1 + universe / 64;  // many blocks in one bucket
    table *t = baton_table_new(limit, from.word());
    REQUIRE(t);
    uint32_t words = 1;
    Held held;
    while (from.more()) {
        const uint8_t action = from.byte() % 8;
        const uint32_t slot = static_cast<uint32_t>(from.number(0, words * 64 - 1));
        if (action == 0 && words < 5) {
            REQUIRE(baton_table_widen(t, words += static_cast<uint32_t>(from.number(0, 2))) == 0);
        } else if (action == 1) {  // sweep slots, in parts
            Buffer<uint64_t> dead(words);
            std::set<uint32_t> gone;
            for (uint64_t left = from.number(0, 4); left; left--) gone.insert(static_cast<uint32_t>(from.number(0, words * 64 - 1)));
            for (uint32_t each : gone) dead[each / 64] |= uint64_t{1} << each % 64;
            const uint64_t budget = from.number(1, 100);
            uint64_t at = 0;
            do at = baton_table_sweep(t, dead.get(), at, budget);
            while (at);
            for (auto entry = held.begin(); entry != held.end();) {
                for (uint32_t each : gone) entry->second.erase(each);
                entry = entry->second.empty() ? held.erase(entry) : std::next(entry);
            }
        } else if (action <= 4) {
            Chain chain(from, universe, spread);
            const int64_t stored = baton_table_store(t, slot, chain.hashes.get(), chain.names.size());
            int64_t fresh = 0, refused = 0;
            for (uint32_t name : chain.names) {
                if (!held.count(name) && held.size() >= limit) refused++;
                else fresh += held[name].insert(slot).second;
            }
            REQUIRE(stored == (refused << 32) + fresh);
        } else if (action == 5) {
            Chain chain(from, universe, spread);
            uint64_t gone = 0;
            for (uint32_t name : chain.names) {
                if (!holds(held, name, slot)) continue;
                gone++;
                held[name].erase(slot);
                if (held[name].empty()) held.erase(name);
            }
            REQUIRE(baton_table_remove(t, slot, chain.hashes.get(), chain.names.size()) == gone);
        } else if (action == 6) {
            Chain chain(from, universe, spread);
            Buffer<uint64_t> asked(words);
            std::map<uint32_t, uint32_t> right;
            for (uint64_t left = from.number(0, 9); left; left--) {
                const uint32_t one = static_cast<uint32_t>(from.number(0, words * 64 - 1));
                asked[one / 64] |= uint64_t{1} << one % 64;
                uint32_t depth = 0;
                while (depth < chain.names.size() && holds(held, chain.names[depth], one)) depth++;
                if (depth) right[one] = depth;
            }
            Buffer<uint32_t> out(2 * 64 * words);
            const size_t found = baton_table_match(t, chain.hashes.get(), chain.names.size(), asked.get(), out.get());
            REQUIRE(found == right.size());
            for (size_t i = 0; i < found; i++) REQUIRE(right.at(out[2 * i]) == out[2 * i + 1]);
        } else {
            Chain chain(from, universe, spread);
            const size_t number = from.number(0, 4);
            Buffer<uint64_t> groups(number * words);
            for (size_t i = 0; i < groups.size(); i++) groups[i] = from.flag() ? from.word() : uint64_t{1} << slot % 64;
            Buffer<uint32_t> out(number);
            baton_table_match_any(t, chain.hashes.get(), chain.names.size(), groups.get(), number, out.get());
            for (size_t g = 0; g < number; g++) {
                uint32_t depth = 0;
                for (bool any = true; any && depth < chain.names.size(); depth += any) {
                    any = false;
                    for (uint32_t one = 0; one < words * 64 && !any; one++)
                        any = groups[g * words + one / 64] >> one % 64 & 1 && holds(held, chain.names[depth], one);
                }
                REQUIRE(out[g] == depth);
            }
        }
        REQUIRE(baton_table_count(t) == held.size());
    }
    baton_table_free(t);
    return 0;
}
