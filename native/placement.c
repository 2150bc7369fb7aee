/* The numbers behind a placement: the load of one role's instances side by side, what a policy scores them, and the best
   pair. The definitions that this computes are written in Python, in baton_router/scheduler/policy.py (the choice) and
   policies/ (the scores); tests compare the two. Everything here is a pass over arrays with an entry per instance;
   nothing is kept between calls.

   Structures are shared with Python as numpy dtypes (baton_router/scheduler/kernels.py, registry/load.py). Their layout
   is checked against the table at the end of this file when they are imported. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SMOOTHING 0.25 /* as in relative_loads */
#define ROUNDING 1e-9

/* --- the instances that a request may use --- */

/* An instance's load as the router keeps it, see LoadColumns. */
struct load_row {
    double work, done, done_at, sequences, waiting, room, limit;
};

/* An instance as a policy sees it, see Side. */
struct side_row {
    double matched, match_rate, work, load, sequences, waiting;
};

/* Gather a side. positions: of the instances among `rows` and `matched`, NULL: the first `count`; tokens: of the prompt,
   at least 1; recent: seconds after which work that was done counts 1/e as much. */
void baton_gather_side(const struct load_row *rows, const double *matched, const int64_t *positions, int64_t count,
                       double tokens, double now, double recent, struct side_row *out) {
    for (int64_t i = 0; i < count; i++) {
        int64_t from = positions ? positions[i] : i;
        const struct load_row *row = rows + from;
        double lately = row->done != 0.0 ? row->done * exp((row->done_at - now) / recent) : 0.0;
        out[i] = (struct side_row){
            .matched = matched[from],
            .match_rate = matched[from] / tokens,
            .work = row->work,
            .load = row->work + lately,
            .sequences = row->sequences,
            .waiting = row->waiting,
        };
    }
}

/* Write the positions of instances with room for so many sequences, as LoadTracker.has_room defines it; returns how
   many. */
int64_t baton_free_rows(const struct load_row *rows, int64_t count, double sequences, int64_t *out) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++)
        if (rows[i].room >= sequences || (rows[i].limit < sequences && rows[i].room > 0)) out[found++] = i;
    return found;
}

/* --- learnt speeds --- */

/* A row of learnt lines, see Lines: bases, slopes and times of the latest observation, `size` of each. */
struct line_row {
    const double *block;
    int64_t size;
};

struct lines {
    struct line_row row;    /* no block: nothing is known */
    const int64_t *columns; /* an instance's entry; -1: nothing is known of it */
    double base, slope;     /* used where nothing recent is known */
    double oldest;
};

struct line {
    double base, slope;
};

static inline struct line line_of(const struct lines *l, const struct line_row *row, int64_t i) {
    int64_t c = l->columns[i];
    if (!row->block || c < 0 || c >= row->size || !(row->block[2 * row->size + c] >= l->oldest))
        return (struct line){l->base, l->slope};
    return (struct line){row->block[c], row->block[row->size + c]};
}

static inline double time_of(const struct lines *l, int64_t i, double amount) {
    struct line line = line_of(l, &l->row, i);
    return line.base + line.slope * amount;
}

static double mean_load(const struct side_row *rows, int64_t count) {
    double total = 0.0;
    for (int64_t i = 0; i < count; i++) total += rows[i].load;
    return total / (double)count;
}

static double highest(const double *values, int64_t count) {
    double best = -INFINITY;
    for (int64_t i = 0; i < count; i++)
        if (values[i] > best) best = values[i];
    return best;
}

/* relative_loads of one instance; mean: of all, smoothed. */
static inline double relative(double load, double smoothing, double mean) {
    return mean <= 0.0 ? 1.0 : (load + smoothing) / mean;
}

/* The work of computing a prompt's tokens after `matched`, see PromptWork. */
static inline double prompt_work(double matched, double total, double half) {
    return (total - matched) * (1.0 + (total + matched) / (2.0 * half));
}

