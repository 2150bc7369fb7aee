/* Scatter and gather over a stream socket for baton.kv_transfer.native_copy: thousands of spans of memory without a
 * Python object for each, and without the interpreter lock; checksums (XXH3, 64 bits) while the bytes are in the cache.
 */
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

/* xxHash's streaming functions (XXH3, 64 bits), from the library that Python's xxhash package brings. */
struct xxh3 {
    void *(*create_state)(void);
    int (*free_state)(void *);
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    uint64_t (*digest)(const void *);
};

static struct xxh3 xxh3; /* set once, while baton.kv_transfer.native_copy is imported */

void baton_use_xxh3(const struct xxh3 *functions)
{
    xxh3 = *functions;
}

enum { MAX_PIECES = 512 };
/* Bytes that are hashed, then moved, in one go: they should stay in a core's own cache in between. */
#define HASHED_BYTES (256u << 10)
/* A receiver is woken when so much is there, or all that is to come: to wake a thread costs both ends as much as to copy
 * a hundred KiB, where the other core of a virtual machine has gone to sleep. */
#define WAKE_BYTES (1 << 20)

struct span {
    uint64_t address, bytes;
};

/* The next byte to move, and to hash. */
struct state {
    uint64_t span, at, left; /* left: bytes of all spans from here on */
    uint64_t hashed;         /* bytes from here on that were hashed already */
};

/* Checksums of a stream of pieces. */
struct hasher {
    const uint64_t *sizes; /* bytes of each piece */
    uint64_t *sums;        /* one per piece */
    uint64_t count;
    uint64_t piece, left;  /* the present piece, and the bytes of it to come */
    void *state;           /* xxHash's */
};

static size_t gather(const struct state *s, const struct span *spans, uint64_t room, struct iovec *pieces)
{
    size_t n = 0;
    for (uint64_t i = s->span, at = s->at, left = s->left; left && n < MAX_PIECES && room; i++, at = 0, n++) {
        uint64_t bytes = spans[i].bytes - at;
        left -= bytes;
        pieces[n].iov_base = (void *)(uintptr_t)(spans[i].address + at);
        pieces[n].iov_len = bytes < room ? bytes : room;
        room -= pieces[n].iov_len;
    }
    return n;
}

static void advance(struct state *s, const struct span *spans, uint64_t bytes)
{
    s->left -= bytes;
    while (bytes) {
        uint64_t left = spans[s->span].bytes - s->at;
        if (bytes < left) {
            s->at += bytes;
            return;
        }
        bytes -= left;
        s->span++;
        s->at = 0;
    }
}

static void begin_piece(struct hasher *h)
{
    h->left = h->sizes[h->piece];
    xxh3.reset(h->state);
}

static void hash_bytes(struct hasher *h, const uint8_t *data, uint64_t bytes)
{
    while (bytes && h->piece < h->count) {
        uint64_t part = bytes < h->left ? bytes : h->left;
        xxh3.update(h->state, data, part);
        data += part, bytes -= part, h->left -= part;
        if (!h->left) {
            h->sums[h->piece] = xxh3.digest(h->state);
            if (++h->piece < h->count)
                begin_piece(h);
        }
    }
}

static void hash_pieces(struct hasher *h, const struct iovec *pieces, uint64_t bytes)
{
    for (; bytes; pieces++) {
        uint64_t part = bytes < pieces->iov_len ? bytes : pieces->iov_len;
        hash_bytes(h, pieces->iov_base, part);
        bytes -= part;
    }
}

static uint64_t total_of(const struct iovec *pieces, size_t count)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; i++)
        bytes += pieces[i].iov_len;
    return bytes;
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Wait until enough can be received. Returns 0, EAGAIN (nothing within `tick_ms`) or the kernel's reason. */
static int await_bytes(int fd, uint64_t left, int *mark, int tick_ms)
{
    int wanted = left < WAKE_BYTES ? (int)left : WAKE_BYTES;
    /* Not every kind of socket has the mark; without it the wake-ups are just more. */
    if (wanted != *mark && setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted) == 0)
        *mark = wanted;
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    int ready = poll(&entry, 1, tick_ms);
    if (ready < 0)
        return errno == EINTR ? 0 : errno;
    return ready ? 0 : EAGAIN;
}

