/* Which slots hold which blocks: a hash table from block hashes to sets of slots.

   Of a hash of 32 bytes 16 are kept. Two blocks are confused after 2^64 others, also if somebody looks for such a pair,
   and then a match rate is wrong: what a request may use is decided by the instance, which compares all 32.

   The entries lie one after the other in the order in which they came, hash and set apart, and the table itself holds
   their numbers only. So a chain that was stored in one go lies side by side, and a look-up compares it with the one
   that is asked for hash by hash in sequence instead of probing the table for each; where blocks lie scattered it
   probes, and asks the memory for the probes to come ahead of time. Nothing is assumed of what a slot holds: the answer
   is exact whatever was stored and removed in which order.

   A set has one bit per slot in `words` words of 64 bits; they become more when more slots are in use.

   The table grows without a stop. Memory for all entries that there may be is mapped at once and comes with its first
   use. When the buckets get full, the memory of new ones is made ready page by page; then the old buckets stay beside
   the new ones, which get a few entries with every entry that is added, and are asked for what is not there yet. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(MAP_NORESERVE)
#define MAP_NORESERVE 0
#endif

#define HASH 32
#define KEY 16
#define LINE 64
#define NONE UINT32_MAX
#define AHEAD 32
#define MOST_LINES 8
#define BIG_PAGE (2 << 20)
#define MOVED 4 /* entries that move with each one that is added: all have moved long before the table is full again */

/* Numbers of entries plus 1, 0: empty, so that fresh memory is an empty table. */
typedef struct {
    uint32_t *at;
    uint32_t bits;
} buckets;

typedef struct {
    uint8_t *keys;      /* `KEY` bytes per entry; the number of the next free one while it is free */
    uint64_t *sets;     /* `words` per entry; empty: the entry is free */
    buckets now, before, next; /* `before` while entries are to be moved, `next` while it is made ready; else empty */
    uint64_t factor;    /* secret: nobody can choose tokens whose blocks meet in one bucket */
    uint64_t count, used, limit;
    uint64_t moved, ready; /* entries below `moved` are in `now`; bytes of `next` that were touched */
    uint32_t words, free;
} table;

static inline uint8_t *key_of(const table *t, uint32_t entry) { return t->keys + (size_t)entry * KEY; }
static inline uint64_t *set_of(const table *t, uint32_t entry) { return t->sets + (size_t)entry * t->words; }

static inline int same(const uint8_t *a, const uint8_t *b) {
    uint64_t x[2], y[2];
    memcpy(x, a, KEY);
    memcpy(y, b, KEY);
    return !((x[0] ^ y[0]) | (x[1] ^ y[1]));
}

static inline uint64_t bucket_of(const table *t, const buckets *b, const uint8_t *hash) {
    uint64_t head;
    memcpy(&head, hash, sizeof head);
    return (head * t->factor) >> (64 - b->bits);
}

static inline uint64_t mask_of(const buckets *b) { return ((uint64_t)1 << b->bits) - 1; }

static inline int empty(const uint64_t *set, uint32_t words) {
    uint64_t all = 0;
    for (uint32_t w = 0; w < words; w++) all |= set[w];
    return !all;
}

static inline uint32_t find_in(const table *t, const buckets *b, const uint8_t *hash) {
    uint64_t mask = mask_of(b);
    for (uint64_t at = bucket_of(t, b, hash);; at = (at + 1) & mask) {
        uint32_t entry = b->at[at] - 1; /* NONE if it is empty */
        if (entry == NONE || same(key_of(t, entry), hash)) return entry;
    }
}

static uint32_t find(const table *t, const uint8_t *hash) {
    uint32_t entry = find_in(t, &t->now, hash);
    return entry != NONE || !t->before.at ? entry : find_in(t, &t->before, hash);
}

/* Goes along a chain: the entry of its last block, in which direction the next one lay, and where this run began. */
typedef struct {
    uint32_t entry;
    int step;
    size_t begin;
} walker;

#define AT_THE_START {NONE, 1, 0}

