"""Runs one model in the engine's process (``in_process``) or over several processes (``multiprocess``).

With ``tp`` or ``pp`` above 1, rank 0, the **leader**, lives in the process of the engine: it schedules, samples and
owns the KV pool. The other ranks, its **followers** (``follower``), are child processes that run the same steps on
their share of the model: tensor parallelism within a stage, pipeline stages one after the other.
"""
