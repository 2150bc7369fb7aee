"""One model over several processes: tensor parallelism within a stage, pipeline stages one after the other.

Rank 0, the **leader**, lives in the process of the engine: it schedules, samples and keeps the books. The other ranks,
its **followers**, are child processes that run the same steps on their share of the model.

==================  ==============================================================================
``team``            the leader's side: tells followers what to do, and what became of it
``processes``       followers as processes: start, death, end
``follower``        a follower's process
``messages``        the line between the two: small messages and file descriptors over a socket
``step_buffer``     a step's arrays in memory that all ranks map
``peers``           gloo: sums over the ranks of a stage, hidden states from stage to stage
``tensor_split``    cuts a loaded model's weights down to a rank's heads and columns
``stages``          cuts it down to a stage's layers
==================  ==============================================================================
"""
