/* Batched block copies for baton.transport.copying: one call without the interpreter lock for many runs. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct run {
    uint64_t to, from, bytes;
};

void baton_copy_runs(char *to, const char *from, const struct run *runs, size_t count)
{
    for (size_t i = 0; i < count; i++)
        memcpy(to + runs[i].to, from + runs[i].from, runs[i].bytes);
    /* What is read after this call (the generations) is read after the copies. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
