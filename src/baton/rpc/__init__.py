"""gRPC, HTTP/2 and Redis as Baton's services use them.

- ``server``: the gRPC server of every service, with health, reflection and authentication; free ports.
- ``channel``: channels to other services, and the pauses between attempts to reach them.
- ``http2``: a client for streams of many small messages. ``multiplex``: many requests on one such stream.
- ``errors``, ``convert``: errors and types to the wire and back.
- ``auth``, ``service_token``, ``proof``, ``tls``, ``ticket``: who may call, and how callers prove it.
- ``connections``: the bound on unauthenticated connections. ``audit``: the audit log.
- ``redis``, ``kubernetes_api``: clients, registrations and their watch.
"""