/* --- scores --- */

/* A prefill instance. The score of its pair with decode instance d, beside both totals and the transfer, is
   -(base + slope * min(missing, d's missing)). */
struct prefill_score {
    double missing, base, slope; /* work of the tokens that it lacks, and the line of computing it */
    double match, queue, even, total;
};

/* A decode instance, the prefill on it (local), and loading from slower tiers first (store). */
struct decode_score {
    double missing, lacks, bound; /* work of the tokens that it lacks, their number; what its pairs score at most */
    double load, total;
    double local_queue, local_prefill, local_stall, local_total;
    double store_queue, store_load, store_prefill, store_stall, store_total;
};

/* Set `even`: of the least loaded instance 0, of one that has a mean load more -most, which is also the lowest. */
static void set_even(const struct side_row *side, struct prefill_score *scores, int64_t count, double cost, double most) {
    double smoothing = SMOOTHING * cost, level = mean_load(side, count) + smoothing, least = INFINITY;
    for (int64_t i = 0; i < count; i++) {
        scores[i].even = relative(side[i].load, smoothing, level);
        if (scores[i].even < least) least = scores[i].even;
    }
    for (int64_t i = 0; i < count; i++) {
        double behind = least - scores[i].even;
        scores[i].even = most * (behind < -1.0 ? -1.0 : behind);
    }
}

#define DEPTHS 64 /* different amounts that decode instances miss; others are computed one by one */

/* The highest scores of pairs, transfer aside, by what the decode instance misses: most miss the same. */
struct pair_bounds {
    const struct prefill_score *rows;
    int64_t count, num_depths;
    double depths[DEPTHS], bounds[DEPTHS];
};

static void begin_bounds(struct pair_bounds *known, const struct prefill_score *rows, int64_t count) {
    known->rows = rows;
    known->count = count;
    known->num_depths = 0;
}

static double bound_of(struct pair_bounds *known, double needed) {
    int64_t at = 0;
    while (at < known->num_depths && known->depths[at] != needed) at++;
    if (at < known->num_depths) return known->bounds[at];
    double best = -INFINITY;
    for (int64_t i = 0; i < known->count; i++) {
        const struct prefill_score *row = known->rows + i;
        double score = row->total - row->base - row->slope * (row->missing < needed ? row->missing : needed);
        if (score > best) best = score;
    }
    if (known->num_depths < DEPTHS) {
        known->depths[known->num_depths] = needed;
        known->bounds[known->num_depths++] = best;
    }
    return best;
}

/* --- match_minus_load; see MatchMinusLoad.plain_score for the formulas --- */

#define IDLE 1e-6
#define NOISE 0.1        /* as _NOISE */
#define STALL_SHARE 0.05 /* as _STALL_SHARE */
#define LOCAL_COST 0.1   /* as _LOCAL_COST */
#define EVEN 0.03        /* as _EVEN */
#define OWN_MATCH 0.02   /* as _OWN_MATCH */

struct match_args {
    const struct side_row *prefill, *decode;
    int64_t num_prefills, num_decodes;
    struct lines computing, decoding, local;
    double tokens, half, beta, prefill_cost, decode_cost; /* half: see PromptWork */
    int64_t with_local, local_measured;
    struct prefill_score *prefill_scores;
    struct decode_score *decode_scores;
};

static inline double without_noise(double slow) { return fabs(slow - 1.0) < NOISE ? 1.0 : slow; }

static inline double above_mean(double x) { return x >= 1.0 ? x - 1.0 : log(x > IDLE ? x : IDLE); }

