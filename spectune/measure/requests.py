"""The requests of a cell: prompts in turn by category, cut into blocks that every arm decodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from spectune.records import Backend, Cell, Prompt, Request, Sampling

Block = tuple[Request, ...]

CALIBRATION_TOKENS = 32
CALIBRATION_PROMPTS = 4


def num_blocks(batch_size: int, *, num_prompts: int, min_blocks: int = 4) -> int:
    """Blocks of `batch_size` requests: at least `min_blocks` and at least `num_prompts` requests."""
    return max(min_blocks, math.ceil(num_prompts / batch_size))


def in_turn(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """Round-robin over categories, so that every prefix is as balanced as it can be."""
    queues: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        queues.setdefault(prompt.category, []).append(prompt)
    depth = max((len(queue) for queue in queues.values()), default=0)
    return tuple(queue[i] for i in range(depth) for queue in queues.values() if i < len(queue))


class RequestBuilder:
    """Encodes prompts for cells; a prompt is encoded once per context length.

    Arms of a cell share their requests; repeats go on where the last one stopped, so they reuse a
    prompt (under a higher sample number, hence another request_id) only when the workload is used up.
    """

    def __init__(self, backend: Backend, context_text: str = "") -> None:
        self._backend = backend
        self._context_text = context_text
        self._encoded: dict[tuple[str, int], tuple[int, ...]] = {}

    def blocks(
        self,
        prompts: Sequence[Prompt],
        cell: Cell,
        sampling: Sampling,
        *,
        count: int,
        repeat: int = 0,
        size: int | None = None,
    ) -> tuple[Block, ...]:
        """`count` blocks of `size` requests each (the cell's batch if not given)."""
        ordered = in_turn(prompts)
        size = size or cell.batch_size
        asked: Counter[str] = Counter()
        requests = []
        for i in range((repeat + 1) * count * size):
            prompt = ordered[i % len(ordered)]
            sample = asked[prompt.digest]
            asked[prompt.digest] += 1
            if i >= repeat * count * size:
                requests.append(self.request(prompt, sample, cell, sampling))
        return tuple(tuple(requests[i : i + size]) for i in range(0, len(requests), size))

    def calibration(self, prompts: Sequence[Prompt], cell: Cell, sampling: Sampling) -> Block:
        """One block for warm-up and times: short outputs that no end-of-sequence token cuts."""
        short = replace(
            sampling, ignore_eos=True, stop=(), max_tokens=min(sampling.max_tokens, CALIBRATION_TOKENS)
        )
        count = math.ceil(CALIBRATION_PROMPTS / cell.batch_size)
        blocks = self.blocks(prompts, cell, short, count=count)
        return tuple(request for block in blocks for request in block)

    def request(self, prompt: Prompt, sample: int, cell: Cell, sampling: Sampling) -> Request:
        """One prompt as a request of a cell; `sample` numbers its repeats."""
        limit = sampling.max_tokens if prompt.max_tokens is None else prompt.max_tokens
        return Request(
            request_id=f"{prompt.digest[:12]}-{sample}",
            prompt_ids=self._encode(prompt, cell.context_tokens),
            category=prompt.category,
            sampling=replace(
                sampling, temperature=cell.temperature, max_tokens=min(sampling.max_tokens, limit)
            ),
            prompt_text=prompt.asked,
        )

    def _encode(self, prompt: Prompt, context_tokens: int) -> tuple[int, ...]:
        key = (prompt.digest, context_tokens)
        if key not in self._encoded:
            self._encoded[key] = self._backend.encode(prompt, self._context_text, context_tokens)
        return self._encoded[key]
