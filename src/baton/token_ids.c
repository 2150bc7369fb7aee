/* Token ids between JSON text, arrays of uint32 and protobuf's wire format, see token_ids.py. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Write ids as protobuf's packed varints; out has room for five bytes each. Returns the bytes written. */
size_t baton_pack_ids(const uint32_t *ids, size_t count, uint8_t *out) {
    uint8_t *at = out;
    for (size_t i = 0; i < count; i++) {
        uint32_t id = ids[i];
        while (id >= 0x80) *at++ = (uint8_t)(id | 0x80), id >>= 7;
        *at++ = (uint8_t)id;
    }
    return (size_t)(at - out);
}

/* Return the largest of some ids; 0 of none. */
uint32_t baton_max_id(const uint32_t *ids, size_t count) {
    uint32_t most = 0;
    for (size_t i = 0; i < count; i++)
        if (ids[i] > most) most = ids[i];
    return most;
}

static const char *skip_space(const char *at, const char *end) {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) at++;
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

/* Read a list of ids that begins at `at` with its bracket; NULL: it is something else, or too long. */
static const char *read_ids(const char *at, const char *end, uint32_t *out, size_t room, uint64_t *count) {
    size_t n = 0;
    at++;
    for (;;) {
        at = skip_space(at, end);
        const char *begin = at;
        uint64_t value = 0;
        while (at < end && *at >= '0' && *at <= '9' && at - begin < 11) value = 10 * value + (uint64_t)(*at++ - '0');
        if (at == begin || (*begin == '0' && at - begin > 1) || value > UINT32_MAX || n == room) return NULL;
        out[n++] = (uint32_t)value;
        at = skip_space(at, end);
        if (at == end) return NULL;
        if (*at == ']') break;
        if (*at++ != ',') return NULL;
    }
    *count = n;
    return at + 1;
}

/* Find the list of ids under a key of the outermost object. Returns 1 and sets span to {begin, end, count} of the list;
   0: there is none, it holds something else, the key comes twice or some key has escapes. What is not valid JSON may be
   found or not: whoever parses the rest will say so. */
int baton_find_ids(const char *text, size_t size, const char *key, size_t key_size, uint32_t *out, size_t room,
                   uint64_t span[3]) {
    const char *at = text, *end = text + size;
    int depth = 0, found = 0, plain;
    while (at < end) {
        char c = *at;
        if (c == '"') {
            const char *begin = at + 1, *behind = skip_string(at, end, &plain);
            if (behind == NULL) return 0;
            at = behind;
            if (depth != 1) continue;
            const char *next = skip_space(at, end);
            if (next == end || *next != ':') continue; /* a value */
            if (!plain) return 0;
            at = skip_space(next + 1, end);
            if ((size_t)(behind - 1 - begin) != key_size || memcmp(begin, key, key_size) != 0) continue;
            if (found || at == end || *at != '[') return 0;
            const char *list = at;
            at = read_ids(at, end, out, room, &span[2]);
            if (at == NULL) return 0;
            span[0] = (uint64_t)(list - text), span[1] = (uint64_t)(at - text), found = 1;
            continue;
        }
        if (c == '{' || c == '[') depth++;
        if (c == '}' || c == ']') depth--;
        at++;
    }
    return found && depth == 0;
}
