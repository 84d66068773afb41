"""Grouped-query attention of one row of the batch and one key head, over packed keys and values.

Keys lie as a weight whose outputs are columns, [columns/64][d][64]; values as a weight whose inputs are
columns, [d/64][columns][64] (both in 32-bit units, see tiles). So scores and mixtures are the same
register tiles as every product.

What a token sees is the committed prefix and then its ancestors among the new columns, in order of
depth. Tokens of a tree gather that order into one run of columns first: a node's sums then are those
that plain decoding makes at the same place of the text.
"""

from __future__ import annotations

import numpy as np

from spectune.engine.cpu.jit import kernel
from spectune.engine.cpu.products import add_rows, chunk, multiply_rows
from spectune.engine.cpu.scalar import exp, stored_as, value_of

_BLOCK = 64


@kernel
def rotate(heads, row, offset, dim, cos, sin, norm, eps, out):
    """out [dim] fp32, rounded to storage: head at heads[row, offset:], normed if `norm` is given, rotated."""
    half = dim // 2
    inverse = np.float32(1.0)
    if norm.shape[0] > 0:
        total = np.float32(0.0)
        for i in range(dim):
            value = np.float32(value_of(heads[row, offset + i]))
            total += value * value
        inverse = np.float32(1.0) / np.sqrt(total / np.float32(dim) + eps)
    for i in range(half):
        low = np.float32(value_of(heads[row, offset + i]))
        high = np.float32(value_of(heads[row, offset + half + i]))
        if norm.shape[0] > 0:
            low = value_of(stored_as(heads[0, 0], low * inverse * norm[i]))
            high = value_of(stored_as(heads[0, 0], high * inverse * norm[half + i]))
        out[i] = low * cos[i] + high * sin[i]
        out[half + i] = high * cos[half + i] + low * sin[half + i]


