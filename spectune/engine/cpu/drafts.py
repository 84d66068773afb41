"""The one layer of an EAGLE-3 head, and taking in what the target accepted."""

from spectune.engine.cpu.jit import kernel
from spectune.engine.cpu.layers import layer_pass
from spectune.engine.cpu.products import project, rms_norm
from spectune.engine.cpu.scalar import barrier


@kernel
def join(ids, embedding, x, num_rows, norms, eps, width, joined):
    """joined [rows, 2H]: the embedded token and the hidden state, each under its norm."""
    for row in range(num_rows):
        rms_norm(embedding[ids[row] : ids[row] + 1], 1, norms[0], eps, joined[row : row + 1], 0)
    rms_norm(x, num_rows, norms[1], eps, joined, width)


@kernel
def commit_pass(
    thread,
    num_threads,
    kind,
    sync,
    shape,
    eps,
    linears,
    norms,
    no_norm,
    embedding,
    fusion,
    fusion_steps,
    features,
    ids,
    counts,
    states,
    roots,
    x,
    joined,
    normed,
    heads,
    mixed_heads,
    gated,
    cache,
    slots,
    lengths,
    mask,
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
    """Pairs of features [B·M, 3H] and tokens ids [B·M] enter the cache; the last real one of each row
    (counts [B]) leaves its output in states [slots, H] and its token in roots [slots]."""
    num_rows, width, num_tokens = shape[0], shape[3], shape[1]
    project(kind, features, num_rows, fusion, fusion_steps, x, width, sums[thread], thread, num_threads)
    phase = barrier(sync.ctypes.data, num_threads, 1)
    join(ids, embedding, x, num_rows, norms, eps, width, joined[thread])
    layer_pass(
        kind,
        sync,
        phase,
        thread,
        num_threads,
        shape,
        eps,
        linears,
        no_norm,
        no_norm,
        joined[thread],
        x,
        normed[thread],
        norms[2],
        heads,
        mixed_heads,
        gated,
        cache[0, 0],
        cache[0, 1],
        slots,
        lengths,
        mask,
        False,
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
    if thread == 0:
        for b in range(slots.shape[0]):
            last = b * num_tokens + counts[b] - 1
            roots[slots[b]] = ids[last]
            for i in range(width):
                states[slots[b], i] = x[last, i]


@kernel
def draft_pass(
    thread,
    num_threads,
    kind,
    sync,
    shape,
    eps,
    linears,
    norms,
    no_norm,
    embedding,
    ids,
    x,
    joined,
    normed,
    heads,
    mixed_heads,
    gated,
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
    """One pass of the layer: token ids [rows] join the hidden states x [rows, H], which it updates."""
    join(ids, embedding, x, shape[0], norms, eps, shape[3], joined[thread])
    layer_pass(
        kind,
        sync,
        1,
        thread,
        num_threads,
        shape,
        eps,
        linears,
        no_norm,
        no_norm,
        joined[thread],
        x,
        normed[thread],
        norms[2],
        heads,
        mixed_heads,
        gated,
        cache[0, 0],
        cache[0, 1],
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
