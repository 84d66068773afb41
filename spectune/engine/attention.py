"""Masks and grouped-query attention shared by target and draft.

A pass scores T new tokens a row against S stored columns. Column c of row b is visible to token t if
it lies in the committed prefix, or if it is an ancestor of t among the new tokens:

    columns   0 ........ len_b-1 | len_b + 0   len_b + 1   len_b + 2  (new tokens)
    token 0   1 1 1 1 1 1 1 1 1  |    1           0           0
    token 1   1 1 1 1 1 1 1 1 1  |    1           1           0       child of 0
    token 2   1 1 1 1 1 1 1 1 1  |    1           0           1       another child of 0
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def visible_columns(lengths: Tensor, ancestors: Tensor, num_columns: int) -> Tensor:
    """Visibility [B, T, S] from committed lengths [B] and ancestors [B, T, C] (self included).

    `ancestors[b, t, c]` speaks of column lengths[b] + c; columns past both are hidden.
    """
    num_new = ancestors.shape[2]
    columns = torch.arange(num_columns, device=lengths.device)
    offset = columns.unsqueeze(0) - lengths.unsqueeze(1)  # [B, S]
    is_new = (offset >= 0) & (offset < num_new)
    index = offset.clamp(0, num_new - 1).unsqueeze(1).expand(-1, ancestors.shape[1], -1)  # [B, T, S]
    return torch.where(is_new.unsqueeze(1), ancestors.gather(2, index), (offset < 0).unsqueeze(1))


def additive_mask(visible: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """0 / -inf mask [B, 1, G·T, S] for queries whose groups are folded into rows."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    mask.masked_fill_(~visible, float("-inf"))
    return mask.repeat(1, num_groups, 1).unsqueeze(1)


def grouped_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of query [B, T, heads, d] over keys/values [B, kv_heads, S, d] -> [B, T, heads·d].

    The query groups of a key head are folded into rows ([B, kv_heads, G·T, d]): CPU kernels for
    grouped heads fall to a slow path with a mask, plain ones do not.
    """
    batch, num_tokens, num_heads, head_dim = query.shape
    num_kv = keys.shape[1]
    groups = num_heads // num_kv
    folded = query.view(batch, num_tokens, num_kv, groups, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(batch, num_kv, groups * num_tokens, head_dim)
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    mixed = mixed.view(batch, num_kv, groups, num_tokens, head_dim).permute(0, 3, 1, 2, 4)
    return mixed.reshape(batch, num_tokens, num_heads * head_dim)
