/* Conversion of KV between formats for baton.kv_transfer.native_copy, block by block, fenced as copies are.
 *
 * Floats: all go through binary32, which holds every number of the others exactly, and round to nearest, ties to even. A finite
 * number that the target's format could only hold as infinity is told; what is infinite or no number stays so.
 *
 * int8 has a scale per row (one head's K or V of one token), a bfloat16 that lies elsewhere in the block: largest
 * magnitude / 127, rounded, and 0 below the least normal number; numbers are rounded quotients. A row with an infinite
 * number, or with none, has no number for a scale. baton_kernels.paged_attention.quantized is the definition.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { F32, BF16, F16, FORMATS, INT8 = FORMATS };

#define INFINITE 0x7f800000u
/* Magnitudes (as binary32) from here on are infinite in the format. */
#define LIMIT_f32 INFINITE
#define LIMIT_bf16 0x7f7f8000u
#define LIMIT_f16 0x477ff000u

typedef float f32;
typedef uint16_t bf16;
typedef uint16_t f16;

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float get_f32(f32 value) { return value; }

static float get_bf16(bf16 value) { return float_of((uint32_t)value << 16); }

static float get_f16(f16 value)
{
    uint32_t sign = (value & 0x8000u) << 16, exponent = value >> 10 & 31, fraction = value & 0x3ff;
    if (exponent == 31)
        return float_of(sign | INFINITE | fraction << 13 | (fraction ? 0x400000u : 0));
    if (exponent)
        return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    return float_of(sign | bits_of((float)fraction * 0x1p-24f));
}

static f32 put_f32(float value) { return value; }

static bf16 put_bf16(float value)
{
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > INFINITE)
        return (bf16)(bits >> 16 | 0x40);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static f16 put_f16(float value)
{
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > INFINITE)
        return (f16)(sign | 0x7e00 | (size >> 13 & 0x3ff));
    if (size >= LIMIT_f16)
        return (f16)(sign | 0x7c00);
    if (size < 0x38800000) /* below the least normal number: 0.5 has the unit 2^-24, and the addition rounds */
        return (f16)(sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000));
    return (f16)(sign | (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13);
}

/* Elements of one format to another's; returns whether one became infinite that was not. */
typedef int (*cast_function)(void *to, const void *from, size_t count);

#define REST(x, y)                                                                          \
    for (; i < count; i++) {                                                                \
        float value = get_##x(from[i]);                                                     \
        uint32_t size = bits_of(value) & 0x7fffffff;                                        \
        over |= size >= LIMIT_##y && size < INFINITE;                                       \
        to[i] = put_##y(value);                                                             \
    }                                                                                       \
    return over;

#define DEFINE_PLAIN(x, y)                                                                  \
    static int plain_##x##_##y(void *target, const void *source, size_t count)              \
    {                                                                                       \
        y *to = target;                                                                     \
        const x *from = source;                                                             \
        size_t i = 0;                                                                       \
        int over = 0;                                                                       \
        REST(x, y)                                                                          \
    }

#define FOR_ALL(define) define(f32, bf16) define(f32, f16) define(bf16, f32) define(bf16, f16) define(f16, f32) define(f16, bf16)
#define TABLE(prefix)                                                                       \
    {                                                                                       \
        {NULL, prefix##_f32_bf16, prefix##_f32_f16}, {prefix##_bf16_f32, NULL, prefix##_bf16_f16}, \
            {prefix##_f16_f32, prefix##_f16_bf16, NULL},                                    \
    }

/* The largest magnitude of some numbers, as its bits: what is no number is larger than any. */
static uint32_t plain_largest(const float *from, size_t count)
{
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t size = bits_of(from[i]) & 0x7fffffff;
        largest = size > largest ? size : largest;
    }
    return largest;
}

#define ROUNDER 12582912.0f /* 1.5 * 2^23: what is added to it is rounded to an integer, ties to even */

static void plain_quantize(int8_t *to, const float *from, float scale, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = (int8_t)(from[i] / scale + ROUNDER - ROUNDER);
}

static void plain_dequantize(float *to, const int8_t *from, float scale, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = (float)from[i] * scale;
}

FOR_ALL(DEFINE_PLAIN)
static const cast_function plain[FORMATS][FORMATS] = TABLE(plain);

#if defined(__x86_64__)
#include <immintrin.h>

#define GET8_f32(p) _mm256_loadu_ps(p)
#define GET8_bf16(p) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define GET8_f16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define PUT8_f32(p, v) _mm256_storeu_ps(p, v)
#define PUT8_f16(p, v) _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#define PUT8_bf16(p, v)                                                                     \
    do {                                                                                    \
        __m256i bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);          \
        __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));                         \
        __m256i near = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff)); \
        __m256i none = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));              \
        __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));                     \
        near = _mm256_blendv_epi8(_mm256_srli_epi32(near, 16), quiet, none);                \
        near = _mm256_permute4x64_epi64(_mm256_packus_epi32(near, near), 8);                \
        _mm_storeu_si128((__m128i *)(p), _mm256_castsi256_si128(near));                     \
    } while (0)

