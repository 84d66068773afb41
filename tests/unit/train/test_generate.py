"""Answers of the batched generator against plain decoding of one text, on a toy target."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spectune.engine.kv_cache import SlotView
from spectune.engine.target import Target
from spectune.train.decoder import WideDecoder
from spectune.train.generate import MAX_USER_TOKENS, ChatFrame, Generator, Job, sample_rows
from tests.unit.train.toys import HIDDEN, VOCAB, target_config, target_weights

FRAME = ChatFrame(opening=(1, 3, 7), closing=(4, 9))


def toy_target(dtype: torch.dtype = torch.float32) -> Target:
    config = target_config()
    return Target(config, target_weights(config), device=torch.device("cpu"), dtype=dtype, kernels="plain")


def generator_for(target: Target, *, batch_size: int, max_answer: int = 12, seed: int = 0) -> Generator:
    return Generator(
        target,
        FRAME,
        (2,),
        batch_size=batch_size,
        max_prompt_tokens=20,
        max_answer_tokens=max_answer,
        seed=seed,
    )


def jobs_of(lengths: list[int], **changes: object) -> list[Job]:
    """Chats of these numbers of words, drawn by their index."""
    jobs = []
    for index, length in enumerate(lengths):
        drawn = torch.Generator().manual_seed(index)
        words = torch.randint(5, VOCAB, (length,), generator=drawn).tolist()
        ids = (*FRAME.opening, *words, *FRAME.closing)
        jobs.append(Job(index=index, prompt_ids=ids, temperature=0.0, **changes))  # type: ignore[arg-type]
    return jobs


def greedy(target: Target, prompt: tuple[int, ...], limit: int) -> list[int]:
    """Plain greedy decoding: the whole text is run again for every token."""
    ids = list(prompt)
    while len(ids) - len(prompt) < limit:
        hidden, _ = target.forward_text(torch.tensor([ids]), torch.tensor([len(ids)]))
        ids.append(int(target.logits(hidden[0, -1]).argmax()))
        if ids[-1] == 2:
            break
    return ids[len(prompt) :]


def test_generator_answers_equal_plain_greedy_decoding_in_any_batch() -> None:
    """Seven prompts of different length in three slots: each answer is the text's own."""
    target = toy_target()
    jobs = jobs_of([3, 11, 5, 1, 8, 15, 2])

    answers = generator_for(target, batch_size=3).run(jobs)

    assert [answer.index for answer in answers] == [0, 1, 2, 3, 4, 5, 6]
    for job, answer in zip(jobs, answers, strict=True):
        assert answer.prompt_ids == job.prompt_ids
        assert list(answer.output_ids) == greedy(target, job.prompt_ids, 12)


