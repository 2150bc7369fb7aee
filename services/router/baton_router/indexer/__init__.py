"""The prefix index, and the KV events that feed it.

- ``prefix_index``: how many leading blocks of a prompt each instance holds.
- ``events``: event streams of instances and stores, and their parts of the index.
- ``stores``: the KV stores.
"""