static inline int beside(const table *t, uint32_t entry, int step, const uint8_t *hash) {
    int64_t next = (int64_t)entry + step;
    return next >= 0 && next < (int64_t)t->used && !empty(set_of(t, (uint32_t)next), t->words) &&
           same(key_of(t, (uint32_t)next), hash);
}

/* Ask the memory for what a search will touch, on the guess that runs to come are as long as the last one. */
static inline void prepare(const table *t, size_t run, const uint8_t *chain, size_t at, size_t length) {
    size_t ahead = run >= AHEAD ? run : (AHEAD + run - 1) / run * run;
    if (at + 2 * ahead < length) __builtin_prefetch(&t->now.at[bucket_of(t, &t->now, chain + (at + 2 * ahead) * HASH)]);
    if (at + ahead >= length) return;
    uint32_t likely = t->now.at[bucket_of(t, &t->now, chain + (at + ahead) * HASH)] - 1;
    if (likely == NONE) return;
    for (size_t line = 0; line < MOST_LINES && line * LINE <= run * KEY; line++)
        __builtin_prefetch(key_of(t, likely) + line * LINE);
    for (size_t line = 0; line < MOST_LINES && line * LINE <= run * t->words * sizeof(uint64_t); line++)
        __builtin_prefetch((const uint8_t *)set_of(t, likely) + line * LINE);
}

/* Return the entry of chain[at]: beside the one of chain[at - 1] if it lies there. */
static uint32_t walk(const table *t, walker *w, const uint8_t *chain, size_t at, size_t length) {
    const uint8_t *hash = chain + at * HASH;
    if (w->entry != NONE) {
        if (beside(t, w->entry, w->step, hash)) return w->entry += w->step;
        if (beside(t, w->entry, -w->step, hash)) {
            w->step = -w->step;
            return w->entry += w->step;
        }
    }
    if (at) prepare(t, at - w->begin, chain, at, length);
    w->begin = at;
    return w->entry = find(t, hash);
}

/* How many blocks after chain[at] lie beside each other and are held by the very same slots as it is. */
static size_t alike(const table *t, walker *w, const uint8_t *chain, size_t at, size_t length) {
    if (w->entry == NONE) return 0;
    size_t most = length - at - 1, room = w->step > 0 ? t->used - w->entry - 1 : w->entry, run = 0;
    if (room < most) most = room;
    const uint64_t *set = set_of(t, w->entry), *next = set;
    const uint8_t *key = key_of(t, w->entry), *hash = chain + at * HASH;
    ptrdiff_t key_step = w->step * KEY, set_step = w->step * (ptrdiff_t)t->words;
    for (; run < most; run++) {
        key += key_step;
        next += set_step;
        hash += HASH;
        if (!same(key, hash) || *next != *set) break;
        if (t->words > 1 && memcmp(next, set, t->words * sizeof *set)) break;
    }
    w->entry += (int64_t)w->step * (int64_t)run;
    return run;
}

static inline size_t size_of(const buckets *b) { return sizeof *b->at << b->bits; }

/* Map zeros that take memory when they are used first, in big pages if there are some: half of what a look-up waits for
   is where pages lie. */
static void *map(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return NULL;
#if defined(MADV_HUGEPAGE)
    if (bytes > BIG_PAGE) (void)madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return memory;
}

static void unmap(void *memory, size_t bytes) {
    if (memory) (void)munmap(memory, bytes);
}

static size_t key_bytes(const table *t) { return (t->limit + 1) * KEY; }
static size_t set_bytes(const table *t, uint32_t words) { return (t->limit + 1) * words * sizeof(uint64_t); }

/* Where an entry is among buckets, or where it would be. */
static uint64_t place_of(const table *t, const buckets *b, uint32_t entry) {
    uint64_t mask = mask_of(b), at = bucket_of(t, b, key_of(t, entry));
    while (b->at[at] && b->at[at] - 1 != entry) at = (at + 1) & mask;
    return at;
}

static inline void put(table *t, uint32_t entry) { t->now.at[place_of(t, &t->now, entry)] = entry + 1; }

