/* Where the end of a sequence stood before, in its own tokens and in others', and how it went on there.

   A history is a ring of tokens with a chain through all places behind the same two tokens, the latest first, as the
   match finders of LZ77 compressors have them. A place that the chain names is compared backwards for as long as it
   agrees with the sequence's end. Places that agree for equally long or longer vote on the next token; those that voted
   for the winner vote on the one after it, and so on. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH 32     /* tokens of a match that are looked at */
#define PLACES 64    /* places of a history that are looked at, the latest ones */
#define WAYS 4       /* lengths of matches of which the best is taken */
#define END UINT32_MAX /* stands between the sequences of a history */

typedef struct {
    uint32_t *tokens, *before, *heads; /* `before`, `heads`: places plus 1, 0: none */
    uint32_t mask, heads_mask;
    uint32_t count; /* tokens that were ever added; the last `mask + 1` of them are there */
} history;

typedef struct {
    const history *h;
    uint32_t at; /* of the token that followed */
    int length;
} place;

static uint32_t bucket_of(const history *h, uint32_t a, uint32_t b) {
    uint64_t mixed = ((uint64_t)a << 32 | b) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(mixed >> 32) & h->heads_mask;
}

static void clear(history *h) {
    memset(h->heads, 0, ((size_t)h->heads_mask + 1) * sizeof *h->heads);
    h->count = 0;
}

/* Returns an empty history of at most `capacity` tokens, a power of two from 4 on; NULL: there is no memory. */
void *baton_suffix_new(int64_t capacity) {
    history *h = calloc(1, sizeof *h);
    if (!h) return NULL;
    h->mask = (uint32_t)capacity - 1;
    h->heads_mask = h->mask >> 1;
    h->tokens = malloc((size_t)capacity * sizeof *h->tokens);
    h->before = malloc((size_t)capacity * sizeof *h->before);
    h->heads = calloc((size_t)h->heads_mask + 1, sizeof *h->heads);
    if (h->tokens && h->before && h->heads) return h;
    free(h->tokens), free(h->before), free(h->heads), free(h);
    return NULL;
}

void baton_suffix_free(void *history_) {
    history *h = history_;
    if (!h) return;
    free(h->tokens), free(h->before), free(h->heads), free(h);
}

/* Adds tokens at the end; `apart`: they are another sequence's than those before them. */
void baton_suffix_add(void *history_, const uint32_t *tokens, int64_t count, int64_t apart) {
    history *h = history_;
    for (int64_t i = -(apart != 0); i < count; i++) {
        if (h->count >= UINT32_MAX - 2) clear(h);
        uint32_t at = h->count++, token = i < 0 ? END : tokens[i];
        h->tokens[at & h->mask] = token;
        /* The chain of the two tokens before this place leads to it as soon as its token is there. */
        uint32_t *link = &h->before[at & h->mask];
        *link = 0;
        if (at < 2 || h->mask < 3) continue;
        uint32_t a = h->tokens[(at - 2) & h->mask], b = h->tokens[(at - 1) & h->mask];
        if (a == END || b == END || token == END) continue;
        uint32_t *head = &h->heads[bucket_of(h, a, b)];
        *link = *head;
        *head = at + 1;
    }
}

/* Whether a place's token, and at least one before it, are still there. */
static int there(const history *h, uint32_t at) { return h->count - at <= h->mask; }

static int find(const history *h, const uint32_t *end, int64_t length, place *found) {
    if (!h || length < 2) return 0;
    int n = 0;
    uint32_t last = h->count;
    for (uint32_t next = h->heads[bucket_of(h, end[-2], end[-1])]; next && n < PLACES;) {
        uint32_t at = next - 1;
        if (at >= last || !there(h, at)) break; /* the slot was taken by a later token */
        last = at;
        next = h->before[at & h->mask];
        int same = 0;
        while (same < DEPTH && same < length && (uint32_t)same < at && there(h, at - same - 1) &&
               h->tokens[(at - same - 1) & h->mask] == end[-1 - same])
            same++;
        if (same >= 2) found[n++] = (place){h, at, same};
    }
    return n;
}

/* The token `i` after a place; what lies behind a history's end is what was drafted behind it. */
static uint32_t token_at(const place *p, uint32_t i, const history *own, const uint32_t *draft) {
    uint32_t left = p->h->count - p->at;
    if (i < left) return p->h->tokens[(p->at + i) & p->h->mask];
    return p->h == own ? draft[i - left] : END;
}

typedef struct {
    const history *own;
    const float *trust;
    int64_t limit;
    float least;
} rules;

/* Lets the places that match for `length` tokens or longer vote; returns the number of tokens. */
static int vote(const place *places, int n, int length, const rules *r, uint32_t *draft, float *chances, float *score) {
    const place *open[2 * PLACES];
    uint32_t next[2 * PLACES];
    int count = 0, m = 0;
    float all = 1;
    *score = 0;
    for (int i = 0; i < n; i++)
        if (places[i].length >= length) open[m++] = &places[i];
    while (count < r->limit) {
        int votes = 0, best = 0, live = 0;
        uint32_t winner = END;
        for (int i = 0; i < m; i++) next[i] = token_at(open[i], (uint32_t)count, r->own, draft), live += next[i] != END;
        for (int i = 0; i < m && live - votes > 0; i++) {
            if (next[i] == END) continue;
            int same = 0, seen = 0;
            for (int j = 0; j < i && !seen; j++) seen = next[j] == next[i];
            if (seen) continue;
            for (int j = i; j < m; j++) same += next[j] == next[i];
            votes += same;
            if (same > best) best = same, winner = next[i];
        }
        if (!best) break;
        int depth = length + count < DEPTH ? length + count : DEPTH;
        float chance = r->trust[depth] * (float)best / (float)live;
        if (all * chance < r->least) break;
        all *= chance;
        *score += all;
        draft[count] = winner, chances[count] = chance, count++;
        int kept = 0;
        for (int i = 0; i < m; i++)
            if (next[i] == winner) open[kept++] = open[i];
        m = kept;
    }
    return count;
}

/* Drafts what follows the `count` tokens before `end`.

   `own` is the history of these tokens themselves, `shared` that of others or NULL. `trust[n]`, n up to 32: how often
   the token after a match of n tokens was right. `least`: chance below which a token is not drafted. Writes at most
   `limit` tokens, each with the chance that it is right if those before it are, and the length of the match. */
int64_t baton_suffix_draft(const void *own, const void *shared, const uint32_t *end, int64_t count, const float *trust,
                           double least, int64_t limit, uint32_t *draft, float *chances, int64_t *length) {
    place places[2 * PLACES];
    int n = find(own, end, count, places);
    n += find(shared, end, count, places + n);
    rules r = {own, trust, limit < DEPTH ? limit : DEPTH, (float)least};
    uint32_t other[DEPTH];
    float others[DEPTH], score, best = 0;
    int found = 0;
    for (int way = 0, most = DEPTH + 1; way < WAYS; way++) {
        int longest = 0;
        for (int i = 0; i < n; i++)
            if (places[i].length < most && places[i].length > longest) longest = places[i].length;
        if (!longest) break;
        most = longest;
        int got = vote(places, n, longest, &r, other, others, &score);
        if (score > best) {
            best = score, found = got, *length = longest;
            memcpy(draft, other, (size_t)got * sizeof *draft);
            memcpy(chances, others, (size_t)got * sizeof *chances);
        }
    }
    return found;
}
