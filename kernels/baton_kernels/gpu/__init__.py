"""Operators as Triton kernels, for GPUs; under ``TRITON_INTERPRET=1`` they run on a CPU, slowly.

Attention is ``baton_kernels.paged_attention.gpu``. Importing anything here imports triton.
"""

import triton


def is_interpreted() -> bool:
    """Whether kernels run on the CPU, by Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)
