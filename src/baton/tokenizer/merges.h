/* Byte-level BPE: the ids of a word that no table knows, see native_words.py.

   A word begins as its bytes, and neighbours are merged as the model's list says: always the pair that stands first in
   the list, of several the leftmost one. Pairs wait in a heap; those whose halves were merged otherwise are passed by
   (Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", 2016, as Hugging Face's tokenizers
   does it). */

#include <stdint.h>
#include <stdlib.h>

enum { MAX_WORD = 1024 };
static const uint32_t MERGED = UINT32_MAX;

typedef struct {
    uint64_t pair; /* left id in the upper half, right id in the lower one; NO_PAIR: empty */
    uint32_t rank, id;
} merge;

typedef struct {
    uint64_t shift; /* of a hash, to the place of a merge */
    uint64_t mask;
    merge *merges;
    uint32_t bytes[256]; /* their ids */
} merges;

typedef struct {
    uint64_t order; /* rank, and where the left half begins in the lowest 16 bits */
    uint32_t id;
} candidate;

typedef struct {
    const merges *merges;
    size_t size, waiting;
    uint32_t ids[MAX_WORD]; /* [where it begins]; MERGED: a part of one before it */
    uint16_t before[MAX_WORD], behind[MAX_WORD];
    candidate heap[3 * MAX_WORD]; /* pairs of a word's bytes, and two more per merge */
} word;

static const uint64_t NO_PAIR = UINT64_MAX;

/* Return a pair's place, or the empty one where it would be. */
static inline merge *merge_at(const merges *m, uint64_t pair) {
    uint64_t at = pair * 0x9e3779b97f4a7c15u >> m->shift;
    while (m->merges[at].pair != pair && m->merges[at].pair != NO_PAIR) at = (at + 1) & m->mask;
    return m->merges + at;
}

static inline uint64_t pair_of(uint32_t left, uint32_t right) { return (uint64_t)left << 32 | right; }

void baton_merges_free(merges *m) {
    if (!m) return;
    free(m->merges);
    free(m);
}

/* Return the merges of a model in the order of their ranks; NULL: no memory. */
merges *baton_merges_new(const uint32_t *lefts, const uint32_t *rights, const uint32_t *ids, uint32_t count,
                         const uint32_t *bytes) {
    merges *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    uint64_t bits = 1;
    while ((uint64_t)1 << bits < 2 * (uint64_t)count) bits++;
    m->shift = 64 - bits, m->mask = ((uint64_t)1 << bits) - 1;
    memcpy(m->bytes, bytes, sizeof m->bytes);
    m->merges = malloc(sizeof(merge) << bits);
    if (!m->merges) {
        baton_merges_free(m);
        return NULL;
    }
    for (uint64_t i = 0; i <= m->mask; i++) m->merges[i].pair = NO_PAIR;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t pair = pair_of(lefts[i], rights[i]);
        *merge_at(m, pair) = (merge){.pair = pair, .rank = i, .id = ids[i]};
    }
    return m;
}

/* Let a pair of neighbours wait, if it is one that is merged. */
static void consider(word *w, size_t left) {
    size_t right = w->behind[left];
    if (right >= w->size) return;
    const merge *found = merge_at(w->merges, pair_of(w->ids[left], w->ids[right]));
    if (found->pair == NO_PAIR) return;
    candidate new = {.order = (uint64_t)found->rank << 16 | left, .id = found->id};
    size_t at = w->waiting++;
    for (size_t up; at && w->heap[up = (at - 1) / 2].order > new.order; at = up) w->heap[at] = w->heap[up];
    w->heap[at] = new;
}

/* Take the first one of those that wait. */
static candidate first(word *w) {
    candidate found = w->heap[0], last = w->heap[--w->waiting];
    size_t at = 0;
    for (size_t down; (down = 2 * at + 1) < w->waiting; at = down) {
        if (down + 1 < w->waiting && w->heap[down + 1].order < w->heap[down].order) down++;
        if (w->heap[down].order >= last.order) break;
        w->heap[at] = w->heap[down];
    }
    w->heap[at] = last;
    return found;
}

/* Write the ids of a word of 1 to MAX_WORD bytes; there are no more than those. Returns how many. */
size_t baton_merges_word(const merges *m, const uint8_t *text, size_t size, uint32_t *out) {
    word w; /* large, and not to be cleared for every word */
    w.merges = m, w.size = size, w.waiting = 0;
    for (size_t i = 0; i < size; i++) {
        w.ids[i] = m->bytes[text[i]];
        w.before[i] = (uint16_t)(i - 1), w.behind[i] = (uint16_t)(i + 1);
    }
    for (size_t i = 0; i + 1 < size; i++) consider(&w, i);
    while (w.waiting) {
        candidate next = first(&w);
        size_t left = next.order & 0xffff, right = w.behind[left];
        if (w.ids[left] == MERGED || right >= size) continue;
        const merge *found = merge_at(m, pair_of(w.ids[left], w.ids[right]));
        if (found->pair == NO_PAIR || found->id != next.id) continue;
        size_t behind = w.behind[right];
        w.ids[left] = next.id, w.ids[right] = MERGED;
        w.behind[left] = (uint16_t)behind;
        if (behind < size) w.before[behind] = (uint16_t)left;
        if (left) consider(&w, w.before[left]);
        consider(&w, left);
    }
    size_t count = 0;
    for (size_t at = 0; at < size; at = w.behind[at]) out[count++] = w.ids[at];
    return count;
}

/* Write which of a vocabulary's words of up to MAX_WORD bytes are not merged to themselves; returns how many. Words lie
   behind each other in `text`. */
size_t baton_merges_astray(const merges *m, const uint8_t *text, const uint32_t *sizes, const uint32_t *ids, size_t count,
                           uint32_t *out) {
    size_t found = 0;
    uint32_t made[MAX_WORD];
    for (size_t i = 0; i < count; text += sizes[i++])
        if (sizes[i] <= MAX_WORD && (baton_merges_word(m, text, sizes[i], made) != 1 || *made != ids[i]))
            out[found++] = (uint32_t)i;
    return found;
}
