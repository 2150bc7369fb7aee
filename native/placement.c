/* The numbers behind a placement: the load of one role's instances side by side, what a policy says of each, and which
   pair is the best of all. What they mean stands where they are called from: baton_router/scheduler/kernels.py and the
   policies. Everything here is a pass over arrays of doubles, an entry per instance; nothing is kept between calls. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SMOOTHING 0.25 /* as in relative_loads */
#define ROUNDING 1e-9

/* --- the instances that a request may use --- */

/* An instance's load as the router keeps it, see LoadColumns. */
struct load_row {
    double work, lately, done_at, sequences, waiting, room, limit, unused;
};

/* A side: six rows of an entry per instance. */
enum { MATCHED, RATE, WORK, LOADS, SEQUENCES, WAITING };

/* Gather a side. at: positions among `rows` and `held`, NULL: the first `count`; tokens: of the prompt, at least 1;
   recent: seconds after which work that was done counts 1/e as much. */
void baton_gather_side(const struct load_row *rows, const double *held, const int64_t *at, int64_t count, double tokens,
                       double now, double recent, double *out) {
    for (int64_t i = 0; i < count; i++) {
        int64_t from = at ? at[i] : i;
        const struct load_row *row = rows + from;
        double lately = row->lately != 0.0 ? row->lately * exp((row->done_at - now) / recent) : 0.0;
        out[MATCHED * count + i] = held[from];
        out[RATE * count + i] = held[from] / tokens;
        out[WORK * count + i] = row->work;
        out[LOADS * count + i] = row->work + lately;
        out[SEQUENCES * count + i] = row->sequences;
        out[WAITING * count + i] = row->waiting;
    }
}

/* Write the positions of instances with room for so many sequences, as LoadTracker.has_room says; returns how many. */
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
    double base, slope;     /* stand in where nothing recent is known */
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

static double sum(const double *values, int64_t count) {
    double total = 0.0;
    for (int64_t i = 0; i < count; i++) total += values[i];
    return total;
}

static double highest(const double *values, int64_t count) {
    double best = -INFINITY;
    for (int64_t i = 0; i < count; i++)
        if (values[i] > best) best = values[i];
    return best;
}

/* What relative_loads is of one instance; mean: of all, smoothed. */
static inline double relative(double load, double smoothing, double mean) {
    return mean <= 0.0 ? 1.0 : (load + smoothing) / mean;
}

/* --- match_minus_load --- */

#define IDLE 1e-6
#define ALIKE 0.1        /* times that differ from the mean by less count as equal: that much is noise */
#define STALL_SHARE 0.05 /* what a local prefill costs per sequence that decodes there, in prefills */
#define ASIDE 0.1        /* what must be saved, in prompts, before decode is asked to compute one: the others wait */

struct match_args {
    const double *prefill, *decode; /* sides */
    int64_t num_prefills, num_decodes;
    struct lines computing, decoding, local;
    double tokens, beta, decode_cost;
    int64_t with_local, local_known;
    double *out;
};

static inline double apart(double slow) { return fabs(slow - 1.0) < ALIKE ? 1.0 : slow; }

static inline double above(double x) { return x >= 1.0 ? x - 1.0 : log(x > IDLE ? x : IDLE); }

/* Score both sides. out: per prefill instance load, speed, lately and the total; per decode instance load and the total;
   then load, speed and the total of the prefill on each. Returns whether the latter were scored. */
