// What the targets of native code share: choices made by the bytes of an input, and buffers that end where their memory ends.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define REQUIRE(what)                                                             \
    do {                                                                          \
        if (!(what)) {                                                            \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what); \
            std::abort();                                                         \
        }                                                                         \
    } while (0)

class Choices {
  public:
    Choices(const uint8_t *data, size_t size) : at_(data), end_(data + size) {}

    bool more() const { return at_ < end_; }

    uint8_t byte() { return at_ < end_ ? *at_++ : 0; }

    // A number from `least` to `most`, both included.
    uint64_t number(uint64_t least, uint64_t most) {
        uint64_t value = byte();
        for (uint64_t room = (most - least) >> 8; room; room >>= 8) value = value << 8 | byte();
        return least + value % (most - least + 1);
    }

    uint64_t word() {
        uint64_t value = 0;
        for (int i = 0; i < 8; i++) value = value << 8 | byte();
        return value;
    }

    bool flag() { return byte() & 1; }

    // Any bytes: some of the input itself, the rest made of them.
    void fill(void *to, size_t bytes) {
        uint64_t state = word();
        for (size_t i = 0; i < bytes; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            static_cast<uint8_t *>(to)[i] = static_cast<uint8_t>(state >> 56);
        }
    }

  private:
    const uint8_t *at_, *end_;
};

// Memory of exactly so many elements, aligned to 64 bytes where asked for.
template <class T>
class Buffer {
  public:
    explicit Buffer(size_t count, bool aligned = false)
        : size_(count), memory_(aligned ? std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)
                                        : std::malloc(count * sizeof(T))) {
        std::memset(memory_.get(), 0, count * sizeof(T));
    }
    T *get() { return static_cast<T *>(memory_.get()); }
    T &operator[](size_t at) { return get()[at]; }
    size_t size() const { return size_; }
    size_t bytes() const { return size_ * sizeof(T); }

  private:
    struct Free {
        void operator()(void *memory) const { std::free(memory); }
    };
    size_t size_;
    std::unique_ptr<void, Free> memory_;
};
