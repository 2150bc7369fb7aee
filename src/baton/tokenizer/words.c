/* From UTF-8 text to token ids, word by word, see native_words.py.

   A split rule is an automaton over classes of characters, made by split_table.py. It finds a word's end as a
   backtracking engine would: of all ways to match, the first one that the expression names. Words' ids are in a hash
   table, one per tenant; keys are hashed with secret numbers, so that nobody can choose words that collide. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "merges.h"
#include "prefixes.h"

enum { DONE, MORE, FOREIGN };
enum { MAX_KEPT = 64, MAX_PROBES = 64, MIN_BITS = 8, FEW = 3, BATCH = 32 };
enum { MAX_MERGED = 8192 }; /* bytes of words that are not in the table, in one call */
static const uint32_t NONE = UINT32_MAX, REFUSED = UINT32_MAX - 1;

/* A word that is known: half a line of the processor's cache. Behind it, if there are more, lie the other bytes of the
   word in eights, and all of its ids. */
typedef struct {
    uint8_t size, count;
    uint32_t ids[FEW];
    uint64_t bytes[2]; /* the first 16, zeros behind them */
} record;

typedef struct {
    uint64_t seed, factor;
    uint64_t *buckets; /* upper half: a part of the hash; lower half: which record, plus 1; 0: empty */
    record *records;
    uint64_t bits, count, used, room;
    uint64_t most_words, most_room;
    prefixes texts;
} table;

typedef struct {
    const uint16_t *moves;  /* [class * stride + last move]: twice the next row, 0: none; plus 1 if a word may end here */
    const uint16_t *pages;  /* [character / 256]; those of ASCII are page 0 */
    const uint8_t *classes; /* [page * 256 + character % 256]; 0: the rule does not know it */
    const uint32_t *ascii;  /* [byte]: class * stride */
    const uint32_t *roots;  /* [byte]: the node of tokens that begin so; 0: none */
    const uint32_t *nodes;  /* [3 * node]: the id of the token that ends here or NONE, first edge, number of edges */
    const uint32_t *edges;  /* [2 * edge]: byte, node */
    const merges *merges;   /* what makes words of bytes */
    const table *whole;     /* words that are one token though merging does not lead there */
    uint32_t start;         /* the move that a word begins after */
    uint32_t stride;        /* twice the number of rows */
    uint32_t end_class;     /* what the end of a text is */
    uint32_t characters;    /* those from here on the rule does not know */
    uint32_t only;          /* the one byte that all tokens begin with; 0: there are several */
    uint32_t longest;       /* bytes of the longest token's name; at least 1 */
    uint32_t longest_whole; /* bytes of the longest word that should be in `whole` and is too long for it; or 0 */
} rule;

typedef struct {
    uint64_t at;      /* bytes done */
    uint64_t written; /* ids */
    uint64_t merged;  /* bytes of words that were not in the table */
    uint64_t border;  /* the next token that stands in the text by its name, or its end */
    uint64_t size;    /* of that token */
    uint64_t id;
    uint32_t *out;    /* ids go here */
    uint64_t room;    /* for so many */
} progress;

/* --- words' ids --- */

