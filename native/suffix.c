/* Where the end of a sequence stood before, in its own tokens and in others', and how it went on there.

   A history is a ring of tokens with a chain through all places behind the same two tokens, the latest first, as the
   match finders of LZ77 compressors have them. A place that the chain names is compared backwards for as long as it
   agrees with the sequence's end. Places that agree for equally long or longer vote on the next token; those that voted
   for one that is drafted vote on the one after it, and so on: for the winner alone, or for several. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH 32     /* tokens of a match that are looked at */
#define PLACES 64    /* places of a history that are looked at, the latest ones */
#define WAYS 4       /* lengths of matches of which the best is taken */
#define NODES 63     /* tokens of a draft */
#define OPEN 256     /* tokens that may be drafted next */
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

typedef struct {
    const history *own;
    const float *trust;
    int64_t depth, most, width; /* tokens one after the other, in all, and after one */
    float least;
} rules;

/* A token that may follow: those places named it that are set in `voters`, after the token `parent` or, -1, the end. */
typedef struct {
    uint64_t voters[2 * PLACES / 64];
    uint32_t token;
    int parent, depth;
    float chance, product; /* if all before it are right; of all of them */
} branch;

typedef struct {
    branch nodes[NODES];
    int count;
    float score; /* tokens that are expected to be right */
} tree;

/* The token `i` after a place; what lies behind a history's end is what was drafted behind it, on the way to `node`. */
static uint32_t token_at(const place *p, uint32_t i, const history *own, const tree *t, int node) {
    uint32_t left = p->h->count - p->at;
    if (i < left) return p->h->tokens[(p->at + i) & p->h->mask];
    if (p->h != own) return END;
    while (t->nodes[node].depth > (int)(i - left)) node = t->nodes[node].parent;
    return t->nodes[node].token;
}

/* Lets the places that agree with all up to `node` vote on what follows it; adds the tokens named most to `open`. */
static int follow(const place *places, int n, int length, const rules *r, const tree *t, int node,
                  const uint64_t *voters, branch *open, int opened) {
    uint32_t tokens[2 * PLACES];
    int votes[2 * PLACES], which[2 * PLACES], kinds = 0, live = 0;
    const int at = node < 0 ? 0 : t->nodes[node].depth + 1;
    for (int i = 0; i < n; i++) {
        which[i] = -1;
        if (!(voters[i / 64] >> (i % 64) & 1)) continue;
        const uint32_t token = token_at(&places[i], (uint32_t)at, r->own, t, node);
        if (token == END) continue;
        int kind = 0;
        while (kind < kinds && tokens[kind] != token) kind++;
        if (kind == kinds) tokens[kind] = token, votes[kind] = 0, kinds++;
        votes[kind]++, which[i] = kind, live++;
    }
    const int depth = length + at < DEPTH ? length + at : DEPTH;
    const float before = node < 0 ? 1 : t->nodes[node].product;
    for (int64_t child = 0; child < r->width && child < kinds && opened < OPEN; child++) {
        int best = 0;
        for (int kind = 1; kind < kinds; kind++)
            if (votes[kind] > votes[best]) best = kind;
        const float chance = r->trust[depth] * (float)votes[best] / (float)live;
        if (votes[best] == 0 || before * chance < r->least) break;
        branch *b = &open[opened++];
        memset(b->voters, 0, sizeof b->voters);
        for (int i = 0; i < n; i++)
            if (which[i] == best) b->voters[i / 64] |= (uint64_t)1 << (i % 64);
        b->token = tokens[best], b->parent = node, b->depth = at, b->chance = chance, b->product = before * chance;
        votes[best] = 0;
    }
    return opened;
}

/* Drafts by the places that match for `length` tokens or longer, the likeliest token first. */
static void grow(const place *places, int n, int length, const rules *r, tree *t) {
    branch open[OPEN];
    uint64_t voters[2 * PLACES / 64] = {0};
    for (int i = 0; i < n; i++)
        if (places[i].length >= length) voters[i / 64] |= (uint64_t)1 << (i % 64);
    t->count = 0, t->score = 0;
    int opened = follow(places, n, length, r, t, -1, voters, open, 0);
    while (opened && t->count < r->most) {
        int best = 0;
        for (int i = 1; i < opened; i++)
            if (open[i].product > open[best].product) best = i;
        const int node = t->count++;
        t->nodes[node] = open[best];
        /* In order: of equals the one that was named first goes first. */
        memmove(open + best, open + best + 1, (size_t)(--opened - best) * sizeof *open);
        t->score += t->nodes[node].product;
        if (t->nodes[node].depth + 1 < r->depth)
            opened = follow(places, n, length, r, t, node, t->nodes[node].voters, open, opened);
    }
}

/* Drafts what follows the `count` tokens before `end`.

   `own` is the history of these tokens themselves, `shared` that of others or NULL. `trust[n]`, n up to 32: how often
   the token after a match of n tokens was right. `least`: chance below which a token is not drafted. `depth`: tokens one
   after the other; `width`: those that may follow the same one; `most`: all of them, at most 63. Writes tokens, the
   index of each one's parent (-1: the end), which comes before it, the chance that it is right if those before it are,
   and the length of the match. Returns how many. */
int64_t baton_suffix_draft(const void *own, const void *shared, const uint32_t *end, int64_t count, const float *trust,
                           double least, int64_t depth, int64_t width, int64_t most, uint32_t *draft, int32_t *parents,
                           float *chances, int64_t *length) {
    place places[2 * PLACES];
    int n = find(own, end, count, places);
    n += find(shared, end, count, places + n);
    rules r = {own, trust, depth < DEPTH ? depth : DEPTH, most < NODES ? most : NODES, width, (float)least};
    tree found, best;
    best.count = 0, best.score = 0;
    for (int way = 0, longer = DEPTH + 1; way < WAYS; way++) {
        int longest = 0;
        for (int i = 0; i < n; i++)
            if (places[i].length < longer && places[i].length > longest) longest = places[i].length;
        if (!longest) break;
        longer = longest;
        grow(places, n, longest, &r, &found);
        if (found.score > best.score) {
            best.count = found.count, best.score = found.score, *length = longest;
            memcpy(best.nodes, found.nodes, (size_t)found.count * sizeof *found.nodes);
        }
    }
    for (int i = 0; i < best.count; i++)
        draft[i] = best.nodes[i].token, parents[i] = best.nodes[i].parent, chances[i] = best.nodes[i].chance;
    return best.count;
}
