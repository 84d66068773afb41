"""Training-time test: the unrolled objective that trains a head on its own chain of states.

Index t at unroll step i stands for "real features up to t, then i states of the head's own":
    state       h_t^0 = fc(F_t); h_t^i = output of step i-1 at the same t, before the final norm
    embedding   x_{t+1+i} (ground truth)
    position    t + i
    attends to  step-0 keys of all s <= t, and the keys of steps 1..i at t only
    predicts    x_{t+2+i}; soft target = softmax of the target's logits at t+1+i over the draft vocabulary
which is what drafting does: the prefix with real features, the chain with its own.

Attention of one query at step 2 over T=4 positions (x = seen):
    step-0 keys 0 1 2 3   own step 1   own step 2
    t=2         x x x .        x            x
so each further step adds one score column, never a (T·i)² mask.

B sequences, T padded length, A trained positions (a window per sequence), S steps, H hidden,
V target vocabulary, D draft vocabulary, R rows of the flat target table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectune.train.head import Eagle3Head


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One cached sequence: prompt and answer under teacher forcing.

    ids: int64 [T]; answer_start: index of the first answer token; features: [T, 3H] residual
    streams; final: [T, H] after the target's last norm; top: int64 [T], the target's choice for the
    next token (only from answer_start - 1 on; before it undefined).
    """

    ids: Tensor
    answer_start: int
    features: Tensor
    final: Tensor
    top: Tensor
    is_greedy: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Right-padded samples and the window of positions that are trained.

    ids, top: [B, T]; lengths, starts, window_lengths: [B]; features: [B, T, 3H]; final: [B, T, H].
    Window of row b: positions starts[b] .. starts[b] + window_lengths[b] - 1, padded to A columns.
    """

    ids: Tensor
    top: Tensor
    lengths: Tensor
    starts: Tensor
    answer_starts: Tensor
    window_lengths: Tensor
    features: Tensor
    final: Tensor

    @property
    def positions(self) -> Tensor:
        """Position of every window column. [B, A]"""
        columns = torch.arange(int(self.window_lengths.max()), device=self.starts.device)
        return self.starts[:, None] + columns

    @property
    def num_trained(self) -> int:
        return int(self.window_lengths.sum())


def collate(samples: Sequence[Sample], num_steps: int, device: torch.device | str = "cpu") -> Batch:
    """Pad samples; the window of a sample holds every t that some step has a loss for.

    Step i predicts x_{t+2+i}, so t runs from answer_start - 1 - num_steps (or 0) to length - 3.
    """
    width = max(s.ids.numel() for s in samples)
    starts = [max(0, s.answer_start - 1 - num_steps) for s in samples]

    def padded(rows: list[Tensor]) -> Tensor:
        out = torch.zeros(len(rows), width, *rows[0].shape[1:], dtype=rows[0].dtype)
        for target, row in zip(out, rows, strict=True):
            target[: row.shape[0]] = row
        return out.to(device)

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device)

    return Batch(
        ids=padded([s.ids for s in samples]),
        top=padded([s.top for s in samples]),
        lengths=column([s.ids.numel() for s in samples]),
        starts=column(starts),
        answer_starts=column([s.answer_start for s in samples]),
        window_lengths=column(
            [max(1, s.ids.numel() - 2 - start) for s, start in zip(samples, starts, strict=True)]
        ),
        features=padded([s.features for s in samples]),
        final=padded([s.final for s in samples]),
    )


def loss_mask(batch: Batch, step: int) -> Tensor:
    """True where step i predicts an answer token: answer_start <= t + 2 + i < length. bool [B, A]"""
    predicted = batch.positions + 2 + step
    # a padding column of the window predicts beyond its row, so the length drops it too
    return (predicted >= batch.answer_starts[:, None]) & (predicted < batch.lengths[:, None])


def unroll(
    head: Eagle3Head, embedding: Tensor, batch: Batch, num_steps: int, *, next_ids: Tensor | None = None
) -> Iterator[Tensor]:
    """States a^i of steps 0..num_steps-1 before the final norm, one [B, A, H] at a time.

    embedding: [V, H], frozen. next_ids replaces batch.ids for the tokens read by steps >= 1.
    """
    device = batch.ids.device
    rows = torch.arange(batch.ids.shape[0], device=device)[:, None]
    width = batch.ids.shape[1]
    window = batch.positions.clamp(max=width - 1)  # [B, A]
    tokens = batch.ids if next_ids is None else next_ids

    def token_embedding(offset: int) -> Tensor:
        return embedding[tokens[rows, (batch.positions + 1 + offset).clamp(max=width - 1)]]

    all_positions = torch.arange(width, device=device).expand(batch.ids.shape)
    shifted = torch.cat([batch.ids[:, 1:], batch.ids[:, :1]], dim=1)  # the last column is never attended
    features = batch.features
    if not torch.is_autocast_enabled(device.type):
        features = features.to(head.fc.weight.dtype)
    prefix_state = head.fc(features)  # [B, T, H]
    prefix_pair = head.pair(prefix_state, embedding[shifted])  # [B, T, 2H]
    prefix_keys, prefix_values = head.keys_values(prefix_pair, all_positions)
    unseen = all_positions[:, None, :] > window[:, :, None]  # [B, A, T]

    state, pair = prefix_state[rows, window], prefix_pair[rows, window]
    own: list[tuple[Tensor, Tensor]] = []
    for step in range(num_steps):
        positions = batch.positions + step
        if step > 0:
            pair = head.pair(state, token_embedding(step))
            own.append(head.keys_values(pair, positions))
        attended = attend(head.queries(pair, positions), prefix_keys, prefix_values, unseen, own)
        state = head.finish(state, attended)
        yield state


def attend(
    query: Tensor, keys: Tensor, values: Tensor, unseen: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """softmax([q·K0 + mask | q·k1 | ... | q·ki]) over prefix and own columns.

    query: [B, heads, A, d]; keys, values: [B, kv_heads, T, d]; unseen: bool [B, A, T];
    own: i pairs [B, kv_heads, A, d] -> [B, heads, A, d]
    """
    batch, kv_heads, width, dim = keys.shape
    group = query.shape[1] // kv_heads
    columns = query.shape[2]
    with torch.autocast(query.device.type, enabled=False):
        query = query.reshape(batch, kv_heads, group, columns, dim) * dim**-0.5
        scores = query.flatten(2, 3) @ keys.transpose(2, 3)  # [B, kv_heads, group·A, T]
        scores = scores.view(batch, kv_heads, group, columns, width)
        scores = scores.masked_fill(unseen[:, None, None], float("-inf"))
        diagonal = [(query * key.unsqueeze(2)).sum(-1, keepdim=True) for key, _ in own]
        weights = torch.softmax(torch.cat([scores, *diagonal], dim=-1), dim=-1)
        out = weights[..., :width].flatten(2, 3) @ values
        out = out.view(batch, kv_heads, group, columns, dim)
        for index, (_, value) in enumerate(own):
            out = out + weights[..., width + index, None] * value.unsqueeze(2)
    return out.view(batch, kv_heads * group, columns, dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTable:
    """Soft targets of all window positions and steps, computed once a batch.

    probs: [R, D] softmax of the target's logits over the draft vocabulary; row: int64 [B, A + S - 1],
    the table row of position starts + 1 + column (0 where unused); known: bool [B, A + S - 1], the
    target's own choice there is in the draft vocabulary.
    """

    probs: Tensor
    row: Tensor
    known: Tensor


@torch.no_grad()
def target_table(batch: Batch, draft_rows: Tensor, t2d: Tensor, num_steps: int) -> TargetTable:
    """Soft targets from cached final hidden states. draft_rows: the target's lm_head rows [D, H]"""
    columns = batch.positions.shape[1] + num_steps - 1
    device = batch.ids.device
    # position whose logits are used
    source = batch.starts[:, None] + 1 + torch.arange(columns, device=device)
    # logits at `source` predict x_{source+1}
    used = (source + 1 >= batch.answer_starts[:, None]) & (source + 1 < batch.lengths[:, None])
    source = source.clamp(max=batch.ids.shape[1] - 1)
    rows = torch.arange(batch.ids.shape[0], device=device)[:, None].expand_as(source)
    hidden = batch.final[rows[used], source[used]].to(draft_rows.dtype)  # [R, H]
    probs = torch.softmax(hidden @ draft_rows.T, dim=-1)
    row = torch.zeros_like(source)
    row[used] = torch.arange(hidden.shape[0], device=device)
    return TargetTable(probs=probs, row=row, known=t2d[batch.top[rows, source]])


