"""An HTTP/2 client of Baton's own, because it halves the processor time of a paced token.

gRPC's asyncio client passes each message from a thread of its own to the event loop, through a pipe, a queue and a
task: 60 to 120 µs. Here the event loop reads the socket and calls the message's receiver itself.

- ``hpack``: the compression of headers.
- ``connection``: :class:`Http2Connection`, frames, streams and flow control.
- ``message_stream``: gRPC calls over it: :class:`Dialer`, :class:`MessageStream`, :class:`ServerStream`.
"""
