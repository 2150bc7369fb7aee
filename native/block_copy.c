/* Batched block copies for baton.kv_transfer.native_copy: one call without the interpreter lock for many blocks.
 *
 * Big batches go past the cache (non-temporal stores: the target lines need not be read first), four pages in turn, so
 * that several memory rows and page walks are under way at once. memcpy of the C library does so only from the size of a
 * share of the last-level cache on, which one block never has.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static void copy_plain(char *to, const char *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

#if defined(__x86_64__)
#include <immintrin.h>

enum { PAGE = 4096, PAGES = 4, LINE = 64, AHEAD = 2 * LINE };
#define PAST_CACHE_BYTES (512u << 10)

/* One function per vector width; `line` copies 64 bytes from b to a, which is aligned to 64. */
#define DEFINE_STREAM(name, isa, line)                                                     \
    __attribute__((target(isa))) static void name(char *to, const char *from, size_t bytes) \
    {                                                                                      \
        size_t whole = (uintptr_t)to % LINE ? 0 : bytes / (PAGES * PAGE) * (PAGES * PAGE);  \
        for (size_t at = 0; at < whole; at += PAGES * PAGE)                                \
            for (size_t offset = at; offset < at + PAGE; offset += LINE)                   \
                for (size_t page = 0; page < PAGES * PAGE; page += PAGE) {                 \
                    char *a = to + offset + page;                                          \
                    const char *b = from + offset + page;                                  \
                    _mm_prefetch(b + AHEAD, _MM_HINT_T0);                                  \
                    line                                                                   \
                }                                                                          \
        memcpy(to + whole, from + whole, bytes - whole);                                   \
    }

DEFINE_STREAM(copy_sse2, "sse2", for (int i = 0; i < LINE; i += 16)
    _mm_stream_si128((__m128i *)(a + i), _mm_loadu_si128((const __m128i *)(b + i)));)
DEFINE_STREAM(copy_avx2, "avx2", for (int i = 0; i < LINE; i += 32)
    _mm256_stream_si256((__m256i *)(a + i), _mm256_loadu_si256((const __m256i *)(b + i)));)
DEFINE_STREAM(copy_avx512, "avx512f",
    _mm512_stream_si512((__m512i *)a, _mm512_loadu_si512((const __m512i *)b));)

typedef void (*copy_function)(char *, const char *, size_t);

static copy_function choose(uint64_t bytes)
{
    if (bytes < PAST_CACHE_BYTES)
        return copy_plain;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        return copy_avx512;
    return __builtin_cpu_supports("avx2") ? copy_avx2 : copy_sse2;
}
#define FINISH_STORES() _mm_sfence()
#else
typedef void (*copy_function)(char *, const char *, size_t);

static copy_function choose(uint64_t bytes)
{
    (void)bytes;
    return copy_plain;
}
#define FINISH_STORES() ((void)0)
#endif

/* Part of a block: where it begins in the source's block and in the target's, and its bytes. */
struct segment {
    uint64_t from, to, bytes;
};

/* From one pool to another: where their blocks begin and how big they are, the generations of the source's, and a
 * socket whose end says that its owner is gone (-1: there is none). */
struct way {
    uint64_t to, to_bytes, from, from_bytes;
    const uint64_t *generations;
    int64_t line;
};

/* Whether neither end of a socket has hung up, as far as this side knows; -1: there is no socket. */
int baton_line_holds(int64_t line)
{
    struct pollfd end = {(int)line, POLLRDHUP, 0};
    return line < 0 || poll(&end, 1, 0) <= 0;
}

/* Blocks of one pool into another's, as far as their generations are what is wanted, before and after the copy.
 * `valid` says so per block; returns whether the line held until after all that. Neighbours that are copied whole
 * are copied at once. */
int baton_read_blocks(const struct way *way, const int64_t *remote, const uint64_t *wanted, const int64_t *local,
                      size_t count, const struct segment *segments, size_t num_segments, uint8_t *valid)
{
    const uint64_t *generations = way->generations;
    uint64_t each = 0;
    for (size_t s = 0; s < num_segments; s++)
        each += segments[s].bytes;
    copy_function copy = choose(each * count);
    int whole = num_segments == 1 && each == way->to_bytes && each == way->from_bytes;
    char *a = NULL;
    const char *b = NULL;
    size_t run = 0;
    for (size_t i = 0; i < count; i++) {
        valid[i] = __atomic_load_n(generations + remote[i], __ATOMIC_ACQUIRE) == wanted[i];
        if (!valid[i])
            continue;
        char *next_to = (char *)(uintptr_t)way->to + (uint64_t)local[i] * way->to_bytes;
        const char *next_from = (const char *)(uintptr_t)way->from + (uint64_t)remote[i] * way->from_bytes;
        if (!whole) {
            for (size_t s = 0; s < num_segments; s++)
                copy(next_to + segments[s].to, next_from + segments[s].from, segments[s].bytes);
            continue;
        }
        if (run && next_to == a + run && next_from == b + run) {
            run += each;
            continue;
        }
        if (run)
            copy(a, b, run);
        a = next_to, b = next_from, run = each;
    }
    if (run)
        copy(a, b, run);
    FINISH_STORES();
    /* The generations below are read after the copies. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (size_t i = 0; i < count; i++)
        valid[i] &= __atomic_load_n(generations + remote[i], __ATOMIC_ACQUIRE) == wanted[i];
    return baton_line_holds(way->line);
}