int baton_score_match(const struct match_args *a) {
    int64_t count = a->num_prefills, others = a->num_decodes;
    double tokens = a->tokens, beta = a->beta, mean = 0.0;
    double *load = a->out, *speed = load + count, *lately = speed + count, *total = lately + count;
    const double *rate = a->prefill + RATE * count, *work = a->prefill + WORK * count;
    const double *loads = a->prefill + LOADS * count;
    double *slow = total;
    for (int64_t i = 0; i < count; i++) {
        struct line line = line_of(&a->computing, &a->computing.row, i);
        slow[i] = line.base + line.slope * tokens;
    }
    if (count) mean = sum(slow, count) / (double)count;
    for (int64_t i = 0; i < count; i++) {
        slow[i] = mean > 0.0 ? apart(slow[i] / mean) : 1.0;
        lately[i] = (loads[i] - work[i]) * slow[i];
    }
    double smoothing = tokens / 4, level = count ? sum(lately, count) / (double)count + smoothing : 0.0;
    double best_now = -INFINITY, best = -INFINITY;
    for (int64_t i = 0; i < count; i++) {
        load[i] = work[i] * slow[i] * (-beta / tokens);
        speed[i] = (slow[i] - 1.0) * (rate[i] - 1.0) * beta;
        lately[i] = above((lately[i] + smoothing) / level) * -beta;
        double now = rate[i] + load[i] + speed[i];
        total[i] = now + lately[i];
        if (now > best_now) best_now = now;
        if (total[i] > best) best = total[i];
    }
    /* Who did less goes first; but what was done makes no prompt late, so beside a decode instance the best counts. */
    for (int64_t i = 0; i < count; i++) {
        lately[i] += best_now - best;
        total[i] += best_now - best;
    }

    rate = a->decode + RATE * others, loads = a->decode + LOADS * others;
    const double *sequences = a->decode + SEQUENCES * others, *waiting = a->decode + WAITING * others;
    load = a->out + 4 * count, total = load + others;
    double running = others ? sum(sequences, others) / (double)others : 0.0;
    for (int64_t i = 0; i < others; i++) {
        struct line line = line_of(&a->decoding, &a->decoding.row, i);
        total[i] = line.base + line.slope * (1.0 + running);
    }
    double share = (double)others / sum(total, others);
    smoothing = SMOOTHING * a->decode_cost;
    level = sum(loads, others) / (double)others + smoothing;
    for (int64_t i = 0; i < others; i++) {
        load[i] = -beta * (1.0 + above(relative(loads[i], smoothing, level) * apart(total[i] * share)));
        total[i] = rate[i] + load[i];
    }
    if (!a->with_local || !(mean > 0.0)) return 0;
    load = total + others, speed = load + others, total = speed + others;
    for (int64_t i = 0; i < others; i++) {
        struct line line = line_of(&a->local, &a->local.row, i);
        double here = a->local_known ? (line.base + line.slope * tokens) / mean : 1.0;
        load[i] = (here * waiting[i] + ASIDE * tokens) * (-beta / tokens);
        speed[i] = (here * (1.0 + STALL_SHARE * sequences[i]) - 1.0) * (rate[i] - 1.0) * beta;
        total[i] = rate[i] + load[i] + speed[i];
    }
    return 1;
}

/* --- cost_ms --- */

/* What a millisecond of local prefill costs per sequence that decodes there, in milliseconds of this request: their
   steps carry the prompt's chunks, so they all wait for it. */
#define STALL_MS 0.1
/* Of the shortest prefill, at most: about what a prediction is off by. In replays (docs/bench/router.md) 0.02 to 0.2 gave
   the same time to first token. */
#define EVEN_SHARE 0.1
#define DEPTHS 64 /* different numbers of tokens that decode instances miss; others are looked at one by one */

struct cost_args {
    const double *prefill, *decode; /* sides */
    const double *loadable;         /* per decode instance; NULL: nothing lies in slower tiers */
    int64_t num_prefills, num_decodes;
    struct lines computing, decoding, local, store;
    const double *least; /* per decode instance: least base and slope of what transfers to it take */
    double least_base, least_slope;
    double tokens, sequences, expected, kv_bytes, prefill_cost;
    double threshold; /* missing tokens; -1: none */
    double *out;
};

/* Milliseconds of the prefill on decode instances themselves: after they loaded what they can, if that is given. */
static void score_alone(const struct cost_args *a, const double *loadable, double *out) {
    int64_t count = a->num_decodes;
    const double *matched = a->decode + MATCHED * count, *running = a->decode + SEQUENCES * count;
    const double *waiting = a->decode + WAITING * count;
    double *queue = out, *load = queue + count, *prefill = load + (loadable ? count : 0);
    double *stall = prefill + count, *total = stall + count;
    for (int64_t i = 0; i < count; i++) {
        struct line line = line_of(&a->local, &a->local.row, i);
        double missing = a->tokens - (loadable ? loadable[i] : matched[i]);
        queue[i] = -line.slope * waiting[i];
        prefill[i] = -(line.base + line.slope * missing);
        stall[i] = -STALL_MS * running[i] * line.slope * missing;
        if (!loadable) {
            if (a->threshold >= 0.0 && missing >= a->threshold) prefill[i] = -INFINITY;
            total[i] = queue[i] + prefill[i] + stall[i];
            continue;
        }
        struct line fetch = line_of(&a->store, &a->store.row, i);
        double more = loadable[i] - matched[i];
        load[i] = more > 0.0 ? -(fetch.base + fetch.slope * a->kv_bytes * more) : -INFINITY;
        total[i] = queue[i] + load[i] + prefill[i] + stall[i];
    }
}