class SoftCrossEntropy(torch.autograd.Function):
    """Σ_r scale_r · (-Σ_v p_rv log softmax(x_r W^T)_v), gradients made on the way.

    Row chunks bound the [chunk, D] logits and nothing of that size is stored for backward:
    d logits = scale · (softmax - p). One call serves all steps, so W is read in its product type and
    its gradient summed (fp32) once a chunk.
    """

    CHUNK = 1024

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: Tensor, weight: Tensor, probs: Tensor, rows: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x: [R, H], weight: [D, H], probs: [P, D] of which rows [R] are meant, scale: [R]

        Returns the sum and the unscaled cross-entropy of every row [R].
        """
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        products = weight.to(x.dtype)
        entropy = torch.empty(x.shape[0], dtype=wide, device=x.device)
        grad_x = torch.empty_like(x)
        grad_weight: Tensor | None = None
        for low in range(0, x.shape[0], SoftCrossEntropy.CHUNK):
            part = slice(low, low + SoftCrossEntropy.CHUNK)
            wanted = probs[rows[part]]
            log_q = torch.log_softmax(x[part] @ products.T, dim=-1)
            entropy[part] = -torch.linalg.vecdot(wanted, log_q).to(wide)
            grad = log_q.exp_().sub_(wanted).mul_(scale[part, None].to(x.dtype))
            grad_x[part] = grad @ products
            share = (grad.T @ x[part]).to(wide)
            grad_weight = share if grad_weight is None else grad_weight.add_(share)
        if grad_weight is None:
            grad_weight = torch.zeros(weight.shape, dtype=wide, device=x.device)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.mark_non_differentiable(entropy)
        return (entropy * scale.to(wide)).sum(), entropy

    @staticmethod
    def backward(ctx, grad_output: Tensor, _: Tensor):  # type: ignore[no-untyped-def]
        grad_x, grad_weight = ctx.saved_tensors
        if float(grad_output) != 1.0:
            grad_x, grad_weight = grad_x * grad_output.to(grad_x.dtype), grad_weight * grad_output
        return grad_x, grad_weight, None, None, None


def ttt_loss(
    head: Eagle3Head,
    embedding: Tensor,
    batch: Batch,
    draft_rows: Tensor,
    *,
    num_steps: int,
    decay: float = 0.8,
) -> tuple[Tensor, list[float]]:
    """Σ_i decay^i · loss_i, and the single losses.

    loss_i is the mean over the answer tokens that step i predicts; a token whose target choice lies
    outside the draft vocabulary counts as zero loss.
    """
    table = target_table(batch, draft_rows, head.t2d, num_steps)
    width = batch.positions.shape[1]
    states, rows, counts, means = [], [], [], []
    for step, state in enumerate(unroll(head, embedding, batch, num_steps)):
        inside = loss_mask(batch, step)
        chosen = inside & table.known[:, step : step + width]
        rows.append(table.row[:, step : step + width][chosen])
        states.append(state[chosen])
        counts.append(rows[-1].numel())
        means.append(1.0 / max(1, int(inside.sum())))
    weights = torch.tensor([mean * decay**step for step, mean in enumerate(means)], dtype=torch.float64)
    scale = torch.repeat_interleave(weights, torch.tensor(counts)).to(batch.ids.device)
    normed = head.norm(torch.cat(states)).to(table.probs.dtype)
    total, entropy = SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        normed, head.lm_head.weight, table.probs, torch.cat(rows), scale
    )
    parts = entropy.split(counts)
    return total, [float(part.sum()) * mean for part, mean in zip(parts, means, strict=True)]
