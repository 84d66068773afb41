"""Losslessness on the default target in fp32: the corners of the matrix, real prompts, batch 3."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spectune.backend.heads import head_folder, shipped_heads
from spectune.backend.reference import ReferenceBackend
from spectune.draft.ngram import NgramDrafter
from spectune.engine.drafter import Drafter
from spectune.engine.scheduler import Engine
from spectune.engine.target_config import TargetConfig
from spectune.metrics.acceptance import acceptance_length, pooled_steps
from spectune.records import Request, RequestRecord, Sampling, SpecConfig
from spectune.workload import load_workload
from tests.support.lossless import divergences
from tests.support.toys import head_config, head_tensors, save_head

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

BATCH = 3
CATEGORIES = ("chat", "code", "math", "json_extraction")
CONFIGS = [
    SpecConfig.chain("eagle3", 1),
    SpecConfig.chain("eagle3", 3),
    SpecConfig.chain("eagle3", 7),
    SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=8),
    SpecConfig(method="eagle3", num_steps=5, topk=4, num_draft_tokens=16),
    SpecConfig(method="eagle3", num_steps=5, topk=8, num_draft_tokens=32),
    SpecConfig.chain("ngram", 3),
]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "hot-nucleus": {"temperature": 1.0, "top_p": 0.95, "seed": 4},
}


@dataclass(frozen=True, slots=True)
class Plain:
    """Requests of one sampling with plain decoding's records and margins."""

    requests: list[Request]
    records: tuple[RequestRecord, ...]
    margins: dict[str, list[float]]


@pytest.fixture(scope="module")
def backend(default_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ReferenceBackend:
    """The default target in fp32 with the shipped head, or an untrained one where none is shipped."""
    names = shipped_heads()
    if names:
        head = str(head_folder(names[0]))
    else:
        target = TargetConfig.from_dir(default_target_dir)
        config = head_config(target, 4096)
        head = str(save_head(tmp_path_factory.mktemp("head"), config, head_tensors(config, target)))
    return ReferenceBackend(model=str(default_target_dir), draft_model=head, dtype="float32")


@pytest.fixture(scope="module")
def plain(backend: ReferenceBackend) -> dict[str, Plain]:
    """Plain decoding of four prompts, 24 tokens each, for every sampling."""
    prompts = [load_workload(name, num_prompts=1).prompts[0] for name in CATEGORIES]
    engine = Engine(backend.target, backend.tokenizer, batch_size=BATCH)
    made = {}
    for name, keys in SAMPLINGS.items():
        asks = [
            Request(
                request_id=prompt.prompt_id,
                category=prompt.category,
                prompt_ids=backend.encode(prompt, "", 0),
                sampling=Sampling(max_tokens=24, **keys),
            )
            for prompt in prompts
        ]
        records = engine.generate(asks, wants_margins=True).requests
        made[name] = Plain(asks, records, engine.margins)
    return made


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_default_target_speculates_without_loss(
    config: SpecConfig, sampling: str, backend: ReferenceBackend, plain: dict[str, Plain]
) -> None:
    """Every token is plain decoding's; a text may leave it only where the two best were a near tie."""
    wanted = plain[sampling]
    drafter: Drafter | None = backend.drafter(config.method)
    engine = Engine(backend.target, backend.tokenizer, batch_size=BATCH, drafter=drafter)

    records = engine.generate(wanted.requests, config).requests

    found = divergences(wanted.records, records, wanted.margins)
    assert [] == [divergence for divergence in found if not divergence.is_near_tie]
    assert [None] * len(records) == [record.broken_identity() for record in records]
    if not isinstance(drafter, NgramDrafter):
        length = acceptance_length(pooled_steps(records))
        assert length is not None
        assert 1.0 <= length <= config.max_accepted + 1


def test_default_target_is_decoded_in_fp32(backend: ReferenceBackend) -> None:
    """Equality is asked of full precision, where only summation order can differ."""
    assert backend.target.dtype is torch.float32
