from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spectune.train.evaluate import Round, evaluate, rounds_by_hops
from spectune.train.head import Eagle3Head
from spectune.train.ttt import Sample, SoftCrossEntropy, collate, loss_mask, target_table, ttt_loss, unroll
from tests.unit.train.toys import toy_embedding, toy_head, toy_sample


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-5) * weight


def _rotate(x: Tensor, position: int) -> Tensor:
    """RoPE of one head vector, angle by angle."""
    half = x.numel() // 2
    first, second = [], []
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / x.numel())
        c, s = math.cos(angle), math.sin(angle)
        first.append(x[i] * c - x[i + half] * s)
        second.append(x[i + half] * c + x[i] * s)
    return torch.stack(first + second)


class IncrementalDrafter:
    """Drafts token by token with a key-value cache, as an engine does; one position at a time."""

    def __init__(self, head: Eagle3Head, embedding: Tensor, *, trains: bool = False) -> None:
        self.w = {name: p if trains else p.detach() for name, p in head.named_parameters()}
        self.embedding = embedding
        self.cache: list[tuple[Tensor, Tensor]] = []

    def step(self, state: Tensor, token: int, position: int) -> Tensor:
        """Append one (state, token) pair to the cache and return the layer's output for it."""
        w = self.w
        pair = torch.cat(
            [
                _rms(self.embedding[token], w["midlayer.input_layernorm.weight"]),
                _rms(state, w["midlayer.hidden_norm.weight"]),
            ]
        )
        q = (w["midlayer.self_attn.q_proj.weight"] @ pair).view(4, 4)
        k = (w["midlayer.self_attn.k_proj.weight"] @ pair).view(2, 4)
        v = (w["midlayer.self_attn.v_proj.weight"] @ pair).view(2, 4)
        self.cache.append((torch.stack([_rotate(row, position) for row in k]), v))
        heads = []
        for h in range(4):
            scores = torch.stack([_rotate(q[h], position) @ key[h // 2] / 2.0 for key, _ in self.cache])
            p = scores.softmax(0)
            heads.append(sum(p[i] * value[h // 2] for i, (_, value) in enumerate(self.cache)))
        mixed = state + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        x = _rms(mixed, w["midlayer.post_attention_layernorm.weight"])
        gate, up = w["midlayer.mlp.gate_proj.weight"] @ x, w["midlayer.mlp.up_proj.weight"] @ x
        return mixed + w["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)


def test_unroll_every_position_equals_incremental_drafting() -> None:
    """Index t at step i is what an engine computes after real features up to t and i own states."""
    head, embedding, num_steps = toy_head(), toy_embedding(), 4
    samples = [toy_sample(11, 4, seed=1), toy_sample(8, 3, seed=2)]
    batch = collate(samples, num_steps)

    states = [state.detach() for state in unroll(head, embedding, batch, num_steps)]

    worst = 0.0
    for row, sample in enumerate(samples):
        for t in range(int(batch.starts[row]), sample.ids.numel() - 1 - num_steps):
            drafter = IncrementalDrafter(head, embedding)
            for s in range(t + 1):
                real = head.fc.weight.detach() @ sample.features[s]
                state = drafter.step(real, int(sample.ids[s + 1]), s)
            for i in range(num_steps):
                if i > 0:
                    state = drafter.step(state, int(sample.ids[t + 1 + i]), t + i)
                ours = states[i][row, t - int(batch.starts[row])]
                worst = max(worst, float((ours - state).abs().max()))
    assert worst < 1e-9


def test_loss_mask_toy_sequence_marks_predicted_answer_tokens() -> None:
    """Step i trains t when x_{t+2+i} is an answer token: 6 tokens, the answer is x_3, x_4, x_5."""
    batch = collate([toy_sample(6, 3)], num_steps=3)

    marked = [
        [int(p) for p, m in zip(batch.positions[0], loss_mask(batch, i)[0], strict=True) if m]
        for i in range(3)
    ]

    # x_{t+2} in 3..5 -> t = 1..3; x_{t+3} -> t = 0..2; x_{t+4} -> t = 0..1 (t = -1 does not exist)
    assert marked == [[1, 2, 3], [0, 1, 2], [0, 1]]


def test_target_table_row_holds_logits_of_the_position_before_the_predicted_token() -> None:
    """The soft target for x_{t+2+i} comes from the hidden state at t+1+i, over draft ids only."""
    head, sample = toy_head(), toy_sample(7, 3)
    draft_rows = toy_embedding()[head.target_ids]
    batch = collate([sample], num_steps=2)

    table = target_table(batch, draft_rows, head.t2d, 2)

    start = int(batch.starts[0])
    t, i = 2, 1  # predicts x_5 from the hidden state at 4
    row = int(table.row[0, t - start + i])
    logits = torch.tensor([float(draft_rows[d] @ sample.final[4]) for d in range(24)]).double()
    torch.testing.assert_close(table.probs[row], logits.exp() / logits.exp().sum())
    assert bool(table.known[0, t - start + i]) == bool(head.t2d[sample.ids[5]])


def test_ttt_loss_padding_does_not_change_a_sample() -> None:
    """A short sample gives the same loss alone and beside a longer one without any loss of its own."""
    head, embedding = toy_head(), toy_embedding()
    rows = embedding[head.target_ids]
    short, long = toy_sample(7, 3, seed=1), toy_sample(12, 12, seed=2)

    alone, _ = ttt_loss(head, embedding, collate([short], 3), rows, num_steps=3)
    beside, _ = ttt_loss(head, embedding, collate([short, long], 3), rows, num_steps=3)

    assert float(beside.detach()) == pytest.approx(float(alone.detach()), abs=1e-12)


def test_ttt_loss_one_step_equals_sum_over_positions() -> None:
    """The loss is the mean cross-entropy per predicted answer token, unknown choices counting zero."""
    head, embedding, sample = toy_head(), toy_embedding(), toy_sample(9, 4)
    rows = embedding[head.target_ids]

    loss, _ = ttt_loss(head, embedding, collate([sample], 1), rows, num_steps=1)

    state = next(unroll(head, embedding, collate([sample], 1), 1))[0].detach()
    start, total, count = int(collate([sample], 1).starts[0]), 0.0, 0
    for predicted in range(4, 9):
        count += 1
        if not bool(head.t2d[sample.ids[predicted]]):
            continue
        p = (rows @ sample.final[predicted - 1]).softmax(0)
        a = _rms(state[predicted - 2 - start], head.norm.weight.detach())
        q = (head.lm_head.weight.detach() @ a).softmax(0)
        total -= float((p * q.log()).sum())
    assert float(loss.detach()) == pytest.approx(total / count, rel=1e-6)


def test_ttt_loss_embedding_and_targets_get_no_gradient() -> None:
    """Only the head is trained; every one of its weights is reached by the loss."""
    head, embedding = toy_head(), toy_embedding()
    loss, _ = ttt_loss(
        head, embedding, collate([toy_sample(9, 3)], 2), embedding[head.target_ids], num_steps=2
    )

    loss.backward()

    silent = [n for n, p in head.named_parameters() if p.grad is None or float(p.grad.abs().sum()) == 0]
    assert silent == []
    assert embedding.grad is None


def test_soft_cross_entropy_gradients_match_finite_differences() -> None:
    """The hand-written gradients of rows and weights agree with numerical ones."""
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    probs = torch.randn(4, 6, dtype=torch.float64).softmax(-1)
    rows = torch.tensor([3, 0, 1, 1, 2])
    scale = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0], dtype=torch.float64)

    assert torch.autograd.gradcheck(
        lambda a, b: SoftCrossEntropy.apply(a, b, probs, rows, scale)[0], (x, weight), eps=1e-6, atol=1e-6
    )


def test_ttt_loss_gradients_equal_those_of_incremental_drafting() -> None:
    """Loss and gradients of the unrolled objective are those of drafting step by step, to 1e-9.

    The reference drafts from every position with a key-value cache, sums 0.8^i times the soft
    cross-entropy over the draft vocabulary of answer tokens whose target choice is in it, and divides
    step i by the number of answer tokens that it predicts.
    """
    head, embedding, num_steps = toy_head(), toy_embedding(), 3
    samples = [toy_sample(10, 4, seed=1), toy_sample(7, 3, seed=2)]
    draft_rows = embedding[head.target_ids]
    loss, losses = ttt_loss(head, embedding, collate(samples, num_steps), draft_rows, num_steps=num_steps)
    loss.backward()
    ours = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()

    sums = [torch.zeros((), dtype=torch.float64) for _ in range(num_steps)]
    counts = [0] * num_steps
    for sample in samples:
        length = sample.ids.numel()
        for t in range(length - 2):
            drafter = IncrementalDrafter(head, embedding, trains=True)
            for s in range(t + 1):
                state = drafter.step(head.fc.weight @ sample.features[s], int(sample.ids[s + 1]), s)
            for i in range(num_steps):
                predicted = t + 2 + i
                if predicted >= length:
                    break
                if i > 0:
                    state = drafter.step(state, int(sample.ids[t + 1 + i]), t + i)
                if predicted < sample.answer_start:
                    continue
                counts[i] += 1
                if bool(head.t2d[sample.top[predicted - 1]]):
                    p = (draft_rows @ sample.final[predicted - 1]).softmax(0)
                    q = head.lm_head.weight @ _rms(state, head.norm.weight)
                    sums[i] = sums[i] - (p * q.log_softmax(0)).sum()
    reference = sum(0.8**i * total / count for i, (total, count) in enumerate(zip(sums, counts, strict=True)))
    assert isinstance(reference, Tensor)
    reference.backward()

    assert float(loss.detach()) == pytest.approx(float(reference.detach()), abs=1e-9)
    assert losses == pytest.approx(
        [float(total.detach()) / count for total, count in zip(sums, counts, strict=True)], abs=1e-9
    )
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert float((ours[name] - parameter.grad).abs().max()) < 1e-9, name


def test_rounds_by_hops_skip_what_a_round_emitted() -> None:
    """Rounds start after the previous round's tokens: accepted 2, then root 3 with 0, then root 4."""
    matches = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1], [1, 0, 0]]).bool()

    assert rounds_by_hops(matches) == [Round(0, 2), Round(3, 0), Round(4, 1)]


def test_evaluate_head_that_knows_the_next_token_reaches_full_acceptance() -> None:
    """A text of one repeated token and a head biased to it: every draft inside the text is accepted."""
    head = toy_head()
    token = int(head.target_ids[5])
    with torch.no_grad():
        for parameter in head.midlayer.parameters():
            parameter.zero_()
        head.fc.weight.copy_(torch.cat([torch.eye(16), torch.zeros(16, 32)], 1))
        head.lm_head.weight.zero_()
        head.lm_head.weight[5] = 1.0
    sample = Sample(
        ids=torch.full((14,), token),
        answer_start=4,
        features=torch.ones(14, 48, dtype=torch.float64),
        final=torch.ones(14, 16, dtype=torch.float64),
        top=torch.full((14,), token),
    )

    result = evaluate(head, toy_embedding(), [sample], depth=3, dtype=torch.float64)

    # answer tokens predicted: x_5 .. x_13 after the prefill gave x_4; rounds of 3 + 1 tokens
    assert result.survival == (1.0, 1.0, 1.0)
    assert result.conditional == (1.0, 1.0, 1.0)
    assert 3.3 < result.acceptance_length <= 4.0
