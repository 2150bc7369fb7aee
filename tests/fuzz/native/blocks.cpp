// Copies of blocks and casts between their formats: exactly the bytes named, as far as generations fit, by any vectors.
#include <vector>

#include "choices.h"

struct segment { uint64_t from, to, bytes; };
struct piece { int64_t from, from_scales, to, to_scales, rows, dim, from_format, to_format; };
struct side { uint64_t base, block_bytes; };
struct way {
    uint64_t to, to_bytes, from, from_bytes;
    const uint64_t *generations;
    int64_t line;
};
extern "C" {
int baton_read_blocks(const way *way, const int64_t *remote, const uint64_t *wanted, const int64_t *local, size_t count,
                      const segment *segments, size_t num_segments, uint8_t *valid);
void baton_cast_blocks(int bits, const side *to, const side *from, const uint64_t *generations, const int64_t *remote,
                       const uint64_t *wanted, const int64_t *local, size_t count, const piece *pieces,
                       size_t num_pieces, uint8_t *state);
}

namespace {

struct Reads {
    Buffer<uint64_t> generations, wanted;
    Buffer<int64_t> remote, local;

    Reads(Choices &from, size_t sources, size_t targets, size_t count)
        : generations(sources), wanted(count), remote(count), local(count) {
        for (size_t i = 0; i < sources; i++) generations[i] = from.number(0, 2);
        for (size_t i = 0; i < count; i++) {
            remote[i] = static_cast<int64_t>(from.number(0, sources - 1));
            local[i] = static_cast<int64_t>((i + from.byte() % 2) % targets);
            wanted[i] = from.byte() % 4 ? generations[remote[i]] : from.number(0, 2);
        }
    }
    bool fits(size_t i) { return generations[remote[i]] == wanted[i]; }
};

void copies(Choices &from) {
    const bool big = from.byte() % 16 == 0;  // past the cache
    const uint64_t block = big ? 65600 - from.number(0, 130) : from.number(1, 300), sources = from.number(1, 9), targets = from.number(1, 9);
    const bool alike = from.flag();
    const uint64_t target = alike ? block : block + from.number(0, 40);
    const size_t count = big ? from.number(8, 12) : from.number(0, 9);
    Buffer<uint8_t> ours(target * targets, big), right(target * targets), theirs(block * sources, big);
    from.fill(theirs.get(), theirs.bytes());
    Reads reads(from, sources, targets, count);
    std::vector<segment> segments(alike && from.flag() ? 1 : from.number(0, 4));
    for (auto &each : segments) {
        each = {0, 0, block};
        if (segments.size() == 1 && alike) continue;
        each.from = from.number(0, block), each.bytes = from.number(0, block - each.from);
        each.to = from.number(0, target - each.bytes);
    }
    Buffer<uint8_t> valid(count);
    const way the_way = {(uint64_t)(uintptr_t)ours.get(), target, (uint64_t)(uintptr_t)theirs.get(), block, reads.generations.get(), -1};
    baton_read_blocks(&the_way, reads.remote.get(), reads.wanted.get(), reads.local.get(), count, segments.data(), segments.size(), valid.get());
    for (size_t i = 0; i < count; i++) {
        REQUIRE(valid[i] == reads.fits(i));
        for (const auto &each : segments)
            if (valid[i]) std::memcpy(&right[reads.local[i] * target] + each.to, &theirs[reads.remote[i] * block] + each.from, each.bytes);
    }
    REQUIRE(!std::memcmp(ours.get(), right.get(), right.bytes()));
}

// Blocks of rows of numbers, one behind the other, and behind them a scale per row where the format (3: int8) has such.
struct Rows {
    int64_t dim, rows, width;
    bool scaled;
    int64_t scales() const { return (rows * dim * width + 1) / 2 * 2; }
    uint64_t bytes() const { return static_cast<uint64_t>((scales() + (scaled ? 2 * rows : 0) + 3) / 4 * 4); }
};

void casts(Choices &from) {
    const int64_t widths[] = {4, 2, 2, 1};
    const int source = static_cast<int>(from.number(0, 3)), target = static_cast<int>(from.number(0, 3));
    const int64_t dim = static_cast<int64_t>(from.byte() % 8 ? from.number(1, 40) : from.number(500, 530));
    const int64_t rows = static_cast<int64_t>(from.number(1, 5));
    const Rows theirs_of = {dim, rows, widths[source], source == 3}, ours_of = {dim, rows, widths[target], target == 3};
    const uint64_t sources = from.number(1, 5), targets = from.number(1, 5);
    const size_t count = from.number(0, 6);
    Buffer<uint8_t> theirs(theirs_of.bytes() * sources);
    from.fill(theirs.get(), theirs.bytes());
    Reads reads(from, sources, targets, count);
    std::vector<piece> pieces(from.number(0, 3));
    for (auto &each : pieces) {
        const int64_t begin = static_cast<int64_t>(from.number(0, rows)), length = static_cast<int64_t>(from.number(0, rows - begin));
        const int64_t to = static_cast<int64_t>(from.number(0, rows - length));
        each = {begin * dim * widths[source], source == 3 ? theirs_of.scales() + 2 * begin : -1, to * dim * widths[target],
                target == 3 ? ours_of.scales() + 2 * to : -1, length, dim, source, target};
    }
    Buffer<uint8_t> first(ours_of.bytes() * targets), first_state(count);
    for (int bits : {0, 256, 512}) {
        Buffer<uint8_t> ours(first.bytes()), state(count);
        const side to = {(uint64_t)(uintptr_t)ours.get(), ours_of.bytes()}, of = {(uint64_t)(uintptr_t)theirs.get(), theirs_of.bytes()};
        baton_cast_blocks(bits, &to, &of, reads.generations.get(), reads.remote.get(), reads.wanted.get(), reads.local.get(), count, pieces.data(), pieces.size(), state.get());
        for (size_t i = 0; i < count; i++) REQUIRE((state[i] != 0) == reads.fits(i));
        if (!bits) {
            std::memcpy(first.get(), ours.get(), first.bytes());
            std::memcpy(first_state.get(), state.get(), count);
        }
        REQUIRE(!std::memcmp(first.get(), ours.get(), first.bytes()));
        REQUIRE(!std::memcmp(first_state.get(), state.get(), count));
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Choices from(data, size);
    from.flag() ? copies(from) : casts(from);
    return 0;
}
