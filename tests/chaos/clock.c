/* Preloaded into processes whose wall clock tests set forward and back. The monotonic clocks stay as they are.
 *
 * BATON_CHAOS_CLOCK names a file of int64 nanoseconds, one for each process id modulo 32768, added to CLOCK_REALTIME. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 32768
#define SECOND 1000000000LL

static volatile int64_t *offsets;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("BATON_CHAOS_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void *mapped = mmap(NULL, SLOTS * sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
        offsets = mapped == MAP_FAILED ? NULL : mapped;
        close(fd);
    }
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_clock_gettime)
        begin();
    int status = real_clock_gettime(clock, now);
    if (status == 0 && offsets && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t at = now->tv_sec * SECOND + now->tv_nsec + offsets[getpid() % SLOTS];
        now->tv_sec = at / SECOND;
        now->tv_nsec = at % SECOND;
    }
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec at;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (now)
        *now = at.tv_sec;
    return at.tv_sec;
}
