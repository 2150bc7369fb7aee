/* Beginnings of texts whose ids are known, in pieces of one size, see native_words.py.

   A piece is found by a hash of the text up to its end, and is the right one only if it has these bytes and comes behind
   the right one: no text gets another's ids, whatever the hash. With it are the ids of the words that are decided where
   the piece ends, whatever follows. What is seen once is only noted; what is seen again is remembered. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE = 512, PIECE_IDS = 576, WAYS = 4, SETS = 256, NOTES = 4096, MAX_MARKS = 64 };

static inline uint64_t mix(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

typedef struct {
    uint64_t hash, serial, before; /* which one, and which one it comes behind; 0: no piece, the beginning */
    uint64_t used;                 /* when, in texts */
    uint64_t decided;              /* bytes of the text whose ids are known with this piece */
    uint64_t count;                /* of the ids since the piece before */
    uint8_t text[PIECE];
    uint32_t ids[PIECE_IDS];
} piece;

typedef struct {
    uint64_t seed, factor;
    uint64_t texts, serials;
    uint64_t *notes; /* hashes of pieces that were seen */
    piece *pieces;   /* sets of WAYS */
} prefixes;

/* A place where words are decided, and how many ids lie before it. */
typedef struct {
    uint64_t at, written;
} mark;

/* What is to be remembered of a text, piece by piece. */
typedef struct {
    uint64_t watch; /* the first word that was read beyond this byte is not decided where the next piece ends */
    uint64_t begin; /* of the first piece */
    uint64_t before;
    size_t wanted, count;
    uint64_t hashes[MAX_MARKS]; /* the first `wanted` of them */
    mark marks[MAX_MARKS];
} recording;

static int prefixes_make(prefixes *p, uint64_t seed, uint64_t factor) {
    *p = (prefixes){.seed = seed, .factor = factor | 1};
    p->notes = calloc(NOTES, sizeof *p->notes);
    p->pieces = calloc((size_t)SETS * WAYS, sizeof *p->pieces); /* pages that nothing is written to take no memory */
    return p->notes && p->pieces ? 0 : -1;
}

static void prefixes_free(prefixes *p) {
    free(p->notes);
    free(p->pieces);
}

static inline uint64_t word_at(const uint8_t *text) {
    uint64_t value;
    memcpy(&value, text, 8);
    return value;
}

static uint64_t piece_hash(const prefixes *p, uint64_t before, const uint8_t *text) {
    uint64_t one = before ^ p->seed, two = p->factor;
    for (size_t i = 0; i < PIECE; i += 32) {
        one = mix(one ^ word_at(text + i), p->factor ^ word_at(text + i + 8));
        two = mix(two ^ word_at(text + i + 16), p->seed ^ word_at(text + i + 24));
    }
    return mix(one ^ p->seed, two ^ p->factor);
}

static inline piece *set_of(const prefixes *p, uint64_t hash) { return p->pieces + (hash % SETS) * WAYS; }

static piece *piece_of(const prefixes *p, uint64_t hash, uint64_t before, const uint8_t *text) {
    piece *set = set_of(p, hash);
    for (size_t way = 0; way < WAYS; way++)
        if (set[way].serial && set[way].hash == hash && set[way].before == before && !memcmp(set[way].text, text, PIECE))
            return set + way;
    return NULL;
}

/* How far the pieces lead that are known of a text. */
typedef struct {
    uint64_t hash, serial, end; /* of the last one */
    mark known;
} walk;

/* Go over the pieces of a text that are known and write their ids, as long as there is room. */
static walk prefixes_walk(const prefixes *p, const uint8_t *text, uint64_t size, uint32_t *out, uint64_t room) {
    walk w = {0};
    for (; w.end + PIECE <= size; w.end += PIECE) {
        uint64_t hash = piece_hash(p, w.hash, text + w.end);
        piece *found = piece_of(p, hash, w.serial, text + w.end);
        if (!found || w.known.written + found->count > room) return w;
        memcpy(out + w.known.written, found->ids, 4 * found->count);
        w.known = (mark){found->decided, w.known.written + found->count};
        w.hash = hash, w.serial = found->serial, found->used = p->texts;
    }
    return w;
}

/* Begin with what is known of a text. Of the pieces behind that, say in `r` which are to be remembered: they were seen
   before, and the one before them is known or will be. longest: what may have to be read beyond a byte to know that no
   token's name begins there. */
static mark prefixes_begin(prefixes *p, const uint8_t *text, uint64_t size, uint64_t longest, uint32_t *out, uint64_t room,
                           recording *r) {
    p->texts++;
    walk w = prefixes_walk(p, text, size, out, room);
    r->begin = w.end, r->before = w.serial;
    if (longest >= PIECE) return w.known;
    size_t unknown = 0;
    uint64_t hash = w.hash;
    for (uint64_t at = w.end; at + PIECE <= size && unknown < MAX_MARKS; at += PIECE) {
        hash = piece_hash(p, hash, text + at);
        if (r->wanted == unknown && p->notes[hash % NOTES] == hash) r->wanted++;
        r->hashes[unknown++] = hash;
    }
    /* From the last one, so that where two share a note it is the first one's: it has to be known before the other. */
    while (unknown--) p->notes[r->hashes[unknown] % NOTES] = r->hashes[unknown];
    if (r->wanted) r->watch = r->begin + PIECE - longest;
    return w.known;
}

/* Note that nothing from here on is decided by the pieces that end before `read` plus the longest name. */
static void prefixes_mark(recording *r, uint64_t read, uint64_t at, uint64_t written) {
    while (read > r->watch) {
        r->marks[r->count++] = (mark){at, written};
        r->watch = r->count < r->wanted ? r->watch + PIECE : UINT64_MAX;
    }
}

/* Remember what was marked. out: the text's ids, of which `from` were known before. */
static void prefixes_end(prefixes *p, const recording *r, const uint8_t *text, const uint32_t *out, uint64_t from) {
    uint64_t before = r->before;
    for (size_t i = 0; i < r->count; i++) {
        const mark *m = r->marks + i;
        uint64_t count = m->written - from;
        if (count > PIECE_IDS) return;
        piece *set = set_of(p, r->hashes[i]), *oldest = set;
        for (size_t way = 1; way < WAYS; way++)
            if (set[way].used < oldest->used) oldest = set + way;
        if (oldest->used == p->texts) return; /* all of this text: without them the piece would not be come to */
        oldest->hash = r->hashes[i], oldest->before = before, oldest->serial = before = ++p->serials;
        oldest->used = p->texts, oldest->decided = m->at, oldest->count = count;
        memcpy(oldest->text, text + r->begin + i * PIECE, PIECE);
        memcpy(oldest->ids, out + from, 4 * count);
        from = m->written;
    }
}
