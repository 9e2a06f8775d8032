"""``EngineSizes``: the numbers of an engine by which a workload chooses its prompts."""

from __future__ import annotations

import attrs


@attrs.frozen
class EngineSizes:
    """The numbers of an engine by which a workload chooses its prompts.

    Attributes:
        vocabulary: number of token ids.
        max_length: tokens of a request, prompt and output together.
        block_size: tokens per block of the KV cache; of SGLang's, per page.
    """

    vocabulary: int
    max_length: int
    block_size: int
