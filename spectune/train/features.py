"""What the target computes along the corpus, cached: the head then trains without the target.

A shard holds the rows of a corpus chunk back to back: ids, features [n, 3H], final hidden states [n, H]
in bf16, and the target's own next token. It is recorded while the answers are decoded; a missing one is
made by a teacher-forced pass. Shards are written whole or not at all.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spectune.errors import StoreError
from spectune.train.corpus import CorpusRow
from spectune.train.plan import Progress, TrainEvent
from spectune.train.ttt import Sample

if TYPE_CHECKING:
    from spectune.engine.target import Target
    from spectune.train.generate import Answer

BATCH_TOKENS = 1536
_SPARE_BYTES = 1 << 28


def bytes_per_token(hidden_size: int) -> int:
    """Cache size of one token: 3H + H in bf16, two int32."""
    return 2 * 4 * hidden_size + 8


def announce_size(size: int, directory: Path, progress: Progress) -> None:
    """Say how many bytes of features are to come, before anything is decoded.

    Raises StoreError where the disk has not that much.
    """
    if size <= 0:
        return
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < size + _SPARE_BYTES:
        raise StoreError(
            f"the features to come take about {size / 1e9:.1f} GB in {directory}, where {free / 1e9:.1f} GB are free",
            hint="make room, or lower --num-tokens-target",
        )
    progress(
        TrainEvent(stage="corpus", message=f"about {size / 1e9:.2f} GB of features to come in {directory}")
    )


def usable(rows: Sequence[CorpusRow]) -> list[CorpusRow]:
    """Rows with at least two answer tokens: shorter ones have nothing for a head to predict."""
    return [row for row in rows if len(row.output_ids) >= 2]


def shard_path(directory: Path, chunk: int) -> Path:
    return directory / f"shard-{chunk:05d}.safetensors"


def record_shard(
    directory: Path, chunk: int, rows: Sequence[CorpusRow], answers: Sequence[Answer], digest: str
) -> None:
    """Keep what decoding has computed for the rows of a chunk."""
    by_index = {answer.index: answer for answer in answers}
    kept = usable(rows)
    tensors = _blank(kept, answers[0].activations.shape[1] // 4 if answers else 0)
    offset = 0
    for row in kept:
        answer = by_index[row.index]
        ids = torch.tensor(row.prompt_ids + row.output_ids, dtype=torch.int32)
        count = ids.numel() - 1  # the last token was never fed
        width = tensors["final"].shape[1]
        tensors["ids"][offset : offset + count + 1] = ids
        tensors["features"][offset : offset + count] = answer.activations[:count, : 3 * width]
        tensors["final"][offset : offset + count] = answer.activations[:count, 3 * width :]
        tensors["top"][offset : offset + count] = answer.top[:count]
        offset += count + 1
    _save(tensors, shard_path(directory, chunk), _metadata(kept, digest))


def build_features(
    target: Target,
    rows: Sequence[CorpusRow],
    directory: Path,
    digest: str,
    progress: Progress,
    *,
    rows_per_shard: int,
) -> FeatureStore:
    """Features of all rows under `directory`: shards recorded with this digest are kept, others are
    made by a teacher-forced pass."""
    directory.mkdir(parents=True, exist_ok=True)
    chunks: dict[int, list[CorpusRow]] = {}
    for row in usable(rows):
        chunks.setdefault(row.index // rows_per_shard, []).append(row)
    sizes = {
        chunk: sum(len(r.prompt_ids) + len(r.output_ids) for r in shard) for chunk, shard in chunks.items()
    }
    total = sum(sizes.values())
    size = total * bytes_per_token(target.config.hidden_size)
    progress(
        TrainEvent(
            stage="features", message=f"{total} tokens, {size / 1e9:.2f} GB in {directory}", total=total
        )
    )
    done = fresh = 0
    started = time.monotonic()
    for chunk, shard in chunks.items():
        path = shard_path(directory, chunk)
        done += sizes[chunk]
        if _is_current(path, shard, digest):
            continue
        _write_shard(target, shard, path, digest)
        fresh += sizes[chunk]
        rate = fresh / (time.monotonic() - started)
        progress(
            TrainEvent(
                stage="features", done=done, total=total, unit="tokens", tokens_per_s=rate,
                seconds_left=(total - done) / rate,
            )
        )  # fmt: skip
    return FeatureStore([shard_path(directory, chunk) for chunk in chunks])


def _metadata(shard: Sequence[CorpusRow], digest: str) -> dict[str, str]:
    fields = [
        [
            row.index,
            len(row.prompt_ids),
            len(row.prompt_ids) + len(row.output_ids),
            row.is_greedy,
            row.had_loop,
        ]
        for row in shard
    ]
    return {"digest": digest, "rows": json.dumps(fields)}


def _is_current(path: Path, shard: Sequence[CorpusRow], digest: str) -> bool:
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            return bool(file.metadata() == _metadata(shard, digest))
    except SafetensorError:
        return False


@torch.no_grad()
def _write_shard(target: Target, shard: Sequence[CorpusRow], path: Path, digest: str) -> None:
    lengths = [len(row.prompt_ids) + len(row.output_ids) for row in shard]
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    tensors = _blank(shard, target.config.hidden_size)
    for group in _by_length(lengths, BATCH_TOKENS):
        width = max(lengths[i] for i in group)
        ids = torch.zeros(len(group), width, dtype=torch.int64)
        for row, i in enumerate(group):
            ids[row, : lengths[i]] = torch.tensor(shard[i].prompt_ids + shard[i].output_ids)
        final, features = target.forward_text(ids, torch.tensor([lengths[i] for i in group]))
        for row, i in enumerate(group):
            part, length = slice(offsets[i], offsets[i + 1]), lengths[i]
            tensors["ids"][part] = ids[row, :length].int()
            tensors["features"][part] = features[row, :length].cpu()
            tensors["final"][part] = final[row, :length].cpu()
            tensors["top"][part] = _target_choice(target, shard[i], ids[row, :length], final[row, :length])
    _save(tensors, path, _metadata(shard, digest))


def _blank(rows: Sequence[CorpusRow], hidden: int) -> dict[str, Tensor]:
    count = sum(len(row.prompt_ids) + len(row.output_ids) for row in rows)
    return {
        "ids": torch.zeros(count, dtype=torch.int32),
        "top": torch.zeros(count, dtype=torch.int32),
        "features": torch.zeros(count, 3 * hidden, dtype=torch.bfloat16),
        "final": torch.zeros(count, hidden, dtype=torch.bfloat16),
    }


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a shard whole or not at all; a full disk is told before it is full."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    need = sum(tensor.nbytes for tensor in tensors.values())
    free = shutil.disk_usage(path.parent).free
    if free < need + _SPARE_BYTES:
        raise StoreError(
            f"{path.parent} has {free / 1e9:.1f} GB free, the next part needs {need / 1e9:.1f} GB",
            hint="make room, or lower --num-tokens-target, and give --resume: what is finished is kept",
        )
    partial = path.with_suffix(".partial")
    try:
        save_file(tensors, partial, metadata=metadata)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise StoreError(
            f"{path} cannot be written: {error}",
            hint="make room and give --resume: what is finished is kept",
        ) from error


def _target_choice(target: Target, row: CorpusRow, ids: Tensor, final: Tensor) -> Tensor:
    """The target's greedy next token per position, defined on the answer only. int32 [T]

    A greedy answer is its own record of it; a sampled one needs the logits.
    """
    top = torch.zeros(ids.numel(), dtype=torch.int32)
    first = len(row.prompt_ids) - 1
    top[:-1] = ids[1:].int()
    if not row.is_greedy:
        top[first:] = target.logits(final[first:]).argmax(-1).int().cpu()
    return top


def _by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in groups of similar length whose padded size stays within `budget` tokens."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and (len(groups[-1]) + 1) * lengths[index] <= budget:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


class FeatureStore:
    """Random access to the cached samples; tensors are read from mapped files on demand."""

    def __init__(self, paths: Sequence[Path]) -> None:
        from safetensors import safe_open

        self._files: list[Any] = []
        self._rows: list[tuple[int, int, int, int, int, bool, bool]] = []
        for number, path in enumerate(paths):
            if not path.exists():
                raise StoreError(f"{path} is missing", hint="run the features stage again")
            file: Any = safe_open(path, framework="pt")
            offset = 0
            for index, prompt, length, is_greedy, had_loop in json.loads(file.metadata()["rows"]):
                self._rows.append((number, offset, length, prompt, index, is_greedy, had_loop))
                offset += length
            self._files.append(file)

    def __len__(self) -> int:
        return len(self._rows)

    def corpus_index(self, i: int) -> int:
        return self._rows[i][4]

    def is_greedy(self, i: int) -> bool:
        return self._rows[i][5]

    def had_loop(self, i: int) -> bool:
        return self._rows[i][6]

    def answer_length(self, i: int) -> int:
        return self._rows[i][2] - self._rows[i][3]

    def sample(self, i: int) -> Sample:
        number, offset, length, prompt, _, is_greedy, _ = self._rows[i]
        file = self._files[number]

        def part(name: str) -> Tensor:
            rows: Tensor = file.get_slice(name)[offset : offset + length]
            return rows

        return Sample(
            ids=part("ids").long(),
            answer_start=prompt,
            features=part("features"),
            final=part("final"),
            top=part("top").long(),
            is_greedy=is_greedy,
        )