/* Score prefill instances; returns the mean time of the whole prompt. */
static double score_match_prefill(const struct match_args *a, double whole) {
    int64_t count = a->num_prefills;
    if (!count) return 0.0;
    const struct side_row *side = a->prefill;
    struct prefill_score *scores = a->prefill_scores;
    double tokens = a->tokens, beta = a->beta, mean = 0.0;
    for (int64_t i = 0; i < count; i++) {
        scores[i].total = time_of(&a->computing, i, whole);
        mean += scores[i].total;
    }
    mean /= (double)count;
    for (int64_t i = 0; i < count; i++) {
        double slow = mean > 0.0 ? without_noise(scores[i].total / mean) : 1.0;
        scores[i] = (struct prefill_score){
            .missing = prompt_work(side[i].match_rate * tokens, tokens, a->half) / whole,
            .base = -1.0,
            .slope = 1.0 + beta * (slow - 1.0),
            .match = OWN_MATCH * side[i].match_rate,
            .queue = -beta * slow * side[i].work / whole,
        };
    }
    set_even(side, scores, count, a->prefill_cost, EVEN);
    for (int64_t i = 0; i < count; i++) scores[i].total = scores[i].match + scores[i].queue + scores[i].even;
    return mean;
}

/* Score both sides and, if wanted and possible, the prefill on each decode instance; returns whether it was. */
int baton_score_match(const struct match_args *a) {
    double tokens = a->tokens, beta = a->beta, whole = prompt_work(0.0, tokens, a->half);
    double mean = score_match_prefill(a, whole);
    int64_t count = a->num_decodes;
    const struct side_row *side = a->decode;
    struct decode_score *scores = a->decode_scores;
    double running = 0.0, steps = 0.0;
    for (int64_t i = 0; i < count; i++) running += side[i].sequences;
    for (int64_t i = 0; i < count; i++) {
        scores[i].total = time_of(&a->decoding, i, 1.0 + running / (double)count);
        steps += scores[i].total;
    }
    double share = (double)count / steps, smoothing = SMOOTHING * a->decode_cost;
    double level = mean_load(side, count) + smoothing;
    int with_local = a->with_local && mean > 0.0;
    for (int64_t i = 0; i < count; i++) {
        struct decode_score *row = scores + i;
        double busy = relative(side[i].load, smoothing, level) * without_noise(row->total * share);
        row->load = -beta * (1.0 + above_mean(busy));
        row->total = side[i].match_rate + row->load;
        row->missing = prompt_work(side[i].match_rate * tokens, tokens, a->half) / whole;
        row->lacks = 0.0; /* the transfer is not counted */
        if (!with_local) continue;
        double here = a->local_measured ? time_of(&a->local, i, whole) / mean : 1.0;
        double stalled = here * (1.0 + STALL_SHARE * side[i].sequences);
        row->local_queue = -beta * (here * side[i].waiting / whole + LOCAL_COST);
        row->local_prefill = 1.0 - row->missing;
        row->local_stall = -beta * (stalled - 1.0) * row->missing;
        row->local_total = row->local_queue + row->local_prefill + row->local_stall;
    }
    struct pair_bounds bounds;
    begin_bounds(&bounds, a->prefill_scores, a->num_prefills);
    for (int64_t i = 0; i < count; i++) scores[i].bound = bound_of(&bounds, scores[i].missing);
    return with_local;
}

/* --- cost_ms; see CostMs.plain_score for the formulas --- */

#define STALL_MS 0.1   /* as _STALL_SHARE */
#define EVEN_SHARE 0.1 /* as _EVEN_SHARE */

struct cost_args {
    const struct side_row *prefill, *decode;
    const double *loadable; /* per decode instance; NULL: slower tiers hold nothing */
    int64_t num_prefills, num_decodes;
    struct lines computing, decoding, local, store;
    const double *least; /* per decode instance: least base and slope of transfers to it */
    double least_base, least_slope;
    double tokens, half, sequences, expected, kv_bytes, prefill_cost;
    double threshold; /* missing tokens; -1: none */
    struct prefill_score *prefill_scores;
    struct decode_score *decode_scores;
};

