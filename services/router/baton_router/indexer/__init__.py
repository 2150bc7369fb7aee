"""The prefix index, and the KV events that feed it.

- ``prefix_index``: how many leading blocks of a prompt each instance holds.
- ``events``: event streams of instances and stores, and their way into the index.
- ``index_columns``: matches for many instances at once.
- ``stores``: the KV stores.
"""
