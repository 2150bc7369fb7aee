"""Runs one model in the engine's process or over several processes.

With ``tp`` or ``pp`` above 1, rank 0, the **leader**, lives in the process of the engine: it schedules, samples and
keeps the books. The other ranks, its **followers**, are child processes that run the same steps on their share of the
model: tensor parallelism within a stage, pipeline stages one after the other.

================  ==============================================================================
``base``          the ``Executor`` protocol and the registry
``in_process``    one rank, in the engine's process
``multiprocess``  the leader's side of several ranks: tells followers what to do, and their errors
``processes``     followers as processes: start, death, end
``follower``      a follower's process
``messages``      small messages and file descriptors between leader and follower over a socket
``step_buffer``   a step's arrays in memory that all ranks map
``memory``        how many KV blocks fit beside the model
================  ==============================================================================
"""
