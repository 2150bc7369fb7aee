/* Scatter and gather over a stream socket for baton.transport.moving: thousands of spans of memory without a Python
 * object for each, and without the interpreter lock.
 */
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { MAX_PIECES = 512 };

struct span {
    uint64_t address, bytes;
};

/* The next byte to move. All zero at the beginning. */
struct state {
    uint64_t span, at;
};

static size_t gather(const struct state *s, const struct span *spans, size_t count, uint64_t room, struct iovec *pieces)
{
    size_t n = 0;
    for (uint64_t i = s->span, at = s->at; i < count && n < MAX_PIECES && room; i++, at = 0, n++) {
        uint64_t bytes = spans[i].bytes - at;
        pieces[n].iov_base = (void *)(uintptr_t)(spans[i].address + at);
        pieces[n].iov_len = bytes < room ? bytes : room;
        room -= pieces[n].iov_len;
    }
    return n;
}

static void advance(struct state *s, const struct span *spans, uint64_t bytes)
{
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

/* Move spans, none of them empty, until `limit` bytes have gone. Returns how many went; `error` is 0, EAGAIN (the socket's
 * time-out passed), EPIPE (the peer ended) or the kernel's reason. */
int64_t baton_move_spans(int fd, int sending, const struct span *spans, size_t count, struct state *s, uint64_t limit,
                         int *error)
{
    uint64_t moved = 0;
    *error = 0;
    while (s->span < count && moved < limit) {
        struct iovec pieces[MAX_PIECES];
        struct msghdr message = {.msg_iov = pieces, .msg_iovlen = gather(s, spans, count, limit - moved, pieces)};
        uint64_t asked = 0;
        for (size_t i = 0; i < message.msg_iovlen; i++)
            asked += pieces[i].iov_len;
        ssize_t got = sending ? sendmsg(fd, &message, MSG_NOSIGNAL) : recvmsg(fd, &message, MSG_WAITALL);
        if (got > 0) {
            advance(s, spans, (uint64_t)got);
            moved += (uint64_t)got;
            if ((uint64_t)got < asked)
                break; /* slow: the caller looks at its deadline */
        } else if (got == 0 || errno != EINTR) {
            *error = got == 0 ? EPIPE : errno == EWOULDBLOCK ? EAGAIN : errno;
            break;
        }
    }
    return (int64_t)moved;
}
