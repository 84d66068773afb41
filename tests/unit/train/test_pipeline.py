"""Stages on a toy target: corpus, features, training, export, each stopped and continued."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from spectune.draft.checkpoint import load_head
from spectune.engine.target import Target
from spectune.errors import CheckpointError, RunError, StoreError, UsageError
from spectune.records import Prompt
from spectune.train import features
from spectune.train.corpus import (
    CorpusRow,
    build_corpus,
    chat_frame,
    chunk_jobs,
    chunk_size,
    read_corpus,
    size_to_come,
    training_rows,
)
from spectune.train.export import export_head
from spectune.train.features import (
    FeatureStore,
    announce_size,
    build_features,
    record_shard,
    shard_path,
)
from spectune.train.generate import Answer, ChatFrame, Job
from spectune.train.head import Eagle3Head, head_config, init_from_head, init_from_target
from spectune.train.optimizer import learning_rate
from spectune.train.pipeline import check_vocabulary, data_digest, draft_vocab
from spectune.train.plan import TrainEvent, TrainPlan, silent
from spectune.train.prompts import own_prompts
from spectune.train.trainer import Trainer, batches, split
from spectune.train.ttt import collate, ttt_loss
from tests.unit.train.toys import DRAFT, HIDDEN, VOCAB, target_config, target_weights


class ToyTokenizer:
    """One id per character; a chat is 1, 3, the words, 4."""

    eos_ids = (2,)
    template_digest = "toy"

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [1, 3, *(5 + ord(c) % 30 for c in messages[0]["content"]), 4]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"w{i}" for i in ids if i != 2)


def answer(jobs: Sequence[Job], live: Callable[[int, int], None]) -> list[Answer]:
    """Answers that depend on the job only, 10 tokens and the end of text."""
    live(0, 0)
    answers = []
    for job in jobs:
        generator = torch.Generator().manual_seed(job.index)
        prompt = (1, 3, *torch.randint(5, VOCAB, (6,), generator=generator).tolist(), 4)
        prompt = prompt if job.writes_prompt else job.prompt_ids
        output = (*torch.randint(5, VOCAB, (10,), generator=generator).tolist(), 2)
        count = len(prompt) + len(output) - 1
        answers.append(
            Answer(
                index=job.index,
                prompt_ids=prompt,
                output_ids=output,
                wrote_prompt=job.writes_prompt,
                had_loop=False,
                activations=torch.randn(count, 4 * HIDDEN, generator=generator).bfloat16(),
                top=torch.tensor([*prompt, *output][1:], dtype=torch.int32),
            )
        )
    return answers


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
    path = plan.output_dir / "corpus.jsonl"
    return build_corpus(plan, path, ToyTokenizer(), answer, silent)  # type: ignore[arg-type]


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
    return (
        plan,
        rows,
        build_features(target, rows, tmp_path / "features", "d", silent, rows_per_shard=chunk_size(plan)),
    )


def test_chat_frame_is_what_stands_around_the_words_of_all_chats() -> None:
    """1 and 3 before the user's first word, 4 after the last."""
    assert chat_frame(ToyTokenizer()) == ChatFrame(opening=(1, 3), closing=(4,))  # type: ignore[arg-type]


def test_chat_frame_without_a_template_is_refused() -> None:
    """A target that cannot chat is named before anything is generated."""
    tokenizer = ToyTokenizer()
    tokenizer.template_digest = None  # type: ignore[assignment]

    with pytest.raises(CheckpointError, match="no chat template"):
        chat_frame(tokenizer)  # type: ignore[arg-type]


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
    assert len({row.category for row in rows if row.source == "template"}) > 8


def test_corpus_asks_the_users_prompts_first_and_each_once(tmp_path: Path) -> None:
    """Of 20 prompts every one is asked in the first 20 rows, none is replaced by one the target writes."""
    asked = [Prompt(prompt_id=f"p{i}", category="mine", turns=(f"my question {i}",)) for i in range(20)]
    plan = plan_for(tmp_path, self_share=1.0)
    path = tmp_path / "corpus.jsonl"

    rows = build_corpus(
        plan,
        path,
        ToyTokenizer(),
        answer,
        silent,
        own=own_prompts(asked, seed=0),  # type: ignore[arg-type]
    )

    assert sorted(row.prompt for row in rows[:20]) == sorted(prompt.turns[0] for prompt in asked)
    assert {row.source for row in rows[:20]} == {"user"}
    assert {row.category for row in rows[:20]} == {"mine"}
    assert {row.source for row in rows[20:]} == {"self"}
    assert [row.prompt for row in rows[:20]] != [prompt.turns[0] for prompt in asked]  # shuffled


