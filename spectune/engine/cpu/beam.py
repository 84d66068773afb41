"""Growing a draft tree in one call, as EAGLE-2 does (arXiv 2406.16858).

Level 1 are the best topk of the root; each frontier node then proposes topk children, all topk² are
recorded, and the best topk by path score are the next frontier.
"""

import numpy as np

from spectune.engine.cpu.choices import top_row
from spectune.engine.cpu.drafts import join
from spectune.engine.cpu.jit import kernel
from spectune.engine.cpu.layers import layer_pass
from spectune.engine.cpu.products import project, rms_norm, share
from spectune.engine.cpu.scalar import barrier

_LOWEST = np.float32(-3.4e38)


@kernel
def expand_pass(
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
    head,
    head_steps,
    draft_to_target,
    topk,
    depth,
    states,
    tokens,
    parents,
    path_scores,
    logits,
    best,
    best_ids,
    frontier,
    frontier_scores,
    masks,
    ids,
    x,
    other,
    joined,
    normed,
    heads,
    mixed_heads,
    gated,
    cache,
    slots,
    lengths,
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
    """Candidates of every level: tokens, parents, path_scores [B, P], as `DraftPool` describes them.

    frontier [2, B, k]: pool index and parent row of each frontier node; masks [2, B, k, depth · k].
    """
    batch, width, draft_vocab = slots.shape[0], shape[3], logits.shape[1]
    low, high = share(batch, thread, num_threads)
    for b in range(low, high):
        rms_norm(states[slots[b] : slots[b] + 1], 1, norms[3], eps, normed[0, b : b + 1], 0)
    phase = barrier(sync.ctypes.data, num_threads, 1)
    project(kind, normed[0], batch, head, head_steps, logits, draft_vocab, sums[thread], thread, num_threads)
    phase = barrier(sync.ctypes.data, num_threads, phase)
    for b in range(low, high):
        top_row(logits[b], topk, best[b], best_ids[b])
        for i in range(topk):
            tokens[b, i] = draft_to_target[best_ids[b, i]]
            parents[b, i] = -1
            path_scores[b, i] = best[b, i]
            frontier[0, b, i] = i
            frontier_scores[b, i] = best[b, i]
            ids[b * topk + i] = tokens[b, i]
            positions[b * topk + i] = lengths[b]
            masks[0, b, i, :] = False
            masks[0, b, i, i] = True
            for column in range(width):
                x[b * topk + i, column] = states[slots[b], column]
    phase = barrier(sync.ctypes.data, num_threads, phase)
    num_rows = batch * topk
    num_recorded = topk
    side = 0
    for level in range(2, depth + 1):
        join(ids, embedding, x, num_rows, norms, eps, width, joined[thread])
        own = shape.copy()
        own[2] = (level - 1) * topk
        phase = layer_pass(
            kind,
            sync,
            phase,
            thread,
            num_threads,
            own,
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
            masks[side],
            topk > 1,
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
        rms_norm(x, num_rows, norms[3], eps, normed[thread], 0)
        project(
            kind,
            normed[thread],
            num_rows,
            head,
            head_steps,
            logits,
            draft_vocab,
            sums[thread],
            thread,
            num_threads,
        )
        phase = barrier(sync.ctypes.data, num_threads, phase)
        first, last = share(num_rows, thread, num_threads)
        for row in range(first, last):
            top_row(logits[row], topk, best[row], best_ids[row])
        phase = barrier(sync.ctypes.data, num_threads, phase)
        for b in range(low, high):
            _record(
                b,
                topk,
                level,
                num_recorded,
                width,
                draft_to_target,
                tokens[b],
                parents[b],
                path_scores[b],
                best,
                best_ids,
                frontier[:, b],
                frontier_scores[b],
                masks[side, b],
                masks[1 - side, b],
                ids,
                positions,
                lengths[b],
                x,
                other,
            )
        phase = barrier(sync.ctypes.data, num_threads, phase)
        num_recorded += topk * topk
        side = 1 - side
        x, other = other, x


@kernel
def _record(
    b,
    topk,
    level,
    num_recorded,
    width,
    draft_to_target,
    tokens,
    parents,
    path_scores,
    best,
    best_ids,
    frontier,
    frontier_scores,
    mask,
    next_mask,
    ids,
    positions,
    length,
    x,
    other,
):
    """Record the topk² children of a row's frontier and make the best topk of them the next one."""
    for i in range(topk):
        for j in range(topk):
            place = num_recorded + i * topk + j
            tokens[place] = draft_to_target[best_ids[b * topk + i, j]]
            parents[place] = frontier[0, i]
            path_scores[place] = best[b * topk + i, j] + frontier_scores[i]
    children = path_scores[num_recorded : num_recorded + topk * topk]
    for place in range(topk):
        frontier_scores[place] = _LOWEST
    for child in range(topk * topk):
        value = children[child]
        place = topk
        while place > 0 and value > frontier_scores[place - 1]:
            place -= 1
        if place < topk:
            for later in range(topk - 1, place, -1):
                frontier_scores[later] = frontier_scores[later - 1]
                frontier[1, later] = frontier[1, later - 1]
            frontier_scores[place] = value
            frontier[1, place] = child
    columns = (level - 1) * topk
    for j in range(topk):
        child = frontier[1, j]
        row = child // topk
        frontier[0, j] = num_recorded + child
        ids[b * topk + j] = tokens[num_recorded + child]
        positions[b * topk + j] = length + level - 1
        for c in range(columns):
            next_mask[j, c] = mask[row, c]
        for c in range(columns, next_mask.shape[1]):
            next_mask[j, c] = False
        if columns + j < next_mask.shape[1]:
            next_mask[j, columns + j] = True
        for i in range(width):
            other[b * topk + j, i] = x[b * topk + row, i]