/* Move entries to the new buckets; the old ones stay whole until all have moved. */
static void move_on(table *t, uint64_t number) {
    uint64_t end = t->moved + number < t->used ? t->moved + number : t->used;
    for (; t->moved < end; t->moved++) {
        uint32_t entry = (uint32_t)t->moved;
        if (t->moved + AHEAD < t->used)
            __builtin_prefetch(&t->now.at[bucket_of(t, &t->now, key_of(t, entry + AHEAD))], 1);
        if (!empty(set_of(t, entry), t->words)) put(t, entry);
    }
    if (t->moved < t->used) return;
    unmap(t->before.at, size_of(&t->before));
    t->before.at = NULL;
}

/* Go on with growing. One call touches one big page: the system clears it, which takes longer than all else here. */
static void grow(table *t) {
    if (!t->next.at) return;
    if (t->ready < size_of(&t->next)) {
        *(volatile uint32_t *)((char *)t->next.at + t->ready) = 0;
        t->ready += BIG_PAGE;
        return;
    }
    if (t->before.at) move_on(t, t->used);
    t->before = t->now;
    t->now = t->next;
    t->next.at = NULL;
    t->moved = 0;
}

static int reserve(table *t) {
    uint64_t number = t->count + 1;
    if (number * 5 > (uint64_t)3 << t->now.bits && !t->next.at) {
        t->next = (buckets){NULL, t->now.bits + 1};
        t->next.at = map(size_of(&t->next));
        t->ready = 0;
    }
    if (number * 10 > (uint64_t)7 << t->now.bits) {
        t->ready = SIZE_MAX;
        grow(t);
    }
    if (t->before.at) move_on(t, MOVED);
    return number < (uint64_t)1 << t->now.bits ? 0 : -1;
}

static uint32_t insert(table *t, const uint8_t *hash) {
    if (reserve(t)) return NONE;
    uint32_t entry = t->free;
    if (entry != NONE) memcpy(&t->free, key_of(t, entry), sizeof t->free);
    else entry = (uint32_t)t->used++;
    memcpy(key_of(t, entry), hash, KEY);
    memset(set_of(t, entry), 0, t->words * sizeof(uint64_t));
    put(t, entry);
    t->count++;
    return entry;
}

/* Take an entry out of buckets that may have it, and close the gap it leaves. */
static void take_out(table *t, buckets *b, uint32_t entry) {
    uint64_t mask = mask_of(b), hole = place_of(t, b, entry);
    if (!b->at[hole]) return;
    for (uint64_t at = (hole + 1) & mask; b->at[at]; at = (at + 1) & mask) {
        uint64_t home = bucket_of(t, b, key_of(t, b->at[at] - 1));
        if (((at - home) & mask) < ((at - hole) & mask)) continue;
        b->at[hole] = b->at[at];
        hole = at;
    }
    b->at[hole] = 0;
}

static void erase(table *t, uint32_t entry) {
    take_out(t, &t->now, entry);
    if (t->before.at) take_out(t, &t->before, entry);
    memset(set_of(t, entry), 0, t->words * sizeof(uint64_t));
    memcpy(key_of(t, entry), &t->free, sizeof t->free);
    t->free = entry;
    t->count--;
}

void baton_table_free(table *t) {
    if (!t) return;
    unmap(t->keys, key_bytes(t));
    unmap(t->sets, set_bytes(t, t->words));
    unmap(t->now.at, size_of(&t->now));
    unmap(t->before.at, size_of(&t->before));
    unmap(t->next.at, size_of(&t->next));
    free(t);
}

table *baton_table_new(uint64_t limit, uint64_t factor) {
    table *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    *t = (table){.factor = factor | 1, .limit = limit, .words = 1, .free = NONE, .now = {.bits = 11}};
    t->keys = map(key_bytes(t));
    t->sets = map(set_bytes(t, 1));
    t->now.at = map(size_of(&t->now));
    if (t->keys && t->sets && t->now.at) return t;
    baton_table_free(t);
    return NULL;
}

uint64_t baton_table_count(const table *t) { return t->count; }

