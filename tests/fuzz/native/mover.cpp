// Spans through a socket: what arrives is what was sent, its checksums are those of the bytes, however both ends cut it.
#include <sys/socket.h>
#include <unistd.h>
#include <cerrno>
#include <vector>

#include "choices.h"

struct span { uint64_t address, bytes; };
struct state { uint64_t span, at, left, hashed; };
struct hasher;
struct xxh3 {
    void *(*create_state)();
    int (*free_state)(void *);
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    uint64_t (*digest)(const void *);
};
extern "C" {
void baton_use_xxh3(const xxh3 *functions);
hasher *baton_hasher_new(const uint64_t *sizes, uint64_t *sums, uint64_t count);
void baton_hasher_free(hasher *h);
int64_t baton_send_spans(int fd, const span *spans, state *s, hasher *h, uint64_t limit, int *error);
int64_t baton_recv_spans(int fd, const span *spans, state *s, hasher *h, uint64_t limit, int tick_ms, int *error);
}

namespace {

// Stands in for xxHash, which a program of its own does not have: any hash of a stream shows where it was cut (FNV-1a).
int reset(void *state) {
    *static_cast<uint64_t *>(state) = 0xcbf29ce484222325;
    return 0;
}

int update(void *state, const void *data, size_t bytes) {
    auto &sum = *static_cast<uint64_t *>(state);
    for (size_t i = 0; i < bytes; i++) sum = (sum ^ static_cast<const uint8_t *>(data)[i]) * 0x100000001b3;
    return 0;
}

uint64_t digest(const void *state) { return *static_cast<const uint64_t *>(state); }

const xxh3 FNV = {[]() -> void * { return new uint64_t; },
                  [](void *state) {
                      delete static_cast<uint64_t *>(state);
                      return 0;
                  },
                  reset, update, digest};

uint64_t sum_of(const uint8_t *data, size_t bytes) {
    uint64_t state;
    reset(&state);
    update(&state, data, bytes);
    return digest(&state);
}

std::vector<uint64_t> cut(Choices &from, uint64_t bytes) {  // none of them empty
    std::vector<uint64_t> parts;
    const uint64_t most = from.number(1, 5000);
    while (bytes) {
        parts.push_back(from.number(1, most < bytes ? most : bytes));
        bytes -= parts.back();
    }
    return parts;
}

std::vector<span> spans_of(const std::vector<uint64_t> &parts, uint8_t *at) {
    std::vector<span> spans;
    for (uint64_t each : parts) {
        spans.push_back({(uint64_t)(uintptr_t)at, each});
        at += each;
    }
    return spans;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    baton_use_xxh3(&FNV);
    Choices from(data, size);
    const uint64_t bytes = from.byte() % 32 ? from.number(1, 3000) : from.number(1, 300000);
    Buffer<uint8_t> sent(bytes), got(bytes);
    from.fill(sent.get(), bytes);
    const auto pieces = cut(from, bytes);
    Buffer<uint64_t> sizes(pieces.size()), out_sums(pieces.size()), in_sums(pieces.size());
    std::memcpy(sizes.get(), pieces.data(), sizes.bytes());
    const auto sources = spans_of(cut(from, bytes), sent.get()), targets = spans_of(cut(from, bytes), got.get());
    const bool hashed = from.flag(), cut_off = from.byte() % 8 == 0;
    hasher *out_hasher = hashed ? baton_hasher_new(sizes.get(), out_sums.get(), pieces.size()) : nullptr;
    hasher *in_hasher = hashed ? baton_hasher_new(sizes.get(), in_sums.get(), pieces.size()) : nullptr;
    int ends[2], error = 0;
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
    state writer = {0, 0, bytes, 0}, reader = {0, 0, bytes, 0};
    uint64_t moved = 0, arrived = 0, stop = cut_off ? from.number(0, bytes - 1) : bytes;
    while (arrived < stop) {
        const uint64_t left = stop - moved, limit = from.more() ? from.number(1, 70000) : left;
        if (left) {
            const int64_t now = baton_send_spans(ends[0], sources.data(), &writer, out_hasher, limit < left ? limit : left, &error);
            REQUIRE(now >= 0 && (!error || error == EAGAIN));
            moved += static_cast<uint64_t>(now);
        }
        const uint64_t room = bytes - arrived, most = from.more() ? from.number(1, 70000) : room;
        const int64_t now = baton_recv_spans(ends[1], targets.data(), &reader, in_hasher, most, 0, &error);
        REQUIRE(now >= 0 && (!error || error == EAGAIN));
        arrived += static_cast<uint64_t>(now);
        REQUIRE(arrived <= moved);
    }
    close(ends[0]);
    if (stop < bytes) {
        REQUIRE(baton_recv_spans(ends[1], targets.data(), &reader, in_hasher, bytes, 0, &error) == 0);
        REQUIRE(error == EPIPE);
    }
    close(ends[1]);
    REQUIRE(!std::memcmp(sent.get(), got.get(), stop));
    const uint8_t *at = sent.get();
    for (size_t i = 0; hashed && stop == bytes && i < pieces.size(); at += pieces[i++]) {
        REQUIRE(out_sums[i] == sum_of(at, pieces[i]));
        REQUIRE(in_sums[i] == out_sums[i]);
    }
    baton_hasher_free(out_hasher);
    baton_hasher_free(in_hasher);
    return 0;
}