/* What pairs with a decode instance that misses `needed` score at most, transfer aside. */
static double most_without_transfer(const double *missing, const double *base, const double *slope, const double *total,
                                    int64_t count, double needed) {
    double best = -INFINITY;
    for (int64_t i = 0; i < count; i++) {
        double score = total[i] - base[i] - slope[i] * (missing[i] < needed ? missing[i] : needed);
        if (score > best) best = score;
    }
    return best;
}

/* Score both sides and what decode can do by itself. out: per prefill instance missing tokens, base and slope of
   computing, queue, even and the total; per decode instance missing tokens, what its pairs score at most, and decode;
   then queue, prefill, stall and the total of the prefill on each; then, with `loadable`, queue, load, prefill, stall
   and the total of the same with what it loads. */
void baton_score_cost(const struct cost_args *a) {
    int64_t count = a->num_prefills, others = a->num_decodes;
    const double *matched = a->prefill + MATCHED * count, *work = a->prefill + WORK * count;
    const double *loads = a->prefill + LOADS * count, *held = a->decode + MATCHED * others;
    double *missing = a->out, *base = missing + count, *slope = base + count, *queue = slope + count;
    double *even = queue + count, *total = even + count;
    double most_held = 0.0, shortest = INFINITY, least_load = INFINITY;
    for (int64_t i = 0; i < others; i++)
        if (held[i] > most_held) most_held = held[i];
    double smoothing = SMOOTHING * a->prefill_cost;
    double level = count ? sum(loads, count) / (double)count + smoothing : 0.0;
    for (int64_t i = 0; i < count; i++) {
        struct line line = line_of(&a->computing, &a->computing.row, i);
        base[i] = line.base, slope[i] = line.slope;
        missing[i] = a->tokens - matched[i];
        queue[i] = -work[i] * line.slope;
        double known = matched[i] > most_held ? matched[i] : most_held;
        double ms = line.base + line.slope * (a->tokens - known);
        if (ms < shortest) shortest = ms;
        even[i] = relative(loads[i], smoothing, level);
        if (even[i] < least_load) least_load = even[i];
    }
    for (int64_t i = 0; i < count; i++) {
        double behind = least_load - even[i];
        even[i] = EVEN_SHARE * shortest * (behind < -1.0 ? -1.0 : behind);
        total[i] = queue[i] + even[i];
    }
    double *needed = total + count, *most = needed + others, *decode = most + others;
    const double *running = a->decode + SEQUENCES * others;
    double depths[DEPTHS], bounds[DEPTHS];
    int64_t num_depths = 0;
    for (int64_t i = 0; i < others; i++) {
        struct line line = line_of(&a->decoding, &a->decoding.row, i);
        decode[i] = -a->expected * (line.base + line.slope * (running[i] + a->sequences));
        needed[i] = a->tokens - held[i];
        most[i] = -INFINITY;
        if (!count || (a->threshold >= 0.0 && needed[i] < a->threshold)) continue;
        int64_t at = 0; /* most decode instances miss the same */
        while (at < num_depths && depths[at] != needed[i]) at++;
        double bound;
        if (at < num_depths) {
            bound = bounds[at];
        } else {
            bound = most_without_transfer(missing, base, slope, total, count, needed[i]);
            if (num_depths < DEPTHS) depths[num_depths] = needed[i], bounds[num_depths++] = bound;
        }
        double fixed = a->least[2 * i], per_byte = a->least[2 * i + 1];
        if (a->least_base < fixed) fixed = a->least_base;
        if (a->least_slope < per_byte) per_byte = a->least_slope;
        most[i] = bound - fixed - per_byte * a->kv_bytes * needed[i];
    }
    score_alone(a, NULL, decode + others);
    if (a->loadable) score_alone(a, a->loadable, decode + 5 * others);
}

/* --- the best of all --- */

/* What speaks for a pair beyond what speaks for each of its two: minus the milliseconds that cost_ms predicts. */
struct pairs {
    const double *missing, *base, *slope; /* per prefill instance */
    const double *needed, *most;          /* per decode instance */
    const struct line_row *rows;          /* transfers to it */
    struct lines moving;                  /* `row` is unused */
    double kv_bytes, threshold;
};

/* What can be chosen: totals of both sides and of what decode can do by itself; NULL: it cannot. */
struct options {
    const double *prefill, *decode, *local, *store;
    int64_t num_prefills, num_decodes;
};