def test_corpus_asks_the_whole_conversation_of_a_users_prompt(tmp_path: Path) -> None:
    """System message, turns and answers so far reach the target; overlap is judged on what the user said."""
    prompt = Prompt(
        prompt_id="p", category="mine", system="be brief", turns=("first", "second", "third"), answers=("ok",)
    )
    said: list[Sequence[dict[str, str]]] = []

    class Listening(ToyTokenizer):
        def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
            said.append(messages)
            return super().encode_chat(messages)

    own = own_prompts([prompt], seed=0)
    chunk_jobs(plan_for(tmp_path), 0, Listening(), own)  # type: ignore[arg-type]

    assert [(m["role"], m["content"]) for m in said[0]] == [
        ("system", "be brief"), ("user", "first"), ("assistant", "ok"), ("user", "second"),
    ]  # fmt: skip
    assert own[0].text == "first\nsecond"


def test_corpus_says_what_it_will_take_on_disk_before_it_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6.55 GB to come are told, nothing to come is not; with 1 MB free they are refused."""
    events: list[TrainEvent] = []

    announce_size(6_550_000_000, tmp_path, events.append)
    announce_size(0, tmp_path, events.append)

    assert [event.message for event in events] == [f"about 6.55 GB of features to come in {tmp_path}"]
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StoreError, match=r"take about 6\.5 GB .* where 0\.0 GB are free"):
        announce_size(6_550_000_000, tmp_path, events.append)


def test_corpus_size_to_come_counts_whole_chunks_and_the_users_long_prompts(tmp_path: Path) -> None:
    """16 rows a chunk: one answer token asked for costs a chunk; 5 own prompts of 400 tokens, cut at 24."""
    plan = plan_for(tmp_path, num_tokens=1)  # chunks of 4 x 4 rows

    assert size_to_come(plan, []) == 16 * 161 + 16 * 67
    assert size_to_come(plan, [], own_tokens=[400] * 5) == 16 * 161 + 5 * 24 + 11 * 67
    made = make_corpus(plan_for(tmp_path, num_tokens=100))
    assert size_to_come(plan_for(tmp_path, num_tokens=100), made) == 0


def test_corpus_that_holds_more_gives_the_rows_of_a_smaller_one(tmp_path: Path) -> None:
    """A file grown to 600 tokens, asked for 100: the rows that a corpus of 100 has, the file as it was."""
    small_dir, large_dir = tmp_path / "small", tmp_path / "large"
    small_dir.mkdir()
    large_dir.mkdir()
    small = make_corpus(plan_for(small_dir, num_tokens=100))
    large = make_corpus(plan_for(large_dir))
    before = (large_dir / "corpus.jsonl").read_bytes()

    again = make_corpus(plan_for(large_dir, num_tokens=100))

    assert len(small) < len(large)
    assert again == small
    assert (large_dir / "corpus.jsonl").read_bytes() == before


def test_corpus_reads_back_prompts_with_line_breaks_of_unicode(tmp_path: Path) -> None:
    """U+2028, U+2029 and U+0085 inside a prompt do not end a line of the file."""
    plan = plan_for(tmp_path)
    text = "one\u2028two\u2029three\u0085four"
    own = own_prompts([Prompt(prompt_id="p", category="mine", turns=(text,))], seed=0)
    path = tmp_path / "corpus.jsonl"

    rows = build_corpus(plan, path, ToyTokenizer(), answer, silent, own=own)  # type: ignore[arg-type]

    assert rows[0].prompt == text
    assert read_corpus(path) == rows


def test_trainer_state_of_other_rows_is_refused(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """A checkpoint of one set of rows is not continued with another, whose draft vocabulary may differ."""
    plan, rows, store = prepared
    vocab = draft_vocab(plan, rows, VOCAB, (2,))
    first, other = make_trainer(plan, store, rows), make_trainer(plan, store, rows)
    first._data_digest, other._data_digest = data_digest(rows, vocab), data_digest(rows[:-1], vocab)
    first.run(until=1)

    assert first.resume()
    with pytest.raises(StoreError, match="other rows or another draft vocabulary"):
        other.resume()


def test_trainer_keeps_its_curve_and_cuts_it_where_it_goes_on(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """A line at the last step with losses by unrolled step and what was held out; none twice after a resume."""
    base, rows, store = prepared
    plan = plan_for(base.output_dir, checkpoint_every=2)
    trainer = make_trainer(plan, store, rows)
    trainer.run()
    lines = [json.loads(line) for line in trainer.curve.read_text().splitlines()]

    assert lines[-1]["step"] == trainer.total_steps
    assert len(lines[-1]["losses"]) == plan.ttt_steps
    assert lines[-1]["held_out"]["acceptance_length"] >= 1.0
    with trainer.curve.open("a") as file:
        file.write(json.dumps({"step": trainer.total_steps + 1}) + "\n")
    assert make_trainer(plan, store, rows).resume()
    assert [json.loads(line)["step"] for line in trainer.curve.read_text().splitlines()] == [
        line["step"] for line in lines
    ]


def test_trainer_interrupted_inside_an_update_keeps_the_last_checkpoint(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """Ctrl-C while the optimiser writes weights: half an update is not saved, the run ends as if unbroken."""
    base, rows, store = prepared
    plan = plan_for(base.output_dir, checkpoint_every=2)
    whole = make_trainer(plan, store, rows)
    whole.run()
    whole.path.unlink()
    victim = make_trainer(plan, store, rows)
    apply = victim.optimizer.step

    def interrupted(lr: float) -> None:
        apply(lr)
        if victim.step == 3:
            raise KeyboardInterrupt

    victim.optimizer.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        victim.run()

    again = make_trainer(plan, store, rows)
    assert again.resume()
    assert again.step == 2
    again.run()
    for name, value in whole.head.state_dict().items():
        assert torch.equal(value, again.head.state_dict()[name]), name


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
    path = shard_path(plan.output_dir / "features", 0)
    expected = store.sample(0).features.clone()
    path.unlink()  # the store maps the old file; a cut copy takes its name
    path.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{broken")

    again = build_features(
        toy_target()[0], rows, plan.output_dir / "features", "d", silent, rows_per_shard=chunk_size(plan)
    )

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


def test_export_to_a_full_disk_is_told_and_keeps_the_trained_weights(
    tmp_path: Path,
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The writer fails as on a full disk: what to do is said, no partial file stays, the state is untouched."""
    plan, rows, store = prepared
    trainer = make_trainer(plan, store, rows)
    trainer.run(until=1)
    before = trainer.path.read_bytes()

    def fail(tensors: object, path: Path, **more: object) -> None:
        path.write_bytes(b"half")
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)

    with pytest.raises(StoreError, match="head cannot be written: No space left") as refused:
        export_head(trainer.head, tmp_path / "head", target_config(), {})

    assert "--resume" in (refused.value.hint or "")
    assert list((tmp_path / "head").iterdir()) == []
    assert trainer.path.read_bytes() == before