/* Return up to eight bytes, zeros behind them; nothing from `end` on is read. */
static inline uint64_t eight(const uint8_t *text, size_t size, const uint8_t *end) {
    uint64_t value = 0;
    if (size >= 8 || end - text >= 8) {
        memcpy(&value, text, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        return size >= 8 ? value : value & ~(~(uint64_t)0 >> 8 * size);
#else
        return size >= 8 ? value : value & ~(~(uint64_t)0 << 8 * size);
#endif
    }
    memcpy(&value, text, size);
    return value;
}

static inline size_t eights(size_t bytes) { return (bytes + 7) / 8; }

static inline const uint8_t *behind(const record *known) { return (const uint8_t *)(known + 1); }

/* Return where all ids of a word lie that has more of them than its record holds. */
static inline const uint8_t *all_ids(const record *known) {
    return behind(known) + (known->size > 16 ? 8 * eights(known->size - 16u) : 0);
}

/* A word as it is looked up. Nothing from `end` on is read for it. */
typedef struct {
    const uint8_t *text;
    size_t size;
    uint64_t first, second, hash;
} key;

static inline key key_of(const table *t, const uint8_t *word, size_t size, const uint8_t *end) {
    key k = {.text = word, .size = size};
    k.first = eight(word, size, end);
    k.second = size > 8 ? eight(word + 8, size - 8, end) : 0;
    k.hash = mix(k.first ^ t->seed ^ size, k.second ^ t->factor);
    for (size_t i = 16; i < size; i += 8) k.hash = mix(k.hash ^ eight(word + i, size - i, end), t->factor);
    return k;
}

/* Return the bucket of a word, or the empty one where it would be; NULL: neither is near. */
static inline uint64_t *bucket_of(const table *t, const key *k) {
    uint64_t mask = ((uint64_t)1 << t->bits) - 1;
    for (uint64_t probe = 0; probe < MAX_PROBES; probe++) {
        uint64_t *bucket = t->buckets + ((k->hash + probe) & mask);
        if (*bucket == 0) return bucket;
        if (*bucket >> 32 != k->hash >> 32) continue;
        const record *known = t->records + (uint32_t)*bucket - 1;
        if ((known->size ^ k->size) | (known->bytes[0] ^ k->first) | (known->bytes[1] ^ k->second)) continue;
        if (k->size <= 16 || memcmp(behind(known), k->text + 16, k->size - 16) == 0) return bucket;
    }
    return NULL;
}

static void forget(table *t) {
    memset(t->buckets, 0, sizeof *t->buckets << t->bits);
    t->count = t->used = 0;
}

/* Make twice as many buckets. Words that then have none near are forgotten: only somebody's bad luck does that. */
static int widen(table *t) {
    uint64_t *old = t->buckets, size = (uint64_t)1 << t->bits, *buckets = calloc(2 * size, sizeof *buckets);
    if (!buckets) return -1;
    t->buckets = buckets;
    t->bits++;
    for (uint64_t i = 0; i < size; i++) {
        if (!old[i]) continue;
        const record *known = t->records + (uint32_t)old[i] - 1;
        uint8_t word[MAX_KEPT + 8] = {0};
        memcpy(word, known->bytes, 16);
        if (known->size > 16) memcpy(word + 16, behind(known), known->size - 16u);
        key k = key_of(t, word, known->size, word + sizeof word);
        uint64_t *bucket = bucket_of(t, &k);
        if (bucket) *bucket = old[i];
    }
    free(old);
    return 0;
}

void baton_words_free(table *t) {
    if (!t) return;
    free(t->buckets);
    free(t->records);
    prefixes_free(&t->texts);
    free(t);
}

/* Return a table of at most so many words and records; NULL: no memory. */
table *baton_words_new(uint64_t seed, uint64_t factor, uint64_t most_words, uint64_t most_room) {
    table *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    *t = (table){.seed = seed, .factor = factor | 1, .bits = MIN_BITS, .most_words = most_words, .most_room = most_room};
    t->buckets = calloc((size_t)1 << MIN_BITS, sizeof *t->buckets);
    if (t->buckets && prefixes_make(&t->texts, seed, factor) == 0) return t;
    baton_words_free(t);
    return NULL;
}

uint64_t baton_words_count(const table *t) { return t->count; }

/* Make room for more records, which begin where a line of the cache does. */
static int reserve(table *t, uint64_t more) {
    if (t->used + more <= t->room) return 0;
    uint64_t room = t->room * 2 > t->used + more ? t->room * 2 : 256 + more;
    if (room > t->most_room) room = t->most_room;
    void *records;
    if (posix_memalign(&records, 64, room * sizeof *t->records)) return -1;
    if (t->used) memcpy(records, t->records, t->used * sizeof *t->records);
    free(t->records);
    t->records = records;
    t->room = room;
    return 0;
}

/* Remember a word, unless it is long or has more ids than bytes. A full table is emptied first.
   Returns -1: no memory. */
int baton_words_add(table *t, const uint8_t *word, size_t size, const uint32_t *ids, size_t count) {
    if (size == 0 || size > MAX_KEPT || count > size) return 0;
    size_t rest = (size > 16 ? 8 * eights(size - 16) : 0) + (count > FEW ? 4 * count : 0);
    size_t need = 1 + (rest + sizeof(record) - 1) / sizeof(record);
    if (need > t->most_room) return 0;
    if (t->count >= t->most_words || t->used + need > t->most_room) forget(t);
    if (reserve(t, need) || ((t->count + 1) * 2 > (uint64_t)1 << t->bits && widen(t))) return -1;
    key k = key_of(t, word, size, word + size);
    uint64_t *bucket = bucket_of(t, &k);
    if (!bucket || *bucket) return 0;
    record *new = t->records + t->used;
    *new = (record){.size = (uint8_t)size, .count = (uint8_t)count, .bytes = {k.first, k.second}};
    memcpy(new->ids, ids, 4 * (count < FEW ? count : FEW));
    if (size > 16) memcpy(new + 1, word + 16, size - 16);
    if (count > FEW) memcpy((uint8_t *)(new + 1) + (all_ids(new) - behind(new)), ids, 4 * count);
    *bucket = (k.hash >> 32 << 32) | (t->used + 1);
    t->used += need;
    t->count++;
    return 0;
}

/* --- text --- */

/* Return a character of more than one byte, and its size; text is well formed. */
static inline uint32_t decode(const uint8_t *text, size_t *size) {
    uint32_t character = text[0];
    *size = character < 0xe0 ? 2 : character < 0xf0 ? 3 : 4;
    character &= 0xffu >> (*size + 1);
    for (size_t i = 1; i < *size; i++) character = character << 6 | (text[i] & 0x3f);
    return character;
}

/* Return where the word ends that begins at `at`; 0: the rule does not know, or the word is very long. `read` gets what
   had to be read to see that. */
static inline size_t word_end(const rule *r, const uint8_t *text, size_t at, size_t end, uint64_t *read) {
    const uint16_t *moves = r->moves;
    const uint32_t *ascii = r->ascii;
    size_t behind = 0, stop = end - at > MAX_WORD ? at + MAX_WORD : end, move = r->start;
    while (at < stop) {
        size_t here = at, row;
        if (text[at] < 0x80) row = ascii[text[at++]];
        else {
            size_t size, class = 0;
            uint32_t character = decode(text + at, &size);
            if (character < r->characters) class = r->classes[r->pages[character >> 8] * 256 + (character & 255)];
            if (!class) return 0;
            row = class * r->stride;
            at += size;
        }
        move = moves[row + move];
        if (move & 1) behind = here;
        if (move < 2) {
            *read = at;
            return behind;
        }
    }
    if (stop != end) return 0; /* too long, also where its last character just led to the end */
    *read = end;
    return r->moves[r->end_class * r->stride + move] & 1 ? at : behind;
}

/* Find the next token that stands in the text by its name: the longest one of those that begin first. */
static void find_token(const rule *r, const uint8_t *text, size_t end, progress *p) {
    p->size = 0;
    for (p->border = p->at; p->border < end; p->border++) {
        if (r->only) {
            const uint8_t *next = memchr(text + p->border, (int)r->only, end - p->border);
            if (!next) break;
            p->border = (size_t)(next - text);
        }
        uint32_t node = r->roots[text[p->border]];
        for (size_t behind = p->border + 1; node; behind++) {
            const uint32_t *n = r->nodes + 3 * (size_t)node, *edge = r->edges + 2 * (size_t)n[1], *last = edge + 2 * n[2];
            if (n[0] != NONE) p->size = behind - p->border, p->id = n[0];
            if (behind == end) break;
            while (edge < last && edge[0] != text[behind]) edge += 2;
            node = edge < last ? edge[1] : 0;
        }
        if (p->size) return;
    }
    p->border = end;
}

/* Find out the ids of a word that is not in the table; returns how many. */
static size_t ids_of(const rule *r, const key *k, uint32_t *out) {
    if (r->whole->count && k->size <= MAX_KEPT) {
        key same = key_of(r->whole, k->text, k->size, k->text + k->size);
        const uint64_t *bucket = bucket_of(r->whole, &same);
        if (bucket && *bucket) {
            *out = r->whole->records[(uint32_t)*bucket - 1].ids[0];
            return 1;
        }
    }
    return baton_merges_word(r->merges, k->text, k->size, out);
}

/* Go on with the words before the border. Several are looked up at a time: their places in the table are then waited for
   together. */
static int encode_words(const rule *r, table *t, const uint8_t *text, size_t size, progress *p, recording *marks) {
    uint64_t mask = ((uint64_t)1 << t->bits) - 1, read[BATCH];
    key keys[BATCH];
    size_t count = 0;
    for (size_t at = p->at; at < p->border && count < BATCH; count++) {
        size_t end = word_end(r, text, at, p->border, read + count);
        if (!end) return FOREIGN;
        if (end - at <= MAX_KEPT) keys[count] = key_of(t, text + at, end - at, text + size);
        else keys[count] = (key){.text = text + at, .size = end - at};
        __builtin_prefetch(t->buckets + (keys[count].hash & mask));
        at = end;
    }
    for (size_t i = 0; i < count; i++) {
        uint64_t bucket = t->buckets[keys[i].hash & mask];
        if (bucket) __builtin_prefetch(t->records + (uint32_t)bucket - 1);
    }
    for (size_t i = 0; i < count; i++) {
        const key *k = keys + i;
        if (read[i] > marks->watch) prefixes_mark(marks, read[i], p->at, p->written);
        const uint64_t *bucket = k->size <= MAX_KEPT ? bucket_of(t, k) : NULL;
        if (bucket && *bucket) {
            const record *known = t->records + (uint32_t)*bucket - 1;
            if (p->written + (known->count > FEW ? known->count : FEW) > p->room) return MORE;
            memcpy(p->out + p->written, known->ids, sizeof known->ids); /* a few too many cost less than a choice */
            if (known->count > FEW) memcpy(p->out + p->written, all_ids(known), 4u * known->count);
            p->written += known->count;
        } else {
            if (k->size > MAX_KEPT && k->size <= r->longest_whole) return FOREIGN;
            if (p->merged + k->size > MAX_MERGED) return MORE;
            uint32_t ids[MAX_WORD];
            size_t count = ids_of(r, k, ids);
            p->merged += k->size;
            if (baton_words_add(t, k->text, k->size, ids, count)) return FOREIGN; /* no memory */
            if (p->written + count > p->room) return MORE;
            memcpy(p->out + p->written, ids, 4 * count);
            p->written += count;
        }
        p->at += k->size;
    }
    return DONE;
}

/* Go on with the words and tokens of a text. */
static int encode(const rule *r, table *t, const uint8_t *text, size_t size, progress *p, recording *marks) {
    for (;;) {
        while (p->at < p->border) {
            int result = encode_words(r, t, text, size, p, marks);
            if (result != DONE) return result;
        }
        if (p->size) {
            if (p->id == REFUSED) return FOREIGN;
            if (p->written == p->room) return MORE;
            prefixes_mark(marks, p->border, p->at, p->written);
            p->out[p->written++] = (uint32_t)p->id;
            p->at += p->size;
        }
        if (p->at == size) return DONE;
        find_token(r, text, size, p);
    }
}

/* Go on with a text. Returns DONE; MORE: no room is left; FOREIGN: the text has something that is not known here. */
int baton_words_encode(const rule *r, table *t, const uint8_t *text, uint32_t size, progress *p) {
    recording marks = {.watch = UINT64_MAX};
    uint64_t known = 0;
    p->merged = 0;
    if (p->at == 0 && size >= PIECE) {
        mark begin = prefixes_begin(&t->texts, text, size, r->longest, p->out, p->room, &marks);
        p->at = p->border = begin.at;
        p->written = known = begin.written;
    }
    int result = encode(r, t, text, size, p, &marks);
    if (result != FOREIGN) prefixes_end(&t->texts, &marks, text, p->out, known);
    return result;
}

/* Return how many bytes of a text the pieces that are remembered decide. out: for so many ids. */
uint64_t baton_words_remembered(const table *t, const uint8_t *text, size_t size, uint32_t *out, size_t room) {
    return prefixes_walk(&t->texts, text, size, out, room).known.at;
}