/* What was chosen: the decode instance and its option, a prefill instance or one of those after them. */
struct choice {
    int64_t decode, column;
    double score;
};

/* Write every prefill instance's part in the score of its pair with a decode instance. */
static void fill_column(const struct options *o, const struct pairs *pairs, int64_t d, double *out) {
    int64_t count = o->num_prefills;
    if (!pairs) {
        if (count) memcpy(out, o->prefill, (size_t)count * sizeof *out);
        return;
    }
    double needed = pairs->needed[d], bytes = pairs->kv_bytes * needed;
    int refused = pairs->threshold >= 0.0 && needed < pairs->threshold;
    const struct line_row *row = pairs->rows + d;
    for (int64_t p = 0; p < count; p++) {
        struct line move = line_of(&pairs->moving, row, p);
        double computed = pairs->base[p] + pairs->slope[p] * (pairs->missing[p] < needed ? pairs->missing[p] : needed);
        out[p] = refused ? -INFINITY : o->prefill[p] - (computed + (move.base + move.slope * bytes));
    }
}

/* Write the scores of everything that a decode instance can be chosen with: all prefills, local, store. Returns how
   many there are. */
static int64_t fill_options(const struct options *o, const struct pairs *pairs, int64_t d, double *out) {
    int64_t count = o->num_prefills;
    fill_column(o, pairs, d, out);
    if (o->local || !count) out[count++] = o->local ? o->local[d] : 0.0;
    if (o->store) out[count++] = o->store[d];
    for (int64_t i = 0; i < count; i++) out[i] += o->decode[d];
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

/* Choose without pairs: the best prefill instance is the same for all, so only decode instances are compared. */
static int64_t choose_apart(const struct options *o, const double *draws, struct choice *found) {
    int64_t count = o->num_prefills, others = o->num_decodes;
    double most[others], options[count + 2];
    int coupled = o->local || o->store;
    double best = !count && !o->local ? 0.0 : highest(o->prefill, count);
    for (int64_t d = 0; d < others; d++) {
        double part = best;
        if (o->local && o->local[d] > part) part = o->local[d];
        if (o->store && o->store[d] > part) part = o->store[d];
        most[d] = coupled ? o->decode[d] + part : o->decode[d];
    }
    int64_t d = pick(most, others, draws[0]);
    if (d < 0) return d == -1 ? 1 : d;
    if (!coupled && !count) {
        *found = (struct choice){d, 0, o->decode[d]};
        return 0;
    }
    int64_t number = fill_options(o, NULL, d, options);
    int64_t column = coupled ? pick(options, number, draws[1]) : pick(o->prefill, count, draws[1]);
    if (column < 0) return column == -1 ? 2 : column;
    *found = (struct choice){d, column, options[column]};
    return 0;
}

/* Return the decode instance that follows another one in the order of what they score at most; -1: none. */
static int64_t following(const double *most, int64_t count, int64_t last) {
    int64_t next = -1;
    for (int64_t d = 0; d < count; d++) {
        if (last >= 0 && (most[d] > most[last] || (most[d] == most[last] && d <= last))) continue;
        if (next < 0 || most[d] > most[next]) next = d;
    }
    return next;
}

/* Choose with pairs: decode instances that cannot have the best one are not looked at. */
static int64_t choose_pair(const struct options *o, const struct pairs *pairs, double draw, struct choice *found) {
    int64_t count = o->num_prefills, others = o->num_decodes, seen = 0, ties = 0;
    int64_t tied[others], times[others];
    double most[others], options[count + 2], best = -INFINITY;
    for (int64_t d = 0; d < others; d++) {
        most[d] = pairs->most[d];
        if (o->local && o->local[d] > most[d]) most[d] = o->local[d];
        if (o->store && o->store[d] > most[d]) most[d] = o->store[d];
        most[d] += o->decode[d];
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
            *found = (struct choice){tied[at], i, best};
            return 0;
        }
    }
    return -2;
}

/* Choose the best pair. Returns 0; or the number of the draw that it needs, from 1 on, when it is below 0; or -2: a score
   is not a number. */
int64_t baton_choose(const struct options *o, const struct pairs *pairs, double first_draw, double second_draw,
                     struct choice *found) {
    double draws[2] = {first_draw, second_draw};
    if (!pairs) return choose_apart(o, draws, found);
    return first_draw < 0.0 ? 1 : choose_pair(o, pairs, first_draw, found);
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