#define DEFINE_AVX2(x, y)                                                                   \
    __attribute__((target("avx2,f16c"))) static int avx2_##x##_##y(void *target, const void *source, size_t count) \
    {                                                                                       \
        y *to = target;                                                                     \
        const x *from = source;                                                             \
        size_t i = 0;                                                                       \
        __m256i any = _mm256_setzero_si256(), all = _mm256_set1_epi32(0x7fffffff);          \
        __m256i below = _mm256_set1_epi32(LIMIT_##y - 1), end = _mm256_set1_epi32(INFINITE); \
        for (; i + 8 <= count; i += 8) {                                                    \
            __m256 v = GET8_##x(from + i);                                                  \
            __m256i size = _mm256_and_si256(_mm256_castps_si256(v), all);                   \
            any = _mm256_or_si256(any, _mm256_and_si256(_mm256_cmpgt_epi32(size, below), _mm256_cmpgt_epi32(end, size))); \
            PUT8_##y(to + i, v);                                                            \
        }                                                                                   \
        int over = _mm256_movemask_epi8(any) != 0;                                          \
        REST(x, y)                                                                          \
    }

#define GET16_f32(p) _mm512_loadu_ps(p)
#define GET16_bf16(p) \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define GET16_f16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define PUT16_f32(p, v) _mm512_storeu_ps(p, v)
#define PUT16_f16(p, v) \
    _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#define PUT16_bf16(p, v)                                                                    \
    do {                                                                                    \
        __m512i bits = _mm512_castps_si512(v), high = _mm512_srli_epi32(bits, 16);          \
        __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));                         \
        __m512i near = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff)); \
        __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));                     \
        near = _mm512_mask_mov_epi32(_mm512_srli_epi32(near, 16), _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet); \
        _mm256_storeu_si256((__m256i *)(p), _mm512_cvtepi32_epi16(near));                   \
    } while (0)

#define DEFINE_AVX512(x, y)                                                                 \
    __attribute__((target("avx512f"))) static int avx512_##x##_##y(void *target, const void *source, size_t count) \
    {                                                                                       \
        y *to = target;                                                                     \
        const x *from = source;                                                             \
        size_t i = 0;                                                                       \
        __mmask16 any = 0;                                                                  \
        __m512i all = _mm512_set1_epi32(0x7fffffff), least = _mm512_set1_epi32(LIMIT_##y);  \
        __m512i end = _mm512_set1_epi32(INFINITE);                                          \
        for (; i + 16 <= count; i += 16) {                                                  \
            __m512 v = GET16_##x(from + i);                                                 \
            __m512i size = _mm512_and_si512(_mm512_castps_si512(v), all);                   \
            any |= _mm512_cmpge_epi32_mask(size, least) & _mm512_cmplt_epi32_mask(size, end); \
            PUT16_##y(to + i, v);                                                           \
        }                                                                                   \
        int over = any != 0;                                                                \
        REST(x, y)                                                                          \
    }

FOR_ALL(DEFINE_AVX2)
FOR_ALL(DEFINE_AVX512)
static const cast_function avx2[FORMATS][FORMATS] = TABLE(avx2);
static const cast_function avx512[FORMATS][FORMATS] = TABLE(avx512);

__attribute__((target("avx2"))) static uint32_t avx2_largest(const float *from, size_t count)
{
    __m256i largest = _mm256_setzero_si256(), all = _mm256_set1_epi32(0x7fffffff);
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(from + i)), all));
    uint32_t parts[8], rest = plain_largest(from + i, count - i);
    _mm256_storeu_si256((__m256i *)parts, largest);
    for (int p = 0; p < 8; p++)
        rest = parts[p] > rest ? parts[p] : rest;
    return rest;
}

