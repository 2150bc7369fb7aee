"""Moving KV between instances: pipes, the lookup buffer over them, and the connectors that engines talk to.

Nothing here but ``baton.kv_transfer.pipes.torch_distributed`` imports torch.
"""
