// Block hashes: plain code and the processor's instructions agree, for pieces of any length anywhere in memory.
#include "choices.h"

extern "C" {
int baton_has_sha(void);
void baton_hash_chain(const uint8_t *data, size_t stride, size_t count, const uint8_t *parent, int fast, uint8_t *out);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Choices from(data, size);
    const size_t stride = from.number(0, 700), count = from.number(0, 12), skip = from.number(0, 3);
    Buffer<uint8_t> pieces(skip + stride * count), parent(32), plain(32 * count), fast(32 * count);
    from.fill(pieces.get(), pieces.bytes());
    from.fill(parent.get(), 32);
    baton_hash_chain(pieces.get() + skip, stride, count, parent.get(), 0, plain.get());
    baton_hash_chain(pieces.get() + skip, stride, count, parent.get(), baton_has_sha(), fast.get());
    REQUIRE(!std::memcmp(plain.get(), fast.get(), 32 * count));
    for (size_t i = 0; i < count; i++) {  // a chain is made of its links
        Buffer<uint8_t> one(32);
        const uint8_t *before = i ? plain.get() + 32 * (i - 1) : parent.get();
        baton_hash_chain(pieces.get() + skip + i * stride, stride, 1, before, 0, one.get());
        REQUIRE(!std::memcmp(one.get(), plain.get() + 32 * i, 32));
    }
    return 0;
}