@kernel
def store_pair(heads, row, key, value_offset, dim, column, keys, values):
    """Write a rotated key [dim] fp32 and the value at heads[row, value_offset:] to their column."""
    unit = 4 // keys.itemsize
    padded = (dim + _BLOCK - 1) // _BLOCK * _BLOCK
    length = values.shape[0] // padded
    key_base = column // _BLOCK * (padded * _BLOCK) + column % _BLOCK * unit
    for i in range(dim):
        keys[key_base + i // unit * (_BLOCK * unit) + i % unit] = stored_as(keys[0], key[i])
    value_base = column // unit * (_BLOCK * unit) + column % unit
    for i in range(dim):
        place = i // _BLOCK * (length * _BLOCK) + value_base + i % _BLOCK * unit
        values[place] = heads[row, value_offset + i]


@kernel
def softmax_row(scores, low, num_columns, scale, out, num_filled):
    """out = exp(scale · (scores - max)) on [low, num_columns), 0 elsewhere below num_filled; returns the sum."""
    best = np.float32(-3.0e38)
    for i in range(low, num_columns):
        best = max(best, scores[i])
    total = np.float32(0.0)
    for i in range(low, num_columns):
        weight = exp((scores[i] - best) * scale)
        total += weight
        out[i] = stored_as(out[0], weight)
    for i in range(low):
        out[i] = stored_as(out[0], np.float32(0.0))
    for i in range(num_columns, num_filled):
        out[i] = stored_as(out[0], np.float32(0.0))
    return total


@kernel
def store(
    heads,
    first_row,
    num_tokens,
    start,
    head,
    num_heads,
    num_kv_heads,
    dim,
    positions,
    cos,
    sin,
    key_norm,
    eps,
    keys,
    values,
    rotated,
):
    """Keys (rotated) and values of one (row, key head) for the tokens of a pass, from column `start` on."""
    for t in range(num_tokens):
        row = first_row + t
        at = positions[row]
        rotate(heads, row, (num_heads + head) * dim, dim, cos[at], sin[at], key_norm, eps, rotated)
        store_pair(heads, row, rotated, (num_heads + num_kv_heads + head) * dim, dim, start + t, keys, values)


@kernel
def attend(
    heads,
    first_row,
    first_token,
    last_token,
    num_tokens,
    num_new,
    length,
    mask,
    is_tree,
    window,
    head,
    num_heads,
    num_kv_heads,
    dim,
    positions,
    cos,
    sin,
    query_norm,
    eps,
    keys,
    values,
    rotated,
    queries,
    scores,
    weights,
    mixed,
    tail,
    out,
):
    """Attention of the tokens first_token .. last_token of one (row, key head).

    Token t of the pass stands at column length + num_new - num_tokens + t. Scratch (one thread's own):
    rotated [dim], queries [Q, d], scores [Q, S], weights [Q, S], mixed [Q, d], tail [d · columns].
    """
    unit = 4 // keys.itemsize
    padded = queries.shape[1]
    groups = num_heads // num_kv_heads
    max_columns = values.shape[0] // padded
    start = length + num_new - num_tokens
    scale = np.float32(1.0) / np.sqrt(np.float32(dim))
    tokens_a_block = max(1, queries.shape[0] // groups)
    for begin in range(first_token, last_token, tokens_a_block):
        end = min(last_token, begin + tokens_a_block)
        num_queries = (end - begin) * groups
        for t in range(begin, end):
            row = first_row + t
            at = positions[row]
            for g in range(groups):
                offset = (head * groups + g) * dim
                rotate(heads, row, offset, dim, cos[at], sin[at], query_norm, eps, rotated)
                for i in range(dim):
                    queries[(t - begin) * groups + g, i] = stored_as(queries[0, 0], rotated[i])
        seen = length + num_new if is_tree else start + end
        oldest = 0
        if window > 0:
            oldest = max(0, positions[first_row + begin] - window + 1) // _BLOCK
        for block in range(oldest, (seen + _BLOCK - 1) // _BLOCK):
            first = 0
            while first < num_queries:
                n = chunk(first, num_queries)
                multiply_rows(
                    keys[0],
                    n,
                    queries.ctypes.data + first * queries.strides[0],
                    queries.strides[0],
                    keys.ctypes.data + block * _BLOCK * padded * keys.itemsize,
                    padded // unit,
                    scores.ctypes.data + first * scores.strides[0] + block * _BLOCK * 4,
                    scores.strides[0],
                    keys.ctypes.data + (block + 1) * _BLOCK * padded * keys.itemsize,
                    _BLOCK * 4,
                )
                first += n
        for q in range(num_queries):
            for i in range(padded):
                mixed[q, i] = np.float32(0.0)
        if is_tree:
            _mix_tree(
                first_row,
                begin,
                end,
                num_new,
                length,
                mask,
                window,
                groups,
                scale,
                values,
                scores,
                weights,
                mixed,
                tail,
                out,
                head,
                dim,
            )
        else:
            num_steps = (seen + unit - 1) // unit
            for q in range(num_queries):
                visible = start + begin + q // groups + 1
                low = max(0, positions[first_row + begin + q // groups] - window + 1) if window > 0 else 0
                total = softmax_row(scores[q], low, visible, scale, weights[q], num_steps * unit)
                scores[q, 0] = np.float32(1.0) / total
            _mix(0, num_queries, values, 0, 0, num_steps, max_columns, weights, mixed)
            for q in range(num_queries):
                offset = (head * groups + q % groups) * dim
                _emit(mixed, q, scores[q, 0], out, first_row + begin + q // groups, offset, dim)


@kernel
def _mix(first_query, last_query, values, base, first_step, num_steps, max_columns, weights, mixed):
    """mixed += weights · values over the units of columns first_step .. first_step + num_steps.

    `values` holds those units from element `base` on, max_columns columns for each 64 dimensions.
    """
    first = first_query
    while first < last_query:
        n = chunk(first, last_query)
        for block in range(mixed.shape[1] // _BLOCK):
            add_rows(
                values[0],
                n,
                weights.ctypes.data + first * weights.strides[0] + first_step * 4,
                weights.strides[0],
                values.ctypes.data + (base + block * max_columns * _BLOCK) * values.itemsize,
                num_steps,
                mixed.ctypes.data + first * mixed.strides[0] + block * _BLOCK * 4,
                mixed.strides[0],
                0,
                0,
            )
        first += n


@kernel
def _mix_tree(
    first_row,
    begin,
    end,
    num_new,
    length,
    mask,
    window,
    groups,
    scale,
    values,
    scores,
    weights,
    mixed,
    tail,
    out,
    head,
    dim,
):
    """Attention of tree nodes: prefix for all of them at once, ancestors for each node on its own."""
    unit = 4 // values.itemsize
    padded = mixed.shape[1]
    max_columns = values.shape[0] // padded
    num_queries = (end - begin) * groups
    prefix_steps = length // unit
    tail_columns = tail.shape[0] // padded
    for t in range(begin, end):
        num_seen = length
        for c in range(num_new):
            if mask[t, c]:
                for g in range(groups):
                    q = (t - begin) * groups + g
                    scores[q, num_seen] = scores[q, length + c]  # ancestors close up, in order of depth
                num_seen += 1
        filled = (num_seen + unit - 1) // unit * unit
        low = max(0, num_seen - window) if window > 0 else 0
        for g in range(groups):
            q = (t - begin) * groups + g
            total = softmax_row(scores[q], low, num_seen, scale, weights[q], filled)
            scores[q, 0] = np.float32(1.0) / total
    _mix(0, num_queries, values, 0, 0, prefix_steps, max_columns, weights, mixed)
    for t in range(begin, end):
        slot = 0
        for column in range(prefix_steps * unit, length):
            _copy_column(values, max_columns, column, tail, tail_columns, slot, padded)
            slot += 1
        for c in range(num_new):
            if mask[t, c]:
                _copy_column(values, max_columns, length + c, tail, tail_columns, slot, padded)
                slot += 1
        if slot % unit:
            _copy_column(values, max_columns, 0, tail, tail_columns, slot, padded)  # met by weight 0
        first = (t - begin) * groups
        _mix(
            first,
            first + groups,
            tail,
            0,
            prefix_steps,
            (slot + unit - 1) // unit,
            tail_columns,
            weights,
            mixed,
        )
        for g in range(groups):
            _emit(mixed, first + g, scores[first + g, 0], out, first_row + t, (head * groups + g) * dim, dim)


@kernel
def _copy_column(values, max_columns, column, tail, tail_columns, slot, padded):
    unit = 4 // values.itemsize
    for block in range(padded // _BLOCK):
        source = (block * max_columns + column // unit * unit) * _BLOCK + column % unit
        target = (block * tail_columns + slot // unit * unit) * _BLOCK + slot % unit
        for i in range(_BLOCK):
            tail[target + i * unit] = values[source + i * unit]


@kernel
def _emit(mixed, q, inverse, out, row, offset, dim):
    for i in range(dim):
        out[row, offset + i] = stored_as(out[0, 0], mixed[q, i] * inverse)


@kernel
def move_columns(cache, slots, sources, targets, padded):
    """Copy columns sources [B, M] to targets [B, M], left to right, in every layer and key head.

    Left to right is safe where no target lies right of its source.
    """
    unit = 4 // cache.itemsize
    max_columns = cache.shape[4] // padded
    for layer in range(cache.shape[0]):
        for b in range(slots.shape[0]):
            for head in range(cache.shape[3]):
                keys, values = cache[layer, 0, slots[b], head], cache[layer, 1, slots[b], head]
                for m in range(sources.shape[1]):
                    source, target = sources[b, m], targets[b, m]
                    if source == target:
                        continue
                    old = source // _BLOCK * (padded * _BLOCK) + source % _BLOCK * unit
                    new = target // _BLOCK * (padded * _BLOCK) + target % _BLOCK * unit
                    for i in range(padded):
                        step = i // unit * (_BLOCK * unit) + i % unit
                        keys[new + step] = keys[old + step]
                    _copy_column(values, max_columns, source, values, max_columns, target, padded)
