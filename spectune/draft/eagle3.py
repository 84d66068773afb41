"""The EAGLE-3 drafter: one decoder layer over fused target features, dynamic trees, batched.

Pair t joins the feature of token x_t with the embedding of x_{t+1} and predicts x_{t+2}. The state
of a slot grows only by pairs with real target features (`start`, `commit`); what a draft wrote on
its way lies past the slot's length and is overwritten (arXiv 2503.01840; trees: arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from spectune.draft.checkpoint import Head
from spectune.engine.attention import additive_mask, grouped_attention, visible_columns
from spectune.engine.kv_cache import Cache, KVCache, SlotView
from spectune.engine.linear import Linear
from spectune.engine.rope import Rope
from spectune.engine.sampling import RowSampling, gumbel
from spectune.engine.target import Target
from spectune.engine.tree import DraftPool, DraftTree, rerank
from spectune.engine.uploads import on_device
from spectune.errors import InfeasibleConfig
from spectune.records import SpecConfig, chain_or_tree_pool

if TYPE_CHECKING:
    from spectune.engine.cpu.draft_twin import DraftTwin

_DRAFT_STREAM = 0x2545F4914F6CDD1D


class Eagle3Drafter:
    """Drafts with an EAGLE-3 head for one target."""

    needs_features = True
    pure_in_prefix = True

    def __init__(self, head: Head, target: Target) -> None:
        config, device, dtype = head.config, target.device, target.dtype
        self.config, self._device, self._dtype = config, device, dtype
        self.max_context: int | None = config.max_position_embeddings
        tensors = {n: t.to(device, dtype) for n, t in head.tensors.items() if n not in ("d2t", "t2d")}
        self._embed = tensors.get("embed_tokens.weight", target.embed_weight)  # [V, H]
        attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
        self._twin: DraftTwin | None = None
        if (
            target.twin is not None and not config.norm_before_residual
        ):  # the compiled layer is the classic one
            from spectune.engine.cpu.build import draft_twin

            self._twin = draft_twin(config, tensors, self._embed, head.draft_to_target, dtype)
        if self._twin is None:
            self._fc = Linear(tensors["fc.weight"])
            self._qkv = Linear(torch.cat([tensors[f"{attention}{n}_proj.weight"] for n in "qkv"]))
            self._out = Linear(tensors[attention + "o_proj.weight"])
            self._gate_up = Linear(torch.cat([tensors[f"{mlp}{n}_proj.weight"] for n in ("gate", "up")]))
            self._down = Linear(tensors[mlp + "down_proj.weight"])
            self._head = Linear(tensors["lm_head.weight"])
        self._embed_norm = tensors["midlayer.input_layernorm.weight"]
        self._hidden_norm = tensors["midlayer.hidden_norm.weight"]
        self._post_norm = tensors["midlayer.post_attention_layernorm.weight"]
        self._norm = tensors["norm.weight"]
        ids = head.draft_to_target
        self._draft_to_target = None if ids is None else ids.to(device)
        parts = [f"{attention}{n}_proj.weight" for n in "qkvo"] + ["lm_head.weight"]
        parts += [f"{mlp}{n}_proj.weight" for n in ("gate", "up", "down")]
        self.weight_bytes = sum(tensors[part].numel() * dtype.itemsize for part in parts)
        self._rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling, device=device, dtype=dtype)
        self._cache: Cache | None = None
        self._lengths: list[int] = []
        self._states = torch.empty(0)  # [slots, H]: output of each slot's last real pair
        self._roots = torch.empty(0, dtype=torch.int64)  # [slots]: last committed token

    def reserve(self, num_slots: int, max_len: int, config: SpecConfig) -> None:
        scratch = max(1, config.num_steps * max(1, config.topk))
        columns = max_len + scratch
        if self._cache and self._cache.num_slots >= num_slots and self._cache.max_len >= columns:
            return
        self._rope.reserve(columns)
        if self._twin is not None:
            self._cache = self._twin.new_cache(1, num_slots, columns)
        else:
            self._cache = KVCache(
                num_layers=1,
                num_slots=num_slots,
                max_len=columns,
                num_kv_heads=self.config.num_kv_heads,
                head_dim=self.config.head_dim,
                device=self._device,
                dtype=self._dtype,
            )
        self._lengths = [0] * num_slots
        self._states = torch.zeros(num_slots, self.config.hidden_size, device=self._device, dtype=self._dtype)
        self._roots = torch.zeros(num_slots, dtype=torch.int64, device=self._device)

    def start(self, slot: int, tokens: Tensor, features: Tensor) -> None:
        self._lengths[slot] = 0
        count = torch.tensor([features.shape[0]])
        self.commit([slot], tokens[1:].unsqueeze(0), features.unsqueeze(0), count)

    def stop(self, slot: int) -> None:
        self._lengths[slot] = 0

    def commit(self, slots: Sequence[int], tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        view = SlotView(slots, self._device)
        lengths = [self._lengths[slot] for slot in slots]
        if self._twin is not None:
            assert self._cache is not None, "reserve() comes before the first text"
            self._twin.commit(
                tokens,
                features,
                counts,
                self._cache,
                view.index,
                lengths,
                self._rope.tables(),
                self._states,
                self._roots,
            )
        host_counts = counts.tolist()
        if self._twin is None:
            self._commit_plain(view, lengths, tokens, features, host_counts)
        for slot, length, count in zip(slots, lengths, host_counts, strict=True):
            self._lengths[slot] = length + count

    def _commit_plain(
        self, view: SlotView, lengths: list[int], tokens: Tensor, features: Tensor, counts: list[int]
    ) -> None:
        width = tokens.shape[1]
        starts = on_device(lengths, self._device).unsqueeze(1)
        positions = starts + torch.arange(width, device=self._device)
        output = self._layer(self._fc(features), tokens, positions, view, lengths, width, None)
        last = on_device(counts, self._device).unsqueeze(1) - 1
        self._states[view.index] = output.gather(1, last.unsqueeze(2).expand(-1, -1, output.shape[2]))[:, 0]
        self._roots[view.index] = tokens.gather(1, last)[:, 0]

    def propose(self, slots: Sequence[int], config: SpecConfig, rows: RowSampling) -> DraftTree:
        if config.option("draft_sampling", "greedy") == "probabilistic":
            return self._propose_sampled(slots, config, rows)
        view = SlotView(slots, self._device)
        pool = self._expand(view, config.topk, config.num_steps)
        return rerank(pool, self._roots[view.index], config.num_draft_tokens)

    def expand(self, slots: Sequence[int], topks: Sequence[int], depth: int) -> list[DraftPool]:
        view = SlotView(slots, self._device)
        return [self._expand(view, topk, depth) for topk in topks]

    def _expand(self, view: SlotView, topk: int, depth: int) -> DraftPool:
        """Grow a beam of `topk` nodes level by level and record every candidate.

        Level 1 are the best topk of the root; each frontier node then proposes topk children, all
        topk² are recorded, and the best topk by path score are the next frontier.
        """
        if topk > self.config.draft_vocab_size:
            raise InfeasibleConfig(
                f"topk {topk} exceeds the draft vocabulary of {self.config.draft_vocab_size}"
            )
        if self._twin is not None:
            return self._expand_twin(view, topk, depth)
        beam = _Beam(self, view, topk)
        scores, drafts = self._best(self._states[view.index], topk)  # [B, k]
        beam.record(self._target_ids(drafts), scores, torch.full_like(drafts, -1))
        for level in range(2, depth + 1):
            beam.grow(level)
        pool = DraftPool(topk, *beam.candidates())
        assert pool.tokens.shape[1] == chain_or_tree_pool(depth, topk)
        return pool

    def _expand_twin(self, view: SlotView, topk: int, depth: int) -> DraftPool:
        assert self._twin is not None
        assert self._cache is not None, "reserve() comes before the first text"
        lengths = [self._lengths[slot] for slot in view.slots]
        self._check_room(lengths, max(1, depth - 1) * topk)
        tokens, parents, scores = self._twin.expand(
            topk, depth, self._cache, view.index, lengths, self._rope.tables(), self._states
        )
        levels = torch.arange(depth, device=self._device) + 1
        counts = torch.tensor([topk] + [topk * topk] * (depth - 1))
        depths = levels.repeat_interleave(counts).expand(len(lengths), -1)
        return DraftPool(topk, tokens, parents, depths, scores)

    def _check_room(self, lengths: list[int], num_new: int) -> None:
        assert self._cache is not None, "reserve() comes before the first text"
        num_columns = max(lengths) + num_new
        if num_columns > self._cache.max_len:
            raise InfeasibleConfig(
                f"a draft needs {num_columns} columns of the cache, {self._cache.max_len} were reserved"
            )

    def _propose_sampled(self, slots: Sequence[int], config: SpecConfig, rows: RowSampling) -> DraftTree:
        """A chain whose drafts are drawn from q at the row's temperature; q [B, K, V] is kept."""
        if not config.is_chain:
            raise InfeasibleConfig("draft_sampling=probabilistic is for chains (topk 1)")
        view = SlotView(slots, self._device)
        vocab = self._embed.shape[0]
        lengths = on_device([self._lengths[slot] for slot in slots], self._device)
        temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0).view(-1, 1)
        state = self._states[view.index].unsqueeze(1)
        beam = _Beam(self, view, 1)
        tokens, scores, dists = [], [], []
        for level in range(config.num_steps):
            logits = self._logits(state)[:, 0].float() / temperature  # [B, D]
            log_q = logits.log_softmax(-1)
            noise = gumbel(rows.keys ^ _DRAFT_STREAM, lengths + level, log_q.shape[1])
            drawn = (log_q + noise).argmax(-1, keepdim=True)  # [B, 1]
            full = torch.zeros(len(slots), vocab, device=self._device)
            everything = torch.arange(log_q.shape[1], device=self._device).expand_as(log_q)
            dists.append(full.scatter(1, self._target_ids(everything), log_q.exp()))
            tokens.append(self._target_ids(drawn))
            scores.append(log_q.gather(1, drawn))
            if level + 1 < config.num_steps:
                state = beam.advance(state, tokens[-1], level + 1)
        drafts = torch.cat(tokens, 1)
        return DraftTree.chain(
            self._roots[view.index],
            drafts,
            torch.cat(scores, 1).cumsum(1),
            torch.ones_like(drafts, dtype=torch.bool),
            q=torch.stack(dists, 1),
        )

    def _layer(
        self,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        view: SlotView,
        lengths: list[int],
        num_new: int,
        ancestors: Tensor | None,
    ) -> Tensor:
        """One pass of the draft layer; hidden [B, T, H], tokens/positions [B, T].

        Token t is stored at column lengths[b] + num_new - T + t. `ancestors` [B, T, num_new] speaks of the
        columns lengths[b] .. lengths[b] + num_new - 1; without it a token sees all up to its own.
        """
        self._check_room(lengths, num_new)
        config, cache = self.config, self._cache
        num_columns = max(lengths) + num_new
        if self._twin is not None:
            assert cache is not None, "reserve() comes before the first text"
            return self._twin.layer(
                hidden, tokens, positions, cache, view.index, lengths, num_new, ancestors, self._rope.tables()
            )
        assert isinstance(cache, KVCache)
        device_lengths = on_device(lengths, self._device)
        offsets = torch.arange(num_new - tokens.shape[1], num_new, device=self._device)
        columns = device_lengths.unsqueeze(1) + offsets
        if ancestors is None:
            triangle = torch.ones(tokens.shape[1], num_new, dtype=torch.bool, device=self._device)
            ancestors = triangle.tril(num_new - tokens.shape[1]).expand(len(view), -1, -1)
        batch, width, _ = hidden.shape
        embedding = F.embedding(tokens, self._embed)
        normed = self._rms(hidden, self._hidden_norm)
        joined = torch.cat([self._rms(embedding, self._embed_norm), normed], -1)
        heads = self._qkv(joined).view(batch, width, -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        cos, signed_sin = self._rope.at(positions)
        rotated = self._rope.rotate(heads[:, :, :num_rotated], cos, signed_sin)
        keys_values = torch.stack([rotated[:, :, config.num_heads :], heads[:, :, num_rotated:]], 2)
        cache.write(0, cache.flat(view.index, columns), keys_values)
        keys, values = cache.read(0, view, num_columns)
        visible = visible_columns(device_lengths, ancestors, num_columns)
        mask = additive_mask(visible, config.num_heads // config.num_kv_heads, self._dtype)
        query = rotated[:, :, : config.num_heads].contiguous()
        residual = normed if config.norm_before_residual else hidden
        x = residual + self._out(grouped_attention(query, keys, values, mask))
        gate, up = self._gate_up(self._rms(x, self._post_norm)).chunk(2, -1)
        return x + self._down(F.silu(gate) * up)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _logits(self, states: Tensor) -> Tensor:
        if self._twin is not None:
            return self._twin.logits(states)
        return self._head(self._rms(states, self._norm))

    def _best(self, states: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities at T = 1 and draft ids [..., k] of the best tokens after states [..., H]."""
        best = self._logits(states).float().log_softmax(-1).topk(topk)
        return best.values, best.indices

    def _target_ids(self, drafts: Tensor) -> Tensor:
        return drafts if self._draft_to_target is None else self._draft_to_target[drafts]


class _Beam:
    """The frontier of a growing draft tree and every candidate it has seen."""

    def __init__(self, drafter: Eagle3Drafter, view: SlotView, topk: int) -> None:
        self._drafter, self._view, self._topk = drafter, view, topk
        self._lengths = [drafter._lengths[slot] for slot in view.slots]
        self._starts = on_device(self._lengths, view.index.device).unsqueeze(1)
        self._recorded: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._num_recorded = 0
        self._ancestors: Tensor | None = None  # [B, k, C]
        self._frontier_index = torch.empty(0)  # [B, k] pool index of each frontier node
        self._frontier_tokens = self._frontier_scores = torch.empty(0)
        states = drafter._states[view.index].unsqueeze(1)
        self._states = states.expand(-1, topk, -1)  # hidden that feeds each frontier node
        self._parent_rows: Tensor | None = None

    def record(self, tokens: Tensor, scores: Tensor, parents: Tensor) -> None:
        """Keep a level of candidates [B, M] and make its best topk the next frontier."""
        depth = torch.full_like(tokens, len(self._recorded) + 1)
        self._recorded.append((tokens, parents, depth, scores))
        best = scores.topk(self._topk, sorted=True).indices
        self._frontier_index = best + self._num_recorded
        self._frontier_tokens = tokens.gather(1, best)
        self._frontier_scores = scores.gather(1, best)
        self._parent_rows = None if self._ancestors is None else best // self._topk
        self._num_recorded += tokens.shape[1]

    def grow(self, level: int) -> None:
        """Run the frontier through the head and record its topk² children."""
        drafter, k = self._drafter, self._topk
        if self._parent_rows is not None:
            rows = self._parent_rows.unsqueeze(2)
            self._states = self._states.gather(1, rows.expand(-1, -1, self._states.shape[2]))
        self._states = self.advance(self._states, self._frontier_tokens, level - 1)
        scores, drafts = drafter._best(self._states, k)  # [B, k, k]
        scores = scores + self._frontier_scores.unsqueeze(2)
        parents = self._frontier_index.unsqueeze(2).expand(-1, -1, k)
        self.record(drafter._target_ids(drafts).flatten(1), scores.flatten(1), parents.flatten(1))

    def advance(self, states: Tensor, tokens: Tensor, step: int) -> Tensor:
        """Draft step `step` (from 1): one masked pass over the frontier -> new states [B, k, H]."""
        k, batch = self._topk, tokens.shape[0]
        positions = (self._starts + step - 1).expand(-1, k)
        if k > 1:
            own = torch.eye(k, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
            above = self._ancestors
            if above is not None and self._parent_rows is not None:
                above = above.gather(1, self._parent_rows.unsqueeze(2).expand(-1, -1, above.shape[2]))
            self._ancestors = own if above is None else torch.cat([above, own], 2)  # [B, k, C]
        return self._drafter._layer(
            states, tokens, positions, self._view, self._lengths, step * k, self._ancestors
        )

    def candidates(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens, parents, depths, scores [B, P] of all levels."""
        tokens, parents, depths, scores = zip(*self._recorded, strict=True)
        return torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(depths, 1), torch.cat(scores, 1)
