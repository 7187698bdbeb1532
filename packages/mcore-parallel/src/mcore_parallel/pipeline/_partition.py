# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which layers a pipeline stage holds."""


def partition_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """Global numbers of the layers of one stage.

    Stages get equally many; what is left over goes one each to the stages before the last, beginning with stage 1:
    the first stage also holds the embedding and the most live activations, the last one the output layer and the loss.
    Only when all inner stages have one does the first stage take one as well, and never the last (the rest is
    smaller than the number of stages).

    Raises:
        ValueError: a stage would be empty, or ``stage`` does not exist.

    Example:
        >>> [len(partition_layers(10, 4, stage)) for stage in range(4)]
        [2, 3, 3, 2]
    """
    if num_stages < 1 or not 0 <= stage < num_stages:
        raise ValueError(f"stage={stage} must lie in [0, num_stages={num_stages})")
    if num_layers < num_stages:
        raise ValueError(f"num_layers={num_layers} must be at least the number of pipeline stages {num_stages}; lower pp")
    share, rest = divmod(num_layers, num_stages)
    order = [*range(1, num_stages - 1), 0]
    sizes = [share + (number in order[:rest]) for number in range(num_stages)]
    begin = sum(sizes[:stage])
    return range(begin, begin + sizes[stage])