__attribute__((target("avx2"))) static void avx2_quantize(int8_t *to, const float *from, float scale, size_t count)
{
    __m256 each = _mm256_set1_ps(scale);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256i q = _mm256_cvtps_epi32(_mm256_round_ps(_mm256_div_ps(_mm256_loadu_ps(from + i), each),
                                                       _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
        _mm_storel_epi64((__m128i *)(to + i), _mm_packs_epi16(pairs, pairs));
    }
    plain_quantize(to + i, from + i, scale, count - i);
}

__attribute__((target("avx2"))) static void avx2_dequantize(float *to, const int8_t *from, float scale, size_t count)
{
    __m256 each = _mm256_set1_ps(scale);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256i q = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from + i)));
        _mm256_storeu_ps(to + i, _mm256_mul_ps(_mm256_cvtepi32_ps(q), each));
    }
    plain_dequantize(to + i, from + i, scale, count - i);
}

static int has_avx2(int bits)
{
    __builtin_cpu_init();
    return bits >= 256 && __builtin_cpu_supports("avx2");
}

static uint32_t largest_of(const float *from, size_t count, int bits)
{
    return has_avx2(bits) ? avx2_largest(from, count) : plain_largest(from, count);
}

static void quantize(int8_t *to, const float *from, float scale, size_t count, int bits)
{
    (has_avx2(bits) ? avx2_quantize : plain_quantize)(to, from, scale, count);
}

static void dequantize(float *to, const int8_t *from, float scale, size_t count, int bits)
{
    (has_avx2(bits) ? avx2_dequantize : plain_dequantize)(to, from, scale, count);
}

static cast_function choose(int from, int to, int bits)
{
    __builtin_cpu_init();
    if (bits >= 512 && __builtin_cpu_supports("avx512f"))
        return avx512[from][to];
    if (bits >= 256 && __builtin_cpu_supports("avx2")) /* whoever has AVX2 has F16C, which Clang 14 cannot ask for */
        return avx2[from][to];
    return plain[from][to];
}
#else
static uint32_t largest_of(const float *from, size_t count, int bits)
{
    (void)bits;
    return plain_largest(from, count);
}

static void quantize(int8_t *to, const float *from, float scale, size_t count, int bits)
{
    (void)bits;
    plain_quantize(to, from, scale, count);
}

static void dequantize(float *to, const int8_t *from, float scale, size_t count, int bits)
{
    (void)bits;
    plain_dequantize(to, from, scale, count);
}

static cast_function choose(int from, int to, int bits)
{
    (void)bits;
    return plain[from][to];
}
#endif

static const size_t SIZES[] = {sizeof(f32), sizeof(bf16), sizeof(f16), sizeof(int8_t)};

/* Rows of numbers of a block: where they begin in the source's block and in the target's, and where their scales do (-1:
 * they have none), in bytes; how many rows, numbers in each, and both sides' formats. */
struct piece {
    int64_t from, from_scales, to, to_scales, rows, dim, from_format, to_format;
};

struct side {
    uint64_t base, block_bytes;
};

enum { STALE, RIGHT, OVER };
enum { PART = 512 }; /* numbers of a row that are binary32 at a time */

static const float *as_float(const struct piece *p, const char *from, size_t count, float *work, int bits)
{
    if (p->from_format == F32)
        memcpy(work, from, count * sizeof *work);
    else
        choose((int)p->from_format, F32, bits)(work, from, count);
    return work;
}

