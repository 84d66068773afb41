"""Stages on a toy target: corpus, features, training, export, each stopped and continued."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spectune.draft.checkpoint import load_head
from spectune.engine.target import Target
from spectune.errors import StoreError
from spectune.records import Request, RequestRecord
from spectune.train.corpus import CorpusRow, build_corpus, read_corpus, takes_share, user_turn_prefix
from spectune.train.export import export_head
from spectune.train.features import FeatureStore, build_features
from spectune.train.head import Eagle3Head, head_config, init_from_target
from spectune.train.pipeline import draft_vocab
from spectune.train.plan import TrainEvent, TrainPlan, silent
from spectune.train.trainer import Trainer, batches, learning_rate
from spectune.train.ttt import collate, ttt_loss
from tests.unit.train.toys import DRAFT, VOCAB, target_config, target_weights


class ToyTokenizer:
    """One id per character; a chat is 1, 3, the words, 4."""

    eos_ids = (2,)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [1, 3, *(5 + ord(c) % 30 for c in messages[0]["content"]), 4]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"w{i}" for i in ids if i != 2)


def answer(requests: Sequence[Request]) -> list[RequestRecord]:
    """Answers that depend on the request id only, 10 tokens and the end of text."""
    records = []
    for request in requests:
        generator = torch.Generator().manual_seed(sum(map(ord, request.request_id)))
        ids = torch.randint(5, VOCAB, (10,), generator=generator).tolist()
        records.append(
            RequestRecord(
                request_id=request.request_id,
                category=request.category,
                num_prompt_tokens=len(request.prompt_ids),
                output_ids=(*ids, 2),
                arrival_s=0.0,
                first_token_s=0.1,
                finish_s=1.0,
                finish_reason="eos",
            )
        )
    return records


def plan_for(path: Path, **changes: object) -> TrainPlan:
    values: dict[str, object] = {
        "target": path,
        "output_dir": path,
        "num_tokens": 600,
        "generate_batch_size": 4,
        "max_prompt_tokens": 24,
        "draft_vocab_size": DRAFT,
        "ttt_steps": 2,
        "epochs": 2,
        "batch_tokens": 128,
        "holdout_every": 8,
        "eval_every": 1000,
        "checkpoint_every": 1000,
    }
    return TrainPlan(**{**values, **changes})  # type: ignore[arg-type]


def make_corpus(plan: TrainPlan) -> list[CorpusRow]:
    return build_corpus(plan, plan.output_dir / "corpus.jsonl", ToyTokenizer(), answer, silent)  # type: ignore[arg-type]


def toy_target(dtype: torch.dtype = torch.float32) -> tuple[Target, dict[str, Tensor]]:
    config = target_config()
    weights = target_weights(config)
    return Target(config, weights, device=torch.device("cpu"), dtype=dtype), weights


def make_trainer(plan: TrainPlan, store: FeatureStore, rows: list[CorpusRow]) -> Trainer:
    target, weights = toy_target()
    vocab = draft_vocab(plan, rows, VOCAB, (2,))
    low, middle, high = target.aux_layer_ids
    config = head_config(target.config, aux_layer_ids=(low, middle, high), draft_vocab_size=DRAFT)
    head = Eagle3Head(config, vocab)
    init_from_target(head, weights)
    draft_rows = target.lm_head_weight[vocab.target_ids]
    return Trainer(plan, head, target.embed_weight, draft_rows, store, plan.output_dir, silent)


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[TrainPlan, list[CorpusRow], FeatureStore]:
    plan = plan_for(tmp_path)
    rows = make_corpus(plan)
    target, _ = toy_target()
    return plan, rows, build_features(target, rows, tmp_path / "features", "d", silent)


def test_user_turn_prefix_is_what_all_chats_share() -> None:
    """Everything before the first word of the user: the ids 1 and 3."""
    assert user_turn_prefix(ToyTokenizer()) == (1, 3)  # type: ignore[arg-type]


def test_takes_share_spreads_exactly() -> None:
    """Seven of any first ten indices at 0.7."""
    assert sum(takes_share(i, 0.7) for i in range(10)) == 7
    assert sum(takes_share(i, 0.7) for i in range(1000)) == 700


def test_build_corpus_interrupted_continues_to_the_same_rows(tmp_path: Path) -> None:
    """A corpus stopped early with half a line at its end grows into the uninterrupted one."""
    whole_dir, parts_dir = tmp_path / "whole", tmp_path / "parts"
    whole_dir.mkdir()
    parts_dir.mkdir()
    whole = make_corpus(plan_for(whole_dir))
    make_corpus(plan_for(parts_dir, num_tokens=100))
    path = parts_dir / "corpus.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]) + lines[5][:20])

    continued = make_corpus(plan_for(parts_dir))

    assert continued == whole
    assert read_corpus(path) == whole


def test_build_corpus_mixes_sources_and_temperatures(tmp_path: Path) -> None:
    """Self-instructed and template prompts, greedy and sampled answers occur; indices are 0, 1, 2 ..."""
    rows = make_corpus(plan_for(tmp_path))

    assert [row.index for row in rows] == list(range(len(rows)))
    assert {row.source for row in rows} == {"template", "self"}
    assert {row.temperature for row in rows} == {0.0, 0.8}
    assert len({row.category for row in rows if row.source == "template"}) == 8


def test_features_shard_equals_a_direct_pass_of_the_target(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """Cached features and hidden states are those of one sequence run alone, to bf16 precision."""
    _, rows, store = prepared
    target, _ = toy_target()
    row, sample = rows[3], store.sample(3)
    ids = torch.tensor([row.prompt_ids + row.output_ids])

    final, features = target.forward_text(ids, torch.tensor([ids.shape[1]]))

    assert sample.ids.tolist() == ids[0].tolist()
    assert sample.answer_start == len(row.prompt_ids)
    torch.testing.assert_close(sample.features.float(), features[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(sample.final.float(), final[0], rtol=1e-2, atol=1e-2)


def test_features_damaged_shard_is_written_again(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """A shard cut in the middle is replaced; the others are left as they are."""
    plan, rows, store = prepared
    path = plan.output_dir / "features" / "shard-0000.safetensors"
    expected = store.sample(0).features.clone()
    path.unlink()  # the store maps the old file; a cut copy takes its name
    path.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{broken")

    again = build_features(toy_target()[0], rows, plan.output_dir / "features", "d", silent)

    assert torch.equal(again.sample(0).features, expected)


def test_batches_cover_every_sample_once_within_the_budget() -> None:
    """One epoch holds each index once; a batch's padded size stays below the budget."""
    lengths = [3, 50, 8, 8, 21, 30, 4, 4, 60, 10]

    made = batches(lengths, 60, epoch=0, seed=1)

    assert sorted(i for batch in made for i in batch) == list(range(10))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 60 for batch in made)
    assert made == batches(lengths, 60, epoch=0, seed=1)
    assert made != batches(lengths, 60, epoch=1, seed=1)


