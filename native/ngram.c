/* Prompt lookup: where a sequence's last tokens stood before, and what followed them there. */

#include <stdint.h>

/* Writes at most `limit` tokens that followed the latest place where the longest of the last `most` to `least` tokens
   stood before, and returns how many. What lies behind the end is read from what was written: a sequence that repeats
   itself is expected to go on so. */
int64_t baton_ngram_draft(const uint32_t *tokens, int64_t count, int64_t least, int64_t most, int64_t limit,
                          uint32_t *draft) {
    if (count < 2 || limit < 1) return 0;
    uint32_t last = tokens[count - 1];
    int64_t best = 0, at = 0;
    for (int64_t i = count - 2; i >= 0; i--) {
        if (tokens[i] != last) continue;
        int64_t n = 1;
        while (n < most && n <= i && tokens[i - n] == tokens[count - 1 - n]) n++;
        if (n > best) {
            best = n, at = i + 1;
            if (n >= most) break;
        }
    }
    if (best < least) return 0;
    for (int64_t i = 0; i < limit; i++) draft[i] = at + i < count ? tokens[at + i] : draft[at + i - count];
    return limit;
}