def test_features_recorded_shard_gives_back_what_decoding_computed(tmp_path: Path) -> None:
    """Activations and choices of an answer lie where its row is; the last token, never fed, is zero."""
    plan = plan_for(tmp_path)
    kept: list[Answer] = []

    def save(chunk: int, rows: Sequence[CorpusRow], answers: list[Answer]) -> None:
        kept.extend(answers)
        record_shard(tmp_path / "features", chunk, rows, answers, "d")

    path = tmp_path / "corpus.jsonl"
    rows = build_corpus(plan, path, ToyTokenizer(), answer, silent, save)  # type: ignore[arg-type]
    store = build_features(
        toy_target()[0], rows, tmp_path / "features", "d", silent, rows_per_shard=chunk_size(plan)
    )

    assert len(store) == len(rows) > chunk_size(plan)
    last = len(rows) - 1
    sample, given = store.sample(last), kept[last]
    assert sample.ids.tolist() == [*given.prompt_ids, *given.output_ids]
    assert torch.equal(sample.features[:-1], given.activations[:, : 3 * HIDDEN])
    assert torch.equal(sample.final[:-1], given.activations[:, 3 * HIDDEN :])
    assert sample.top[:-1].tolist() == given.top.tolist()
    assert float(sample.features[-1].abs().sum()) == 0.0


