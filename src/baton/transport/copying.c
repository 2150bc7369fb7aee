/* Batched block copies for baton.transport.copying: one call without the interpreter lock for many runs.
 *
 * Big batches go past the cache (non-temporal stores: the target lines need not be read first), four pages in turn, so
 * that several memory rows and page walks are under way at once. memcpy of the C library does so only from the size of a
 * share of the last-level cache on, which one block never has.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct run {
    uint64_t to, from, bytes;
};

static void copy_plain(char *to, const char *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

#if defined(__x86_64__)
#include <immintrin.h>

enum { PAGE = 4096, PAGES = 4, LINE = 64, AHEAD = 2 * LINE };
#define PAST_CACHE_BYTES (2u << 20)

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

void baton_copy_runs(char *to, const char *from, const struct run *runs, size_t count)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; i++)
        bytes += runs[i].bytes;
    copy_function copy = choose(bytes);
    for (size_t i = 0; i < count; i++)
        copy(to + runs[i].to, from + runs[i].from, runs[i].bytes);
    FINISH_STORES();
    /* What is read after this call (the generations) is read after the copies. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