static void score_cost_prefill(const struct cost_args *a) {
    int64_t count = a->num_prefills;
    if (!count) return;
    const struct side_row *side = a->prefill;
    struct prefill_score *scores = a->prefill_scores;
    double most_held = 0.0, shortest = INFINITY;
    for (int64_t i = 0; i < a->num_decodes; i++)
        if (a->decode[i].matched > most_held) most_held = a->decode[i].matched;
    for (int64_t i = 0; i < count; i++) {
        struct line line = line_of(&a->computing, &a->computing.row, i);
        double known = side[i].matched > most_held ? side[i].matched : most_held;
        double ms = line.base + line.slope * prompt_work(known, a->tokens, a->half);
        if (ms < shortest) shortest = ms;
        scores[i].missing = prompt_work(side[i].matched, a->tokens, a->half);
        scores[i].base = line.base;
        scores[i].slope = line.slope;
        scores[i].queue = -side[i].work * line.slope;
    }
    set_even(side, scores, count, a->prefill_cost, EVEN_SHARE * shortest);
    for (int64_t i = 0; i < count; i++) scores[i].total = scores[i].queue + scores[i].even;
}

/* Set the bounds of all decode instances' pairs. */
static void bound_pairs(const struct cost_args *a) {
    struct pair_bounds bounds;
    begin_bounds(&bounds, a->prefill_scores, a->num_prefills);
    for (int64_t i = 0; i < a->num_decodes; i++) {
        struct decode_score *row = a->decode_scores + i;
        row->bound = -INFINITY;
        if (!a->num_prefills || (a->threshold >= 0.0 && row->lacks < a->threshold)) continue;
        double fixed = a->least[2 * i], per_byte = a->least[2 * i + 1];
        if (a->least_base < fixed) fixed = a->least_base;
        if (a->least_slope < per_byte) per_byte = a->least_slope;
        row->bound = bound_of(&bounds, row->missing) - fixed - per_byte * a->kv_bytes * row->lacks;
    }
}

/* Score both sides and what decode instances can do without a prefill instance. The `store` fields are set only with
   `loadable`. */
void baton_score_cost(const struct cost_args *a) {
    score_cost_prefill(a);
    for (int64_t i = 0; i < a->num_decodes; i++) {
        const struct side_row *side = a->decode + i;
        struct decode_score *row = a->decode_scores + i;
        row->total = -a->expected * time_of(&a->decoding, i, side->sequences + a->sequences);
        row->lacks = a->tokens - side->matched;
        row->missing = prompt_work(side->matched, a->tokens, a->half);
        struct line own = line_of(&a->local, &a->local.row, i);
        row->local_queue = -own.slope * side->waiting;
        row->local_prefill = -(own.base + own.slope * row->missing);
        if (a->threshold >= 0.0 && row->lacks >= a->threshold) row->local_prefill = -INFINITY;
        row->local_stall = -STALL_MS * side->sequences * own.slope * row->missing;
        row->local_total = row->local_queue + row->local_prefill + row->local_stall;
        if (!a->loadable) continue;
        double more = a->loadable[i] - side->matched;
        double rest = prompt_work(a->loadable[i], a->tokens, a->half);
        row->store_queue = row->local_queue;
        row->store_load = more > 0.0 ? -time_of(&a->store, i, a->kv_bytes * more) : -INFINITY;
        row->store_prefill = -(own.base + own.slope * rest);
        row->store_stall = -STALL_MS * side->sequences * own.slope * rest;
        row->store_total = row->store_queue + row->store_load + row->store_prefill + row->store_stall;
    }
    bound_pairs(a);
}

/* --- the best of all; see choose_plainly and prefill_order_plainly --- */

/* The scores of pairs beyond those of their two instances: minus the milliseconds that cost_ms predicts. */
struct pairs {
    const struct prefill_score *prefill;
    const struct decode_score *decode;
    const struct line_row *rows; /* transfers to each decode instance */
    struct lines moving;         /* `row` is unused */
    double kv_bytes, threshold;
};

/* Totals of some candidates, `stride` bytes apart; no `first`: there are none. */
struct column {
    const char *first;
    int64_t stride;
};

