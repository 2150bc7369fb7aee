/* The chain of block hashes in one call: h[i] = SHA-256(h[i-1] || tokens of block i), see hashing.py.

   SHA-256 as FIPS 180-4 defines it, with the processor's own instructions where it has them. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

static const uint32_t INITIAL[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static const uint32_t K[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static inline uint32_t load_be(const uint8_t *p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static inline void store_be(uint8_t *p, uint32_t x) {
    p[0] = x >> 24, p[1] = x >> 16, p[2] = x >> 8, p[3] = x;
}

static inline uint32_t ror(uint32_t x, int n) { return x >> n | x << (32 - n); }

#define ROUND(a, b, c, d, e, f, g, h, i)                                                             \
    do {                                                                                            \
        uint32_t t = h + (ror(e, 6) ^ ror(e, 11) ^ ror(e, 25)) + (g ^ (e & (f ^ g))) + K[i] + w[i]; \
        d += t;                                                                                     \
        h = t + (ror(a, 2) ^ ror(a, 13) ^ ror(a, 22)) + ((a & b) | (c & (a | b)));                  \
    } while (0)

static void compress_plain(uint32_t state[8], const uint8_t *data, size_t blocks) {
    for (; blocks; blocks--, data += 64) {
        uint32_t w[64];
        for (int i = 0; i < 16; i++) w[i] = load_be(data + 4 * i);
        for (int i = 16; i < 64; i++) {
            uint32_t x = w[i - 15], y = w[i - 2];
            w[i] = w[i - 16] + (ror(x, 7) ^ ror(x, 18) ^ x >> 3) + w[i - 7] + (ror(y, 17) ^ ror(y, 19) ^ y >> 10);
        }
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int i = 0; i < 64; i += 8) {
            ROUND(a, b, c, d, e, f, g, h, i);
            ROUND(h, a, b, c, d, e, f, g, i + 1);
            ROUND(g, h, a, b, c, d, e, f, i + 2);
            ROUND(f, g, h, a, b, c, d, e, i + 3);
            ROUND(e, f, g, h, a, b, c, d, i + 4);
            ROUND(d, e, f, g, h, a, b, c, i + 5);
            ROUND(c, d, e, f, g, h, a, b, i + 6);
            ROUND(b, c, d, e, f, g, h, a, i + 7);
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

#if defined(__x86_64__)
__attribute__((target("sha,sse4.1,ssse3"))) static void compress_sha(uint32_t state[8], const uint8_t *data,
                                                                     size_t blocks) {
    const __m128i order = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    /* The instructions want the eight words as (f e b a) and (h g d c), lowest first. */
    __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
    __m128i high = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xf0);
    for (; blocks; blocks--, data += 64) {
        __m128i w[4], abef_before = abef, cdgh_before = cdgh;
        for (int i = 0; i < 4; i++)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * i)), order);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i now = w[i & 3];
            if (i >= 4) {
                __m128i last = w[(i + 3) & 3];
                now = _mm_sha256msg1_epu32(now, w[(i + 1) & 3]);
                now = _mm_add_epi32(now, _mm_alignr_epi8(last, w[(i + 2) & 3], 4));
                w[i & 3] = now = _mm_sha256msg2_epu32(now, last);
            }
            __m128i sum = _mm_add_epi32(now, _mm_load_si128((const __m128i *)(K + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    low = _mm_shuffle_epi32(abef, 0x1b);
    high = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(low, high, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(high, low, 8));
}
#endif

/* Whether the processor hashes by itself. */
int baton_has_sha(void) {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b >> 29 & 1)) return 0;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 19 & 1) && (c >> 9 & 1);
#else
    return 0;
#endif
}

/* Hash `count` pieces of `stride` bytes into `out`, 32 bytes each; parent: 32 bytes; fast: what baton_has_sha() said. */
void baton_hash_chain(const uint8_t *data, size_t stride, size_t count, const uint8_t *parent, int fast, uint8_t *out) {
    void (*compress)(uint32_t *, const uint8_t *, size_t) = compress_plain;
#if defined(__x86_64__)
    if (fast) compress = compress_sha;
#endif
    size_t total = 32 + stride, whole = total < 64 ? 0 : (total - 64) / 64, tail = total - 64 * (1 + whole);
    (void)fast;
    for (size_t i = 0; i < count; i++, data += stride, parent = out, out += 32) {
        uint32_t state[8];
        uint8_t end[192] = {0};
        size_t size; /* of the end: what is not whole 64-byte pieces behind the first, which holds the parent */
        memcpy(state, INITIAL, sizeof state);
        memcpy(end, parent, 32);
        if (total < 64) {
            memcpy(end + 32, data, stride);
            size = total;
        } else {
            memcpy(end + 32, data, 32);
            compress(state, end, 1);
            compress(state, data + 32, whole);
            memset(end, 0, 64);
            memcpy(end, data + 32 + 64 * whole, tail);
            size = tail;
        }
        end[size] = 0x80;
        size_t pieces = size + 9 > 64 ? 2 : 1;
        store_be(end + 64 * pieces - 4, (uint32_t)(total * 8));
        store_be(end + 64 * pieces - 8, (uint32_t)((uint64_t)total >> 29));
        compress(state, end, pieces);
        for (int word = 0; word < 8; word++) store_be(out + 4 * word, state[word]);
    }
}
