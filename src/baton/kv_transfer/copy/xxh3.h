/* XXH3 (64 bits, seed 0) of input that comes in pieces, more than 240 bytes of it, after the algorithm's specification.
 *
 * Eight lanes of 64 bits take a stripe of 64 bytes at once, so a vector register is a stripe with AVX-512 and half of one
 * with AVX2: three to five times what a build for any x86-64 reaches on bytes that lie in the cache.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { STRIPE = 64, LANES = 8, SECRET_BYTES = 192, SECRET_STEP = 8, STRIPES_PER_ROUND = (SECRET_BYTES - STRIPE) / SECRET_STEP };

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u

static const uint8_t SECRET[SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

struct digest {
    uint64_t lanes[LANES];
    uint64_t total, stripe; /* bytes so far; stripes of the present round */
    uint32_t kept;          /* bytes in `last`: at least one is kept back, the end is hashed in another way */
    uint8_t last[STRIPE], before[STRIPE];
};

static void digest_begin(struct digest *d)
{
    static const uint64_t first[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                          PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(d->lanes, first, sizeof first);
    d->total = d->stripe = d->kept = 0;
}

/* Stripes into lanes, from number `stripe` of a round on; returns the number to go on with. */
typedef uint64_t (*stripes_function)(uint64_t *lanes, const uint8_t *data, size_t count, uint64_t stripe);

static uint64_t read64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static void take_stripe(uint64_t *lanes, const uint8_t *data, const uint8_t *secret)
{
    for (int i = 0; i < LANES; i++) {
        uint64_t word = read64(data + 8 * i), key = word ^ read64(secret + 8 * i);
        lanes[i ^ 1] += word;
        lanes[i] += (key & 0xFFFFFFFFu) * (key >> 32);
    }
}

static uint64_t take_plain(uint64_t *lanes, const uint8_t *data, size_t count, uint64_t stripe)
{
    for (; count; count--, data += STRIPE) {
        take_stripe(lanes, data, SECRET + SECRET_STEP * stripe);
        if (++stripe == STRIPES_PER_ROUND) {
            for (int i = 0; i < LANES; i++)
                lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ read64(SECRET + SECRET_BYTES - STRIPE + 8 * i)) * PRIME32_1;
            stripe = 0;
        }
    }
    return stripe;
}

#if defined(__x86_64__)
#include <immintrin.h>

/* One function per vector width `w`; `n` vectors hold the lanes. */
#define DEFINE_TAKE(name, isa, n, w, type, load, store, xor, mul, half, add, shift, set)                              \
    __attribute__((target(isa))) static uint64_t name(uint64_t *lanes, const uint8_t *data, size_t count,             \
                                                      uint64_t stripe)                                                \
    {                                                                                                                  \
        type lane[n], prime = set(PRIME32_1);                                                                          \
        for (int i = 0; i < n; i++)                                                                                    \
            lane[i] = load((const void *)(lanes + i * (w / 8)));                                                       \
        for (; count; count--, data += STRIPE) {                                                                       \
            _mm_prefetch((const char *)data + 512, _MM_HINT_T0);                                                       \
            for (int i = 0; i < n; i++) {                                                                              \
                type word = load((const void *)(data + i * w));                                                        \
                type key = xor(word, load((const void *)(SECRET + SECRET_STEP * stripe + i * w)));                     \
                lane[i] = add(lane[i], add(half(word, 0x4E), mul(key, half(key, 0x31))));                              \
            }                                                                                                          \
            if (++stripe == STRIPES_PER_ROUND) {                                                                       \
                for (int i = 0; i < n; i++) {                                                                          \
                    type key = load((const void *)(SECRET + SECRET_BYTES - STRIPE + i * w));                           \
                    type x = xor(xor(lane[i], shift(lane[i], 47)), key);                                               \
                    /* Only the low half of the product with the high half of x counts, shifted up. */               \
                    type low = mul(x, prime), high = mul(half(x, 0x31), prime);                                        \
                    lane[i] = add(low, SHIFT_UP_##w(high));                                                            \
                }                                                                                                      \
                stripe = 0;                                                                                            \
            }                                                                                                          \
        }                                                                                                              \
        for (int i = 0; i < n; i++)                                                                                    \
            store((void *)(lanes + i * (w / 8)), lane[i]);                                                             \
        return stripe;                                                                                                 \
    }

#define SHIFT_UP_64(x) _mm512_slli_epi64(x, 32)
#define SHIFT_UP_32(x) _mm256_slli_epi64(x, 32)
DEFINE_TAKE(take_avx512, "avx512f", 1, 64, __m512i, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_xor_si512,
            _mm512_mul_epu32, _mm512_shuffle_epi32, _mm512_add_epi64, _mm512_srli_epi64, _mm512_set1_epi32)
DEFINE_TAKE(take_avx2, "avx2", 2, 32, __m256i, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_xor_si256,
            _mm256_mul_epu32, _mm256_shuffle_epi32, _mm256_add_epi64, _mm256_srli_epi64, _mm256_set1_epi32)

/* The widest there is, of at most so many bits. */
static stripes_function choose_take(int bits)
{
    __builtin_cpu_init();
    if (bits >= 512 && __builtin_cpu_supports("avx512f"))
        return take_avx512;
    return bits >= 256 && __builtin_cpu_supports("avx2") ? take_avx2 : take_plain;
}
#else
static stripes_function choose_take(int bits)
{
    (void)bits;
    return take_plain;
}
#endif

static void digest_add(struct digest *d, const uint8_t *data, size_t bytes, stripes_function take)
{
    if (!bytes)
        return;
    d->total += bytes;
    size_t room = STRIPE - d->kept;
    if (bytes > room && d->kept) {
        memcpy(d->last + d->kept, data, room);
        d->stripe = take(d->lanes, d->last, 1, d->stripe);
        memcpy(d->before, d->last, STRIPE);
        data += room, bytes -= room, d->kept = 0;
    }
    size_t whole = d->kept ? 0 : (bytes - 1) / STRIPE;
    if (whole) {
        d->stripe = take(d->lanes, data, whole, d->stripe);
        data += whole * STRIPE, bytes -= whole * STRIPE;
        memcpy(d->before, data - STRIPE, STRIPE);
    }
    memcpy(d->last + d->kept, data, bytes);
    d->kept += bytes;
}

static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* More than 240 bytes have been added. */
static uint64_t digest_end(const struct digest *d)
{
    uint64_t lanes[LANES];
    uint8_t end[STRIPE];
    memcpy(lanes, d->lanes, sizeof lanes);
    memcpy(end, d->before + d->kept, STRIPE - d->kept);
    memcpy(end + STRIPE - d->kept, d->last, d->kept);
    take_stripe(lanes, end, SECRET + SECRET_BYTES - STRIPE - 7);
    uint64_t sum = d->total * PRIME64_1;
    for (int i = 0; i < LANES; i += 2)
        sum += fold(lanes[i] ^ read64(SECRET + 11 + 8 * i), lanes[i + 1] ^ read64(SECRET + 11 + 8 * (i + 1)));
    sum ^= sum >> 37;
    sum *= 0x165667919E3779F9u;
    return sum ^ sum >> 32;
}