static inline double total_of(const struct column *column, int64_t i) {
    return *(const double *)(column->first + i * column->stride);
}

/* What can be chosen: totals of both sides, and of what decode instances can do without a prefill instance. */
struct options {
    struct column prefill, decode, local, store;
    int64_t num_prefills, num_decodes;
};

/* What was chosen: the decode instance, and its option: a prefill instance, or local or store, which follow these. */
struct choice {
    int64_t decode, option;
    double score;
};

/* Write every prefill instance's part in the score of its pair with a decode instance. */
static void fill_column(const struct options *o, const struct pairs *pairs, int64_t d, double *out) {
    int64_t count = o->num_prefills;
    if (!pairs) {
        for (int64_t p = 0; p < count; p++) out[p] = total_of(&o->prefill, p);
        return;
    }
    double needed = pairs->decode[d].missing, lacks = pairs->decode[d].lacks, bytes = pairs->kv_bytes * lacks;
    int refused = pairs->threshold >= 0.0 && lacks < pairs->threshold;
    for (int64_t p = 0; p < count; p++) {
        const struct prefill_score *row = pairs->prefill + p;
        struct line move = {0.0, 0.0};
        if (pairs->rows) move = line_of(&pairs->moving, pairs->rows + d, p);
        double computed = row->base + row->slope * (row->missing < needed ? row->missing : needed);
        out[p] = refused ? -INFINITY : total_of(&o->prefill, p) - (computed + (move.base + move.slope * bytes));
    }
}

/* Write the scores of all options of a decode instance: all prefill instances, local, store. Returns how many. */
static int64_t fill_options(const struct options *o, const struct pairs *pairs, int64_t d, double *out) {
    int64_t count = o->num_prefills;
    fill_column(o, pairs, d, out);
    if (o->local.first || !count) out[count++] = o->local.first ? total_of(&o->local, d) : 0.0;
    if (o->store.first) out[count++] = total_of(&o->store, d);
    for (int64_t i = 0; i < count; i++) out[i] += total_of(&o->decode, d);
    return count;
}

/* Return the position of the highest value. Among several a draw decides, 0 to 1; -1: there are several, and it is
   below 0; -2: a value is not a number. */
static int64_t pick(const double *values, int64_t count, double draw) {
    double best = highest(values, count);
    int64_t ties = 0, first = -1;
    for (int64_t i = 0; i < count; i++) {
        if (values[i] != values[i]) return -2;
        if (values[i] != best) continue;
        if (!ties++) first = i;
    }
    if (ties <= 1) return ties ? first : -2;
    if (draw < 0.0) return -1;
    int64_t skip = (int64_t)(draw * (double)ties);
    for (int64_t i = first;; i++)
        if (values[i] == best && !skip--) return i;
}

/* Return the highest score of a decode instance's own options and a prefill part. */
static double best_part(const struct options *o, int64_t d, double part) {
    if (o->local.first && total_of(&o->local, d) > part) part = total_of(&o->local, d);
    if (o->store.first && total_of(&o->store, d) > part) part = total_of(&o->store, d);
    return part;
}

/* Choose without pairs: the best prefill instance is the same for all, so only decode instances are compared. */
static int64_t choose_apart(const struct options *o, const double *draws, struct choice *choice) {
    int64_t count = o->num_prefills, others = o->num_decodes;
    double most[others], prefills[count + 1], options[count + 2];
    int coupled = o->local.first || o->store.first;
    fill_column(o, NULL, 0, prefills);
    double best = !count && !o->local.first ? 0.0 : highest(prefills, count);
    for (int64_t d = 0; d < others; d++)
        most[d] = coupled ? total_of(&o->decode, d) + best_part(o, d, best) : total_of(&o->decode, d);
    int64_t d = pick(most, others, draws[0]);
    if (d < 0) return d == -1 ? 1 : d;
    if (!coupled && !count) {
        *choice = (struct choice){d, 0, total_of(&o->decode, d)};
        return 0;
    }
    int64_t number = fill_options(o, NULL, d, options);
    int64_t option = coupled ? pick(options, number, draws[1]) : pick(prefills, count, draws[1]);
    if (option < 0) return option == -1 ? 2 : option;
    *choice = (struct choice){d, option, options[option]};
    return 0;
}

