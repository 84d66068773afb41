"""A whole pass as one call a thread: every layer of a target, or the one layer of a draft head.

Threads share blocks of outputs and (row, key head) pairs, and meet at a barrier where one phase reads
what another wrote.
"""

from __future__ import annotations

from spectune.engine.cpu.attention import attend, store
from spectune.engine.cpu.jit import kernel
from spectune.engine.cpu.products import project, project_add, project_silu, rms_norm, share
from spectune.engine.cpu.scalar import barrier


@kernel
def even_parts(num_pairs, num_tokens, num_threads):
    """Parts of each pair's tokens (at most 4) that share the pairs out most evenly; the fewest such."""
    best, least = 1, 1.0e9
    for parts in range(1, min(4, num_tokens) + 1):
        items = num_pairs * parts
        waste = ((items + num_threads - 1) // num_threads) * num_threads / items
        if waste < least - 0.01:
            best, least = parts, waste
    return best


@kernel
def layer_pass(
    kind,
    sync,
    phase,
    thread,
    num_threads,
    shape,
    eps,
    linears,
    query_norm,
    key_norm,
    joined,
    x,
    normed,
    post_norm,
    heads,
    mixed_heads,
    gated,
    keys,
    values,
    slots,
    lengths,
    mask,
    is_tree,
    positions,
    cos,
    sin,
    rotated,
    queries,
    scores,
    weights,
    mixed,
    tail,
    sums,
):
    """One decoder layer over `joined` [rows, J] (normed input), added to the residual x [rows, H].

    shape: rows, tokens, new columns, width, heads, key heads, dim, inner width, input units, hidden
    units, mixed units, inner units, window. linears [4, 3]: qkv, out, gate_up, down. Returns the phase.
    """
    num_rows, num_tokens, num_new, width = shape[0], shape[1], shape[2], shape[3]
    num_heads, num_kv_heads, dim, inner = shape[4], shape[5], shape[6], shape[7]
    window = shape[12]
    project(
        kind,
        joined,
        num_rows,
        linears[0],
        shape[8],
        heads,
        (num_heads + 2 * num_kv_heads) * dim,
        sums,
        thread,
        num_threads,
    )
    phase = barrier(sync.ctypes.data, num_threads, phase)
    low, high = share(slots.shape[0] * num_kv_heads, thread, num_threads)
    for item in range(low, high):
        row, head = item // num_kv_heads, item % num_kv_heads
        start = lengths[row] + num_new - num_tokens
        store(
            heads,
            row * num_tokens,
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
            keys[slots[row], head],
            values[slots[row], head],
            rotated,
        )
    phase = barrier(sync.ctypes.data, num_threads, phase)
    num_parts = even_parts(slots.shape[0] * num_kv_heads, num_tokens, num_threads)
    low, high = share(slots.shape[0] * num_kv_heads * num_parts, thread, num_threads)
    for item in range(low, high):
        part, pair = item % num_parts, item // num_parts
        row, head = pair // num_kv_heads, pair % num_kv_heads
        first, last = share(num_tokens, part, num_parts)
        attend(
            heads,
            row * num_tokens,
            first,
            last,
            num_tokens,
            num_new,
            lengths[row],
            mask[row],
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
            keys[slots[row], head],
            values[slots[row], head],
            rotated,
            queries,
            scores,
            weights,
            mixed,
            tail,
            mixed_heads,
        )
    phase = barrier(sync.ctypes.data, num_threads, phase)
    project_add(kind, mixed_heads, num_rows, linears[1], shape[10], x, width, sums, thread, num_threads)
    phase = barrier(sync.ctypes.data, num_threads, phase)
    rms_norm(x, num_rows, post_norm, eps, normed, 0)
    project_silu(kind, normed, num_rows, linears[2], shape[9], gated, inner, sums, thread, num_threads)
    phase = barrier(sync.ctypes.data, num_threads, phase)
    project_add(kind, gated, num_rows, linears[3], shape[11], x, width, sums, thread, num_threads)
    return barrier(sync.ctypes.data, num_threads, phase)


@kernel
def target_pass(
    thread,
    num_threads,
    kind,
    sync,
    shape,
    eps,
    linears,
    norms,
    head_norms,
    aux,
    embedding,
    ids,
    x,
    normed,
    heads,
    mixed_heads,
    gated,
    features,
    hidden,
    cache,
    slots,
    lengths,
    mask,
    is_tree,
    positions,
    cos,
    sin,
    rotated,
    queries,
    scores,
    weights,
    mixed,
    tail,
    sums,
):
    """All layers of a target over ids [rows]: hidden [rows, H] after the last norm, features [rows, A·H].

    linears [L, 4, 3], norms [2L + 1, H], head_norms [L, 2, d or 0], aux [L]: place of the residual that
    enters the layer among the features, or -1. cache [L, 2, slots, key heads, columns · d].
    """
    num_rows, width = shape[0], shape[3]
    phase = 1
    low, high = share(num_rows, thread, num_threads)
    for row in range(low, high):
        for i in range(width):
            x[row, i] = embedding[ids[row], i]
    phase = barrier(sync.ctypes.data, num_threads, phase)
    num_layers = linears.shape[0]
    for layer in range(num_layers):
        if aux[layer] >= 0:
            for row in range(low, high):
                for i in range(width):
                    features[row, aux[layer] * width + i] = x[row, i]
        rms_norm(x, num_rows, norms[2 * layer], eps, normed[thread], 0)
        phase = layer_pass(
            kind,
            sync,
            phase,
            thread,
            num_threads,
            shape,
            eps,
            linears[layer],
            head_norms[layer, 0],
            head_norms[layer, 1],
            normed[thread],
            x,
            normed[thread],
            norms[2 * layer + 1],
            heads,
            mixed_heads,
            gated,
            cache[layer, 0],
            cache[layer, 1],
            slots,
            lengths,
            mask,
            is_tree,
            positions,
            cos,
            sin,
            rotated[thread],
            queries[thread],
            scores[thread],
            weights[thread],
            mixed[thread],
            tail[thread],
            sums[thread],
        )
    rms_norm(x[low:high], high - low, norms[2 * num_layers], eps, hidden[low:high], 0)
    barrier(sync.ctypes.data, num_threads, phase)


@kernel
def output_pass(
    thread, num_threads, kind, sync, x, num_rows, norm, eps, weight, steps, normed, out, width, sums
):
    """out [rows, width] = x, normed where `norm` is given, times one weight."""
    if norm.shape[0] > 0:
        rms_norm(x, num_rows, norm, eps, normed[thread], 0)
        project(kind, normed[thread], num_rows, weight, steps, out, width, sums[thread], thread, num_threads)
    else:
        project(kind, x, num_rows, weight, steps, out, width, sums[thread], thread, num_threads)
    barrier(sync.ctypes.data, num_threads, 1)
