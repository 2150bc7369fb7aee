"""The instances that the router knows: identity, load and liveness.

- ``registry``: all instances and the leases of registered ones. ``discovery``: further sources of instances.
- ``instance``, ``instance_monitor``: one instance, and the router's connection to it.
- ``load``: the work in flight on an instance.
"""
