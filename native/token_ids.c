/* Token ids between JSON text, arrays of uint32 and protobuf's wire format, see token_ids.py. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 8 }; /* Ids done side by side: compilers make vectors of loops over so many. */

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define LITTLE_32(value) __builtin_bswap32(value)
#define LITTLE_64(value) __builtin_bswap64(value)
#else
#define LITTLE_32(value) (value)
#define LITTLE_64(value) (value)
#endif

/* Write an id as a varint. Returns where it ends. */
static uint8_t *pack_id(uint32_t id, uint8_t *at) {
    while (id >= 0x80) *at++ = (uint8_t)(id | 0x80), id >>= 7;
    *at++ = (uint8_t)id;
    return at;
}

/* Write ids as protobuf's packed varints; out has room for five bytes each. Returns the bytes written. */
size_t baton_pack_ids(const uint32_t *ids, size_t count, uint8_t *out) {
    uint8_t *at = out;
    for (; count >= LANES; ids += LANES, count -= LANES) {
        uint32_t all = 0, bytes[LANES], sizes[LANES];
        for (size_t i = 0; i < LANES; i++) {
            uint32_t id = ids[i], two = id > 0x7f, three = id > 0x3fff, spread = id + (id & ~0x7fu);
            bytes[i] = LITTLE_32(spread + (spread & ~0x7fffu) + (two << 7) + (three << 15));
            sizes[i] = 1 + two + three;
            all |= id;
        }
        if (all < 1 << 21) { /* A choice per group, which is always the same, and none per id, which nobody foretells. */
            for (size_t i = 0; i < LANES; at += sizes[i++]) memcpy(at, bytes + i, 4);
        } else {
            for (size_t i = 0; i < LANES; i++) at = pack_id(ids[i], at);
        }
    }
    for (size_t i = 0; i < count; i++) at = pack_id(ids[i], at);
    return (size_t)(at - out);
}

/* Return the largest of some ids; 0 of none. */
uint32_t baton_max_id(const uint32_t *ids, size_t count) {
    uint32_t lanes[LANES] = {0}, most = 0;
    for (; count >= LANES; ids += LANES, count -= LANES)
        for (size_t i = 0; i < LANES; i++) lanes[i] = ids[i] > lanes[i] ? ids[i] : lanes[i];
    for (size_t i = 0; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
    for (size_t i = 0; i < count; i++) most = ids[i] > most ? ids[i] : most;
    return most;
}

/* All texts here have a zero byte behind their end. */
static inline const char *skip_space(const char *at) {
    while (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t') at++;
    return at;
}

/* Return where a string ends that begins at `at` with its quote, behind the closing one; NULL: nowhere.
   `plain`: whether it has no escapes. */
static const char *skip_string(const char *at, const char *end, int *plain) {
    *plain = 1;
    for (at++; at < end; at++) {
        if (*at == '"') return at + 1;
        if (*at == '\\') *plain = 0, at++;
    }
    return NULL;
}

/* Read an id digit by digit. Returns where it ends; NULL: there is none, or it is too large. */
static const char *read_any_id(const char *at, uint32_t *id) {
    const char *begin = at;
    uint64_t value = 0;
    while (*at >= '0' && *at <= '9' && at - begin < 11) value = 10 * value + (uint64_t)(*at++ - '0');
    if (at == begin || (*begin == '0' && at - begin > 1) || value > UINT32_MAX) return NULL;
    *id = (uint32_t)value;
    return at;
}

/* Do the same, for up to seven digits at once: a loop would end where nobody can foretell. Their bytes are taken as one
   number, in which neighbours are added up: to numbers of two digits, of four and of eight. */
static inline const char *read_id(const char *at, const char *end, uint32_t *id) {
    const uint64_t ones = 0x0101010101010101;
    if (end - at < 8) return read_any_id(at, id);
    uint64_t digits;
    memcpy(&digits, at, 8);
    digits = LITTLE_64(digits) ^ '0' * ones;
    uint64_t others = ((digits + (0x80 - 10) * ones) | digits) & 0x80 * ones; /* The first byte set so is no digit. */
    if (others == 0 || (uint8_t)(digits - 1) > 8) return read_any_id(at, id);
    unsigned bit = (unsigned)__builtin_ctzll(others);
    digits <<= 71 - bit; /* what follows is gone, and zeros stand before */
    digits = (digits * (10 * 0x100 + 1) >> 8) & 0x00ff00ff00ff00ff;
    digits = (digits * (100 * 0x10000 + 1) >> 16) & 0x0000ffff0000ffff;
    *id = (uint32_t)(digits * (10000 * 0x100000000 + 1) >> 32);
    return at + bit / 8;
}

/* Read a list of ids that begins at `at` with its bracket; NULL: it is something else. */
static const char *read_ids(const char *at, const char *end, uint32_t *out, uint32_t *count) {
    for (uint32_t n = 0;; n++) {
        at = read_id(skip_space(at + 1), end, out + n);
        if (at == NULL) return NULL;
        if (*at == ',') continue;
        at = skip_space(at);
        if (*at == ']') {
            *count = n + 1;
            return at + 1;
        }
        if (*at != ',') return NULL;
    }
}

typedef struct {
    uint32_t begin, end; /* of the list, in the text */
    uint32_t count;      /* ids */
    uint32_t most;       /* the largest one */
    uint32_t packed;     /* bytes */
    uint32_t ids[];      /* and behind them, packed, the ids */
} found;

/* Find the list of ids under a key of the outermost object; `out` has room for its fields and a word for each byte of
   the text. Returns 1; 0: there is none, it holds something else, the key comes twice or some key has escapes. What is
   not valid JSON may be found or not: whoever parses the rest will say so. */
int baton_find_ids(const char *text, uint32_t size, const char *key, found *out) {
    const char *at = text, *end = text + size;
    size_t key_size = strlen(key);
    int depth = 0, plain;
    out->count = 0;
    while (at < end) {
        char c = *at;
        if (c == '"') {
            const char *begin = at + 1, *behind = skip_string(at, end, &plain);
            if (behind == NULL) return 0;
            at = behind;
            if (depth != 1) continue;
            const char *next = skip_space(at);
            if (*next != ':') continue; /* a value */
            if (!plain) return 0;
            at = skip_space(next + 1);
            if ((size_t)(behind - 1 - begin) != key_size || memcmp(begin, key, key_size) != 0) continue;
            if (out->count || *at != '[') return 0;
            out->begin = (uint32_t)(at - text);
            at = read_ids(at, end, out->ids, &out->count);
            if (at == NULL) return 0;
            out->end = (uint32_t)(at - text);
            continue;
        }
        if (c == '{' || c == '[') depth++;
        if (c == '}' || c == ']') depth--;
        at++;
    }
    if (!out->count || depth != 0) return 0;
    out->most = baton_max_id(out->ids, out->count);
    out->packed = (uint32_t)baton_pack_ids(out->ids, out->count, (uint8_t *)(out->ids + out->count));
    return 1;
}