def test_features_without_room_on_the_disk_are_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk with 1 MB left: the message says what is free and needed, and no partial file stays."""
    plan = plan_for(tmp_path)
    rows = make_corpus(plan)
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: usage)

    with pytest.raises(StoreError, match="GB free"):
        build_features(
            toy_target()[0], rows, tmp_path / "features", "d", silent, rows_per_shard=chunk_size(plan)
        )

    assert [p.name for p in (tmp_path / "features").iterdir()] == []


def test_training_rows_drop_repeated_questions_and_copies_of_measured_prompts(tmp_path: Path) -> None:
    """The same question at the same temperature is learnt once; a copied prompt not at all."""
    row = make_corpus(plan_for(tmp_path))[0]
    same = replace(row, index=1)
    instructed = replace(
        row, index=5, prompt_ids=(9, *row.prompt_ids)
    )  # the same words, another system message
    hotter = replace(row, index=2, temperature=0.5)
    copied = replace(row, index=3, prompt="please tell us one two three four five now", prompt_ids=(1, 2))
    short = replace(row, index=6, prompt="Who is he?", prompt_ids=(3, 4))
    empty = replace(row, index=4, prompt="another", output_ids=(2,))

    rows = [row, same, hotter, copied, empty, instructed, short]
    kept = training_rows(rows, ["say one two three four five again", "who is he"], overlap=5)

    assert [r.index for r in kept] == [0, 2, 5]


def test_trainer_two_runs_write_the_same_bytes(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """One plan, one seed: the checkpoint files of two runs are equal byte by byte, with either optimiser."""
    base, rows, store = prepared
    for optimizer in ("adamw", "muon"):
        plan = plan_for(base.output_dir, optimizer=optimizer)
        written = []
        for _ in range(2):
            trainer = make_trainer(plan, store, rows)
            trainer.run()
            written.append(trainer.path.read_bytes())
            trainer.path.unlink()

        assert written[0] == written[1], optimizer


def test_trainer_muon_stopped_and_resumed_gives_the_uninterrupted_weights(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """Momentum matrices and Adam moments both come back from the file."""
    base, rows, store = prepared
    plan = plan_for(base.output_dir, optimizer="muon")
    whole = make_trainer(plan, store, rows)
    whole.run()
    whole.path.unlink()

    make_trainer(plan, store, rows).run(until=2)
    second = make_trainer(plan, store, rows)
    assert second.resume()
    second.run()

    for name, value in whole.head.state_dict().items():
        assert torch.equal(value, second.head.state_dict()[name]), name


def test_trainer_nan_stops_with_the_batch_and_the_weights_before_it(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """A weight that becomes NaN stops the run; the rows of the batch and the step are on disk."""
    plan, rows, store = prepared
    trainer = make_trainer(plan, store, rows)
    trainer.run(until=2)
    with torch.no_grad():
        trainer.head.fc.weight[0, 0] = float("nan")

    with pytest.raises(RunError, match="step 2: the gradient is nan"):
        trainer.run()

    saved = torch.load(plan.output_dir / "bad-batch.pt", weights_only=True)
    batch = list(trainer._schedule())[2]
    assert saved["step"] == 2
    assert saved["corpus_indices"] == [store.corpus_index(i) for i in batch]
    assert [one["ids"].tolist() for one in saved["samples"]] == [store.sample(i).ids.tolist() for i in batch]
    assert torch.load(trainer.path, weights_only=True)["step"] == 2


def test_trainer_without_answers_says_so(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """A corpus of which nothing is left to train on is an error, not an empty head."""
    plan, rows, store = prepared
    trainer = make_trainer(plan, store, rows)
    trainer.train_ids = []

    with pytest.raises(RunError, match="no answer to train on"):
        trainer.run()


def test_trainer_damaged_state_is_named(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """A state file cut in the middle is a clear error with what to do."""
    plan, rows, store = prepared
    trainer = make_trainer(plan, store, rows)
    trainer.path.write_bytes(b"PK half a file")

    with pytest.raises(StoreError, match="cannot be read"):
        trainer.resume()


def test_init_from_head_takes_the_layer_and_the_shared_output_rows(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """Rows of shared tokens come from the other head, wherever they stand there; the rest stays."""
    plan, rows, store = prepared
    head = make_trainer(plan, store, rows).head
    before = head.lm_head.weight.detach().clone()
    generator = torch.Generator().manual_seed(3)
    other = {name: torch.randn(p.shape, generator=generator) for name, p in head.named_parameters()}
    ids = head.target_ids.flip(0)[:4]  # four shared tokens, in another order

    shared = init_from_head(head, other, ids)

    assert shared == 4
    assert torch.equal(head.fc.weight, other["fc.weight"])
    assert torch.equal(head.lm_head.weight[-1], other["lm_head.weight"][0])
    assert torch.equal(head.lm_head.weight[-4], other["lm_head.weight"][3])
    assert torch.equal(head.lm_head.weight[:-4], before[:-4])


def test_trainer_learns_only_the_rows_that_are_kept(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """Rows that were dropped as copies are neither trained on nor held out."""
    _, rows, store = prepared
    kept = frozenset(row.index for row in rows[::2])

    train, held = split(store, 8, kept)

    assert {store.corpus_index(i) for i in (*train, *held)} == kept
    assert held != []


def test_corpus_with_ids_beyond_the_target_is_refused(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """A corpus of another vocabulary is named with the offending token."""
    plan, rows, _ = prepared
    strange = replace(rows[0], output_ids=(*rows[0].output_ids, 99))

    with pytest.raises(StoreError, match="token 99, the target has 40"):
        check_vocabulary([strange], VOCAB, plan.output_dir)


def test_trainer_corpus_share_takes_the_first_rows_and_the_same_held_out_ones(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """Half of the corpus is its first half; what is held out does not change with the size."""
    plan, rows, store = prepared
    whole = make_trainer(plan, store, rows)
    half = make_trainer(plan_for(plan.output_dir, corpus_share=0.5), store, rows)

    assert half.train_ids == whole.train_ids[: -(-len(whole.train_ids) // 2)]
    assert half.held == whole.held
    with pytest.raises(UsageError, match="corpus-share"):
        plan_for(plan.output_dir, corpus_share=0.0)


def test_trainer_corpus_skip_takes_the_rows_after_those_that_are_learnt(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """Two legs of a corpus share no row and leave none out; the second leg's state is not the first one's."""
    plan, rows, store = prepared
    whole = make_trainer(plan, store, rows)
    first = make_trainer(plan_for(plan.output_dir, corpus_share=0.5), store, rows)
    second = make_trainer(plan_for(plan.output_dir, corpus_skip=0.5), store, rows)

    assert first.train_ids + second.train_ids == whole.train_ids
    assert second.held == whole.held
    first.run()
    with pytest.raises(StoreError):
        second.resume()
    with pytest.raises(UsageError, match=r"corpus-skip 0\.5 is not within 0\.\.0\.5"):
        plan_for(plan.output_dir, corpus_share=0.5, corpus_skip=0.5)
    with pytest.raises(UsageError, match=f"none of {len(whole.train_ids)} rows"):
        make_trainer(plan_for(plan.output_dir, corpus_skip=0.9999), store, rows)


def test_trainer_killed_between_checkpoints_ends_with_the_same_weights(
    prepared: tuple[TrainPlan, list[CorpusRow], FeatureStore],
) -> None:
    """A run that dies at step 3 without a word goes on from the checkpoint of step 2, to the same end."""
    base, rows, store = prepared
    plan = plan_for(base.output_dir, checkpoint_every=2)
    whole = make_trainer(plan, store, rows)
    whole.run()
    whole.path.unlink()
    victim = make_trainer(plan, store, rows)
    update = victim._update

    def dying(ids: Sequence[int]) -> list[float]:
        if victim.step == 3:
            raise SystemExit("killed")
        return update(ids)

    victim._update = dying  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        victim.run()

    again = make_trainer(plan, store, rows)
    assert again.resume()
    assert again.step == 2
    again.run()

    assert again.num_tokens == whole.num_tokens
    for name, value in whole.head.state_dict().items():
        assert torch.equal(value, again.head.state_dict()[name]), name