/* Return the decode instance that follows another one in the order of their bounds; -1: none. */
static int64_t following(const double *most, int64_t count, int64_t last) {
    int64_t next = -1;
    for (int64_t d = 0; d < count; d++) {
        if (last >= 0 && (most[d] > most[last] || (most[d] == most[last] && d <= last))) continue;
        if (next < 0 || most[d] > most[next]) next = d;
    }
    return next;
}

/* Choose with pairs: decode instances that cannot have the best one are skipped. */
static int64_t choose_pair(const struct options *o, const struct pairs *pairs, double draw, struct choice *choice) {
    int64_t count = o->num_prefills, others = o->num_decodes, seen = 0, ties = 0;
    int64_t tied[others], times[others];
    double most[others], options[count + 2], best = -INFINITY;
    for (int64_t d = 0; d < others; d++) {
        most[d] = total_of(&o->decode, d) + best_part(o, d, pairs->decode[d].bound);
        if (most[d] != most[d]) return -2;
    }
    for (int64_t d = following(most, others, -1); d >= 0; d = following(most, others, d)) {
        if (most[d] < best - ROUNDING * fabs(best)) break;
        int64_t number = fill_options(o, pairs, d, options), equal = 0;
        double top = highest(options, number);
        if (top < best) continue;
        if (top > best) best = top, seen = ties = 0;
        for (int64_t i = 0; i < number; i++) equal += options[i] == top;
        tied[seen] = d, times[seen++] = equal, ties += equal;
    }
    int64_t skip = (int64_t)(draw * (double)ties);
    for (int64_t at = 0; at < seen; skip -= times[at++]) {
        if (skip >= times[at]) continue;
        int64_t number = fill_options(o, pairs, tied[at], options);
        for (int64_t i = 0; i < number; i++) {
            if (options[i] != best || skip--) continue;
            *choice = (struct choice){tied[at], i, best};
            return 0;
        }
    }
    return -2;
}

/* Choose the best option. Returns 0; or the number of the draw that it needs, from 1 on, when it is below 0; or -2: a
   score is not a number. */
int64_t baton_choose(const struct options *o, const struct pairs *pairs, double first_draw, double second_draw,
                     struct choice *choice) {
    double draws[2] = {first_draw, second_draw};
    if (!pairs) return choose_apart(o, draws, choice);
    return first_draw < 0.0 ? 1 : choose_pair(o, pairs, first_draw, choice);
}

/* Write the best prefill instances for a decode instance, best first, equal ones in their order from `first` on; at most
   `limit`. Returns how many. */
int64_t baton_prefill_order(const struct options *o, const struct pairs *pairs, int64_t d, int64_t first, int64_t limit,
                            int64_t *out) {
    int64_t count = o->num_prefills, known = 0;
    double values[count + 1];
    fill_column(o, pairs, d, values);
    for (int64_t i = 0; i < count; i++) {
        int64_t p = first + i < count ? first + i : first + i - count, at = known;
        while (at && values[p] > values[out[at - 1]]) at--;
        if (at >= limit) continue;
        if (known < limit) known++;
        memmove(out + at + 1, out + at, (size_t)(known - at - 1) * sizeof *out);
        out[at] = p;
    }
    return known;
}

/* --- the layout of the structures that Python shares --- */

#define SIZE(name) {#name, sizeof(struct name)}
#define FIELD(name, field) {#name "." #field, offsetof(struct name, field)}

