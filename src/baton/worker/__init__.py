"""A prefill or decode instance: engine, connectors, gRPC service and process.

``baton.worker.instance`` has the instance as a whole, ``baton.worker.process`` what the processes of all services
share. Nothing is imported here: the router and the KV store use ``process`` without torch.
"""