def test_generator_records_what_a_teacher_forced_pass_computes() -> None:
    """Features, final states and choices along prompt and answer are those of one pass over the text."""
    target = toy_target()
    answer = generator_for(target, batch_size=2).run(jobs_of([4, 9, 6]))[1]
    ids = torch.tensor([[*answer.prompt_ids, *answer.output_ids][:-1]])

    final, features = target.forward_text(ids, torch.tensor([ids.shape[1]]))

    torch.testing.assert_close(answer.activations[:, : 3 * HIDDEN].float(), features[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(answer.activations[:, 3 * HIDDEN :].float(), final[0], rtol=1e-2, atol=1e-2)
    first = len(answer.prompt_ids) - 1
    assert answer.top[first:].tolist() == list(answer.output_ids)


def test_generator_is_a_function_of_seed_and_jobs() -> None:
    """Two runs give the same sampled texts and prompts; another seed gives others."""
    target = toy_target()
    jobs = [
        Job(index=i, prompt_ids=(1, 3, 7, 6, 4, 9), temperature=0.9, writes_prompt=i % 2 == 0)
        for i in range(6)
    ]

    def texts(seed: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        made = generator_for(target, batch_size=4, seed=seed).run(jobs)
        return [(answer.prompt_ids, answer.output_ids) for answer in made]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_generator_groups_late_questions_with_wide_ones_when_answers_are_short() -> None:
    """Answers of two tokens: a closing after a long question of the target's own, beside a prompt that is wide."""
    target = toy_target()
    asked = jobs_of([125, 4, 120, 3, 60, 2])
    jobs = [
        *asked,
        *(replace(job, index=6 + i, writes_prompt=True) for i, job in enumerate(jobs_of([4] * 6))),
    ]
    generator = Generator(
        target, FRAME, (2,), batch_size=12, max_prompt_tokens=130, max_answer_tokens=2, seed=3
    )

    answers = generator.run(jobs)

    for answer in answers:
        assert list(answer.output_ids) == greedy(target, answer.prompt_ids, 2)


def test_generator_own_prompts_stand_inside_the_chat_frame() -> None:
    """A prompt that the target wrote begins with the opening and ends with the closing of a chat."""
    target = toy_target()
    jobs = jobs_of([4] * 8, writes_prompt=True)

    answers = generator_for(target, batch_size=4).run(jobs)

    wrote = [answer for answer in answers if answer.wrote_prompt]
    assert wrote != []
    for answer in wrote:
        assert answer.prompt_ids[:3] == FRAME.opening
        assert answer.prompt_ids[-2:] == FRAME.closing
        assert 2 not in answer.prompt_ids[3:-2]
        assert len(answer.prompt_ids) <= 3 + MAX_USER_TOKENS + 2
        assert list(answer.output_ids) == greedy(target, answer.prompt_ids, 12)


def test_generator_stops_a_loop_early_and_says_so() -> None:
    """A target that can say one token only is cut after a little of its loop."""
    config = target_config()
    weights = target_weights(config)
    for name in weights:
        if name.startswith("model.layers"):
            weights[name] = torch.zeros_like(weights[name])
    embedding = torch.zeros(VOCAB, HIDDEN)
    embedding[:, 0] = 1.0
    embedding[11, 0] = 3.0
    weights["model.embed_tokens.weight"] = embedding
    target = Target(config, weights, device=torch.device("cpu"), dtype=torch.float32, kernels="plain")

    answer = generator_for(target, batch_size=2, max_answer=90).run(jobs_of([3]))[0]

    assert answer.had_loop
    assert set(answer.output_ids) == {11}
    assert len(answer.output_ids) == 24


@pytest.mark.parametrize("share", [0.05, 0.35, 0.65, 0.95])
def test_sample_rows_is_the_inverse_of_the_distribution(share: float) -> None:
    """Masses 0.1, 0.2, 0.3, 0.4: u = 0.05, 0.35, 0.65 and 0.95 fall to tokens 0, 2, 3 and 3."""
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    expected = {0.05: 0, 0.35: 2, 0.65: 3, 0.95: 3}[share]

    assert sample_rows(logits, torch.tensor([1.0]), torch.tensor([share])).tolist() == [expected]


def test_sample_rows_low_temperature_takes_the_mode() -> None:
    """At T = 0.01 the largest mass has it all."""
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()

    assert sample_rows(logits, torch.tensor([0.01]), torch.tensor([0.01])).tolist() == [3]


def test_wide_decoder_equals_the_plain_pass_of_the_target() -> None:
    """Hidden states, features and cache after one token for five ragged rows, to bf16 precision."""
    pytest.importorskip("numba")
    target = toy_target(torch.bfloat16)
    caches = [target.new_cache(5, 16) for _ in range(2)]
    ids = torch.randint(5, VOCAB, (5, 9), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(9).expand(5, -1)
    view = SlotView(range(5), torch.device("cpu"))
    lengths = [9, 3, 7, 1, 5]
    token = torch.tensor([6, 7, 8, 9, 10])
    results: list[tuple[Tensor, Tensor]] = []
    with torch.inference_mode():
        for cache in caches:
            target.forward(ids, positions, cache, view, [0] * 5, None)
        hidden, features = target.forward(
            token[:, None], torch.tensor(lengths)[:, None], caches[0], view, lengths, None
        )
        decoder = WideDecoder(target, caches[1], target_weights(target.config))
        results.append(decoder.forward(token, torch.tensor(lengths)))

    torch.testing.assert_close(results[0][0], hidden[:, 0], rtol=0.1, atol=0.1)
    torch.testing.assert_close(results[0][1], features[:, 0], rtol=0.1, atol=0.1)
    stored = [cache.data[:, :, range(5), :, lengths] for cache in caches]
    torch.testing.assert_close(stored[1], stored[0], rtol=0.1, atol=0.1)