static const struct {
    const char *name;
    int64_t bytes;
} LAYOUT[] = {
    SIZE(load_row),
    FIELD(load_row, work), FIELD(load_row, done), FIELD(load_row, done_at), FIELD(load_row, sequences),
    FIELD(load_row, waiting), FIELD(load_row, room), FIELD(load_row, limit),
    SIZE(side_row),
    FIELD(side_row, matched), FIELD(side_row, match_rate), FIELD(side_row, work), FIELD(side_row, load),
    FIELD(side_row, sequences), FIELD(side_row, waiting),
    SIZE(line_row),
    FIELD(line_row, block), FIELD(line_row, size),
    SIZE(lines),
    FIELD(lines, row), FIELD(lines, columns), FIELD(lines, base), FIELD(lines, slope), FIELD(lines, oldest),
    SIZE(prefill_score),
    FIELD(prefill_score, missing), FIELD(prefill_score, base), FIELD(prefill_score, slope),
    FIELD(prefill_score, match), FIELD(prefill_score, queue), FIELD(prefill_score, even), FIELD(prefill_score, total),
    SIZE(decode_score),
    FIELD(decode_score, missing), FIELD(decode_score, lacks), FIELD(decode_score, bound), FIELD(decode_score, load),
    FIELD(decode_score, total), FIELD(decode_score, local_queue), FIELD(decode_score, local_prefill),
    FIELD(decode_score, local_stall), FIELD(decode_score, local_total), FIELD(decode_score, store_queue),
    FIELD(decode_score, store_load), FIELD(decode_score, store_prefill), FIELD(decode_score, store_stall),
    FIELD(decode_score, store_total),
    SIZE(match_args),
    FIELD(match_args, prefill), FIELD(match_args, decode), FIELD(match_args, num_prefills),
    FIELD(match_args, num_decodes), FIELD(match_args, computing), FIELD(match_args, decoding),
    FIELD(match_args, local), FIELD(match_args, tokens), FIELD(match_args, half), FIELD(match_args, beta),
    FIELD(match_args, prefill_cost), FIELD(match_args, decode_cost),
    FIELD(match_args, with_local), FIELD(match_args, local_measured), FIELD(match_args, prefill_scores),
    FIELD(match_args, decode_scores),
    SIZE(cost_args),
    FIELD(cost_args, prefill), FIELD(cost_args, decode), FIELD(cost_args, loadable), FIELD(cost_args, num_prefills),
    FIELD(cost_args, num_decodes), FIELD(cost_args, computing), FIELD(cost_args, decoding), FIELD(cost_args, local),
    FIELD(cost_args, store), FIELD(cost_args, least), FIELD(cost_args, least_base), FIELD(cost_args, least_slope),
    FIELD(cost_args, tokens), FIELD(cost_args, half), FIELD(cost_args, sequences), FIELD(cost_args, expected), FIELD(cost_args, kv_bytes),
    FIELD(cost_args, prefill_cost), FIELD(cost_args, threshold), FIELD(cost_args, prefill_scores),
    FIELD(cost_args, decode_scores),
    SIZE(pairs),
    FIELD(pairs, prefill), FIELD(pairs, decode), FIELD(pairs, rows), FIELD(pairs, moving), FIELD(pairs, kv_bytes),
    FIELD(pairs, threshold),
    SIZE(column),
    FIELD(column, first), FIELD(column, stride),
    SIZE(options),
    FIELD(options, prefill), FIELD(options, decode), FIELD(options, local), FIELD(options, store),
    FIELD(options, num_prefills), FIELD(options, num_decodes),
    SIZE(choice),
    FIELD(choice, decode), FIELD(choice, option), FIELD(choice, score),
};

/* Return the offset of a field ("structure.field"), or the size of a structure, in bytes; -1: there is none. */
int64_t baton_placement_layout(const char *name) {
    for (size_t i = 0; i < sizeof LAYOUT / sizeof *LAYOUT; i++)
        if (!strcmp(LAYOUT[i].name, name)) return LAYOUT[i].bytes;
    return -1;
}