/* Make sets wide enough for so many words; -1: no memory. */
int baton_table_widen(table *t, uint32_t words) {
    if (words <= t->words) return 0;
    uint64_t *sets = map(set_bytes(t, words));
    if (!sets) return -1;
    for (uint64_t entry = 0; entry < t->used; entry++)
        memcpy(sets + entry * words, t->sets + entry * t->words, t->words * sizeof *sets);
    unmap(t->sets, set_bytes(t, t->words));
    t->sets = sets;
    t->words = words;
    return 0;
}

/* Ask the memory for what the next `AHEAD` blocks will touch, wherever they lie: all at once instead of one by one. */
static void warm(const table *t, const uint8_t *chain, size_t at, size_t length) {
    if (at % AHEAD) return;
    size_t end = at + AHEAD < length ? at + AHEAD : length;
    for (size_t i = at; i < end; i++) __builtin_prefetch(&t->now.at[bucket_of(t, &t->now, chain + i * HASH)]);
    for (size_t i = at; i < end; i++) {
        uint32_t likely = t->now.at[bucket_of(t, &t->now, chain + i * HASH)] - 1;
        if (likely == NONE) continue;
        __builtin_prefetch(key_of(t, likely));
        __builtin_prefetch(set_of(t, likely));
    }
}

/* Add a slot to the sets of blocks. Returns how many did not hold it before, in the upper half how many found no room;
   -1: no memory. */
int64_t baton_table_store(table *t, uint32_t slot, const uint8_t *chain, size_t length) {
    uint32_t word = slot / 64;
    uint64_t bit = (uint64_t)1 << slot % 64;
    walker w = AT_THE_START;
    int64_t result = 0;
    grow(t);
    for (size_t at = 0; at < length; at++) {
        warm(t, chain, at, length);
        uint32_t entry = walk(t, &w, chain, at, length);
        if (entry == NONE) {
            if (t->count >= t->limit) {
                result += (int64_t)1 << 32;
                continue;
            }
            entry = insert(t, chain + at * HASH);
            if (entry == NONE) return -1;
            w.entry = entry;
        }
        uint64_t *set = set_of(t, entry);
        result += !(set[word] & bit);
        set[word] |= bit;
    }
    return result;
}

/* Take a slot out of the sets of blocks; returns how many it held. */
uint64_t baton_table_remove(table *t, uint32_t slot, const uint8_t *chain, size_t length) {
    uint32_t word = slot / 64;
    uint64_t bit = (uint64_t)1 << slot % 64, gone = 0;
    for (size_t at = 0; at < length; at++) {
        warm(t, chain, at, length);
        uint32_t entry = find(t, chain + at * HASH);
        if (entry == NONE || !(set_of(t, entry)[word] & bit)) continue;
        set_of(t, entry)[word] &= ~bit;
        gone++;
        if (empty(set_of(t, entry), t->words)) erase(t, entry);
    }
    return gone;
}

static size_t note(uint64_t bits, uint32_t word, size_t depth, uint32_t *out, size_t found) {
    for (; bits && depth; bits &= bits - 1) {
        out[2 * found] = word * 64 + (uint32_t)__builtin_ctzll(bits);
        out[2 * found++ + 1] = (uint32_t)depth;
    }
    return found;
}

/* How many leading blocks of a chain does each slot hold? slots: those in question, `words` words; out: pairs of slot
   and depth, none for depth 0. Returns the number of pairs. */
size_t baton_table_match(const table *t, const uint8_t *chain, size_t length, const uint64_t *slots, uint32_t *out) {
    walker w = AT_THE_START;
    size_t at = 0, found = 0;
    uint64_t alive[t->words];
    memcpy(alive, slots, sizeof alive);
    for (; at < length && !empty(alive, t->words); at++) {
        uint32_t entry = walk(t, &w, chain, at, length);
        for (uint32_t word = 0; word < t->words; word++) {
            uint64_t held = entry == NONE ? 0 : set_of(t, entry)[word];
            if (!(alive[word] & ~held)) continue;
            found = note(alive[word] & ~held, word, at, out, found);
            alive[word] &= held;
        }
        at += alike(t, &w, chain, at, length);
    }
    for (uint32_t word = 0; word < t->words; word++) found = note(alive[word], word, at, out, found);
    return found;
}