/* Returns a hasher of `count` pieces, none of them empty, to be freed with baton_hasher_free; null: no memory. Sizes and
 * sums must outlive it. */
struct hasher *baton_hasher_new(const uint64_t *sizes, uint64_t *sums, uint64_t count)
{
    struct hasher *h = malloc(sizeof *h);
    if (!h)
        return NULL;
    *h = (struct hasher){.sizes = sizes, .sums = sums, .count = count, .state = xxh3.create_state()};
    if (!h->state) {
        free(h);
        return NULL;
    }
    if (count)
        begin_piece(h);
    return h;
}

void baton_hasher_free(struct hasher *h)
{
    if (h)
        xxh3.free_state(h->state);
    free(h);
}

/* Send spans, none of them empty, until `limit` bytes have gone; `h` may be null. Returns how many went; `error` is 0,
 * EAGAIN (the socket's time-out passed) or the kernel's reason. */
int64_t baton_send_spans(int fd, const struct span *spans, struct state *s, struct hasher *h, uint64_t limit, int *error)
{
    uint64_t moved = 0;
    *error = 0;
    while (s->left && moved < limit) {
        struct iovec pieces[MAX_PIECES];
        uint64_t room = limit - moved, most = !h ? room : s->hashed ? s->hashed : HASHED_BYTES;
        if (most > room)
            most = room; /* what lies beyond may not be there yet */
        struct msghdr message = {.msg_iov = pieces, .msg_iovlen = gather(s, spans, most, pieces)};
        uint64_t asked = total_of(pieces, message.msg_iovlen);
        if (h && !s->hashed) {
            hash_pieces(h, pieces, asked);
            s->hashed = asked;
        }
        ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0) {
            *error = errno == EWOULDBLOCK ? EAGAIN : errno;
            break;
        }
        advance(s, spans, (uint64_t)sent);
        moved += (uint64_t)sent;
        if (h)
            s->hashed -= (uint64_t)sent;
        if ((uint64_t)sent < asked)
            break; /* slow: the caller looks at its deadline */
    }
    return (int64_t)moved;
}

/* Fill spans as `baton_send_spans` sends them; `error` is also EPIPE if the peer ended, and EAGAIN if little came in a
 * tick. Several calls may be needed although there is no error: after a tick with waits the caller looks at its
 * deadline. */
int64_t baton_recv_spans(int fd, const struct span *spans, struct state *s, struct hasher *h, uint64_t limit, int tick_ms,
                         int *error)
{
    uint64_t moved = 0;
    int mark = 1;
    int64_t look_at = 0;
    *error = 0;
    while (s->left && moved < limit && !*error) {
        struct iovec pieces[MAX_PIECES];
        uint64_t most = h ? HASHED_BYTES : limit - moved;
        struct msghdr message = {.msg_iov = pieces, .msg_iovlen = gather(s, spans, most, pieces)};
        ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT);
        if (got > 0) {
            if (h)
                hash_pieces(h, pieces, (uint64_t)got);
            advance(s, spans, (uint64_t)got);
            moved += (uint64_t)got;
        } else if (got == 0) {
            *error = EPIPE;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            int64_t now = now_ms();
            if (!look_at)
                look_at = now + tick_ms;
            else if (now >= look_at)
                break;
            *error = await_bytes(fd, s->left, &mark, tick_ms);
        } else if (errno != EINTR) {
            *error = errno;
        }
    }
    if (mark != 1) {
        mark = 1; /* the next word may be a short one; a socket that is broken will say so then */
        (void)setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &mark, sizeof mark);
    }
    return (int64_t)moved;
}