def test_learning_rate_warms_up_peaks_and_ends_low(tmp_path: Path) -> None:
    """3% of 100 steps rise to lr, the middle is near half, the end near lr · min_lr_ratio."""
    plan = plan_for(tmp_path, lr=1.0, min_lr_ratio=0.0, warmup=0.03)

    assert learning_rate(plan, 0, 100) == pytest.approx(1 / 3)
    assert learning_rate(plan, 3, 100) == pytest.approx(1.0)
    assert learning_rate(plan, 99, 100) < 0.001


def test_trainer_stopped_and_resumed_gives_the_uninterrupted_weights(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """Weights after stop, reload and continuation are bit-equal to those of one run."""
    plan, rows, store = prepared
    whole = make_trainer(plan, store, rows)
    whole.run()
    whole.path.unlink()

    make_trainer(plan, store, rows).run(until=3)
    second = make_trainer(plan, store, rows)
    resumed = second.resume()
    second.run()

    assert resumed
    assert second.step == whole.total_steps > 3
    for name, value in whole.head.state_dict().items():
        assert torch.equal(value, second.head.state_dict()[name]), name


def test_trainer_resume_with_other_settings_is_refused(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """A state written at one learning rate is not continued at another."""
    plan, rows, store = prepared
    make_trainer(plan, store, rows).run(until=1)
    other = plan_for(plan.output_dir, lr=0.123)

    with pytest.raises(StoreError, match="other training settings"):
        make_trainer(other, store, rows).resume()


def test_trainer_interrupt_saves_and_passes_on(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """Ctrl-C between two steps leaves a state that knows how far it came."""
    plan, rows, store = prepared
    trainer = make_trainer(plan, store, rows)
    update = trainer._update

    def interrupted(ids: Sequence[int]) -> list[float]:
        if trainer.step == 2:
            raise KeyboardInterrupt
        return update(ids)

    trainer._update = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run()

    fresh = make_trainer(plan, store, rows)
    assert fresh.resume()
    assert fresh.step == 2


def test_trainer_learns_and_reports_held_out_acceptance(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """The loss on a training batch falls, and the last event carries acceptance by position."""
    plan, rows, store = prepared
    events: list[TrainEvent] = []
    trainer = make_trainer(plan_for(plan.output_dir, epochs=6, lr=3e-3), store, rows)
    trainer.progress = events.append
    batch = collate([store.sample(i) for i in trainer.train_ids[:4]], 2)

    def loss() -> float:
        total, _ = ttt_loss(trainer.head, trainer.embedding, batch, trainer.draft_rows, num_steps=2)
        return float(total.detach())

    before = loss()
    trainer.run()

    assert loss() < before
    assert "conditional" in events[-1].message
    assert events[-1].seconds_left == 0


def test_init_from_target_passes_the_late_feature_and_starts_sane(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """At init fc passes the late feature, lm_head is the target's rows, and the loss is finite."""
    plan, rows, store = prepared
    trainer = make_trainer(plan, store, rows)
    head, weights = trainer.head, toy_target()[1]
    batch = collate([store.sample(i) for i in range(4)], 1)

    loss, _ = ttt_loss(head, trainer.embedding, batch, trainer.draft_rows, num_steps=1)

    assert torch.equal(head.fc.weight[:, 32:], torch.eye(16))
    rows_kept = weights["model.embed_tokens.weight"][head.target_ids]
    assert torch.equal(head.lm_head.weight, rows_kept)
    # uniform over 24 drafts would cost ln 24 = 3.18; random weights may be worse, but not absurd
    assert 0.0 < float(loss.detach()) < 2 * 3.18


def test_export_head_round_trips_through_the_engine_loader(
    tmp_path: Path, prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore]
) -> None:
    """The engine reads every exported tensor back in bf16, the map as absolute ids, the layers as given."""
    plan, rows, store = prepared
    head = make_trainer(plan, store, rows).head
    config = target_config()

    path = export_head(head, tmp_path / "head", config, {"target": "toy"})

    loaded = load_head(path, config)
    for name, parameter in head.named_parameters():
        assert torch.equal(loaded.tensors[name], parameter.detach().to(torch.bfloat16)), name
    assert loaded.draft_to_target is not None
    assert loaded.draft_to_target.tolist() == head.target_ids.tolist()
    assert loaded.config.aux_layer_ids == (2, 4, 5)
    written = json.loads((path / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert written["tie_word_embeddings"] is False
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert written["spectune"] == {"target": "toy"}