static void row_to_int8(const struct piece *p, char *to, bf16 *scale_to, const char *from, int bits)
{
    float work[PART];
    uint32_t largest = 0;
    size_t dim = (size_t)p->dim, unit = SIZES[p->from_format];
    for (size_t at = 0; at < dim; at += PART) {
        size_t count = dim - at < PART ? dim - at : PART;
        uint32_t part = largest_of(as_float(p, from + at * unit, count, work, bits), count, bits);
        largest = part > largest ? part : largest;
    }
    float wanted = float_of(largest) / 127.0f;
    bf16 rounded = largest >= INFINITE ? 0x7fc0 : wanted < 0x1p-126f ? 0 : put_bf16(wanted);
    memcpy(scale_to, &rounded, sizeof rounded);
    if (rounded == 0 || largest >= INFINITE) {
        memset(to, 0, dim);
        return;
    }
    for (size_t at = 0; at < dim; at += PART) {
        size_t count = dim - at < PART ? dim - at : PART;
        quantize((int8_t *)to + at, as_float(p, from + at * unit, count, work, bits), get_bf16(rounded), count, bits);
    }
}

static int row_from_int8(const struct piece *p, char *to, const char *from, const bf16 *scale_from, int bits)
{
    float work[PART];
    bf16 scale;
    int over = 0;
    size_t dim = (size_t)p->dim, unit = SIZES[p->to_format];
    memcpy(&scale, scale_from, sizeof scale);
    for (size_t at = 0; at < dim; at += PART) {
        size_t count = dim - at < PART ? dim - at : PART;
        dequantize(work, (const int8_t *)from + at, get_bf16(scale), count, bits);
        if (p->to_format == F32)
            memcpy(to + at * unit, work, count * sizeof *work);
        else
            over |= choose(F32, (int)p->to_format, bits)(to + at * unit, work, count);
    }
    return over;
}

/* One piece of a block; returns whether a number became infinite that was not. */
static int cast_piece(const struct piece *p, char *to, const char *from, int bits)
{
    size_t rows = (size_t)p->rows, dim = (size_t)p->dim;
    char *into = to + p->to;
    const char *of = from + p->from;
    if (p->from_format == p->to_format) {
        memcpy(into, of, rows * dim * SIZES[p->from_format]);
        if (p->from_format == INT8)
            memcpy(to + p->to_scales, from + p->from_scales, rows * sizeof(bf16));
        return 0;
    }
    if (p->from_format != INT8 && p->to_format != INT8)
        return choose((int)p->from_format, (int)p->to_format, bits)(into, of, rows * dim);
    int over = 0;
    for (size_t row = 0; row < rows; row++) {
        char *a = into + row * dim * SIZES[p->to_format];
        const char *b = of + row * dim * SIZES[p->from_format];
        if (p->to_format == INT8)
            row_to_int8(p, a, (bf16 *)(to + p->to_scales) + row, b, bits);
        else
            over |= row_from_int8(p, a, b, (const bf16 *)(from + p->from_scales) + row, bits);
    }
    return over;
}

/* Blocks of one pool into another's of another KV type, as far as their generations are what is wanted, before and after.
 * `state` says per block what became of it; `bits` bounds the vector registers that are used. */
void baton_cast_blocks(int bits, const struct side *to, const struct side *from, const uint64_t *generations,
                       const int64_t *remote, const uint64_t *wanted, const int64_t *local, size_t count,
                       const struct piece *pieces, size_t num_pieces, uint8_t *state)
{
    for (size_t i = 0; i < count; i++) {
        state[i] = STALE;
        if (__atomic_load_n(generations + remote[i], __ATOMIC_ACQUIRE) != wanted[i])
            continue;
        char *a = (char *)(uintptr_t)to->base + (uint64_t)local[i] * to->block_bytes;
        const char *b = (const char *)(uintptr_t)from->base + (uint64_t)remote[i] * from->block_bytes;
        int over = 0;
        for (size_t p = 0; p < num_pieces; p++)
            over |= cast_piece(pieces + p, a, b, bits);
        state[i] = over ? OVER : RIGHT;
    }
    /* The generations below are read after the conversions. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (size_t i = 0; i < count; i++)
        if (__atomic_load_n(generations + remote[i], __ATOMIC_ACQUIRE) != wanted[i])
            state[i] = STALE;
}