/* One part of the index as the router keeps it, see IndexColumns. */
struct index_row {
    double slot; /* -1: none */
    double until; /* when it stops to be of use */
    double format, block_size;
};

/* How many leading tokens of a prompt does each row hold? Those of the chain's format alone are looked at, as long as
   they are of use `now`; out: a number per row, which is only raised. Rows that are pending for the chain hold `depths`
   blocks of it in any case; rows below 0 are nobody's. pairs: room for two numbers per slot. */
void baton_table_held(const table *t, const uint8_t *chain, size_t length, const struct index_row *rows, size_t count,
                      double format, double now, const int64_t *pending, const int64_t *depths, size_t num_pending,
                      uint32_t *pairs, double *out) {
    uint64_t slots[t->words];
    uint32_t held[t->words * 64];
    memset(slots, 0, sizeof slots);
    memset(held, 0, sizeof held);
    for (size_t i = 0; i < count; i++) {
        const struct index_row *row = rows + i;
        if (row->format != format || row->slot < 0 || row->until < now) continue;
        uint32_t slot = (uint32_t)row->slot;
        slots[slot / 64] |= (uint64_t)1 << slot % 64;
    }
    size_t found = baton_table_match(t, chain, length, slots, pairs);
    for (size_t i = 0; i < found; i++) held[pairs[2 * i]] = pairs[2 * i + 1];
    for (size_t i = 0; i < count; i++) {
        const struct index_row *row = rows + i;
        if (row->format != format || row->slot < 0) continue;
        double tokens = held[(uint32_t)row->slot] * row->block_size;
        if (tokens > out[i]) out[i] = tokens;
    }
    for (size_t i = 0; i < num_pending; i++) {
        if (pending[i] < 0) continue;
        const struct index_row *row = rows + pending[i];
        double tokens = (double)depths[i] * row->block_size;
        if (row->format == format && row->slot >= 0 && row->until >= now && tokens > out[pending[i]])
            out[pending[i]] = tokens;
    }
}

/* How many leading blocks does each group of slots hold together? groups: `words` words each; out: a depth each. */
void baton_table_match_any(const table *t, const uint8_t *chain, size_t length, const uint64_t *groups, size_t number,
                           uint32_t *out) {
    walker w = AT_THE_START;
    size_t left = number;
    for (size_t g = 0; g < number; g++) out[g] = NONE;
    for (size_t at = 0; at < length && left; at++) {
        uint32_t entry = walk(t, &w, chain, at, length);
        for (size_t g = 0; g < number; g++) {
            if (out[g] != NONE) continue;
            uint64_t held = 0;
            for (uint32_t word = 0; entry != NONE && word < t->words; word++)
                held |= set_of(t, entry)[word] & groups[g * t->words + word];
            if (held) continue;
            out[g] = (uint32_t)at;
            left--;
        }
        at += alike(t, &w, chain, at, length);
    }
    for (size_t g = 0; g < number; g++)
        if (out[g] == NONE) out[g] = (uint32_t)length;
}

/* Take slots (`words` words) out of the sets of all entries from `from` on, for about `budget` units of work. Returns
   where to go on, or 0 at the end. */
uint64_t baton_table_sweep(table *t, const uint64_t *dead, uint64_t from, uint64_t budget) {
    for (uint64_t entry = from; entry < t->used; entry++) {
        uint64_t *set = set_of(t, (uint32_t)entry), before = 0;
        for (uint32_t word = 0; word < t->words; word++) {
            before |= set[word];
            set[word] &= ~dead[word];
        }
        uint64_t cost = 1;
        if (before && empty(set, t->words)) {
            erase(t, (uint32_t)entry);
            cost = 20;
        }
        if (budget <= cost) return entry + 1 < t->used ? entry + 1 : 0;
        budget -= cost;
    }
    return 0;
}
