/* Preloaded into processes whose wall clock tests set forward and back. The monotonic clocks stay as they are, unless
 * BATON_CHAOS_CLOCK_ALL is set: then it is as if every deadline and every lease went by the wall clock.
 *
 * BATON_CHAOS_CLOCK names a file of int64 numbers, two for each process id modulo 32768: nanoseconds that are added to
 * CLOCK_REALTIME, and how often a clock was read that was not the machine's.
 *
 * With BATON_CHAOS_NAMED_MEMORY it is as if memory that processes share had names in /dev/shm: there is none where that
 * is full. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 32768
#define SECOND 1000000000LL

typedef struct {
    int64_t offset, reads;
} slot_t;

static slot_t *slots;
static int all;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("BATON_CHAOS_CLOCK");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    all = getenv("BATON_CHAOS_CLOCK_ALL") != NULL;
    if (fd >= 0) {
        void *mapped = mmap(NULL, SLOTS * sizeof(slot_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        slots = mapped == MAP_FAILED ? NULL : mapped;
        close(fd);
    }
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_clock_gettime)
        begin();
    int status = real_clock_gettime(clock, now);
    if (status != 0 || !slots || !(all || clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        return status;
    slot_t *own = &slots[getpid() % SLOTS];
    int64_t offset = __atomic_load_n(&own->offset, __ATOMIC_RELAXED);
    if (offset) {
        int64_t at = now->tv_sec * SECOND + now->tv_nsec + offset;
        at = at < 0 ? 0 : at;
        now->tv_sec = at / SECOND;
        now->tv_nsec = at % SECOND;
        __atomic_fetch_add(&own->reads, 1, __ATOMIC_RELAXED);
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

int memfd_create(const char *name, unsigned int flags) {
    if (getenv("BATON_CHAOS_NAMED_MEMORY")) {
        int fd = open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
        int status = fd < 0 ? errno : posix_fallocate(fd, 0, 1 << 20);
        if (fd >= 0)
            close(fd);
        if (status) {
            errno = status;
            return -1;
        }
    }
    return (int)syscall(SYS_memfd_create, name, flags);
}

time_t time(time_t *now) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (now)
        *now = at.tv_sec;
    return at.tv_sec;
}
