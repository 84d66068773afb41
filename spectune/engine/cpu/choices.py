"""Choosing tokens from scores: the best of a row, the best k with their log-probabilities, a keyed draw.

Ties go to the lower token id everywhere.
"""

import numpy as np

from spectune.engine.cpu.jit import kernel
from spectune.engine.cpu.products import block_sums, chunk, share
from spectune.engine.cpu.scalar import barrier, exp, log

_BLOCK = 64
PART = 1024  # scores perturbed before the best of them is looked for
_LOWEST = np.float32(-3.4e38)
_HALF, _THIRD, _QUARTER = np.float32(0.5), np.float32(1 / 3), np.float32(0.25)


@kernel
def best_pass(thread, num_threads, kind, sync, x, num_rows, weight, steps, width, sums, best, best_ids):
    """Best output of each row of x times a weight: best [threads, rows], best_ids [threads, rows]."""
    low, high = share((width + _BLOCK - 1) // _BLOCK, thread, num_threads)
    for row in range(num_rows):
        best[thread, row] = _LOWEST
        best_ids[thread, row] = 0
    for block in range(low, high):
        first = 0
        lanes = min(_BLOCK, width - block * _BLOCK)
        while first < num_rows:
            n = chunk(first, num_rows)
            block_sums(kind, x, first, n, num_rows, weight, block, steps, sums[thread])
            for row in range(n):
                top = _LOWEST
                for lane in range(lanes):
                    top = max(top, sums[thread, row, lane])
                if top > best[thread, first + row]:
                    lane = 0
                    while sums[thread, row, lane] != top:
                        lane += 1
                    best[thread, first + row] = top
                    best_ids[thread, first + row] = block * _BLOCK + lane
            first += n
    barrier(sync.ctypes.data, num_threads, 1)
    if thread == 0:
        for row in range(num_rows):
            for other in range(1, num_threads):  # threads hold ascending ids: only more is better
                if best[other, row] > best[0, row]:
                    best[0, row] = best[other, row]
                    best_ids[0, row] = best_ids[other, row]


@kernel
def top_row(logits, num_best, log_probs, ids):
    """The num_best tokens of logits [D] fp32: log_probs, ids [num_best], best first."""
    width = logits.shape[0]
    top = _LOWEST
    for i in range(width):
        top = max(top, logits[i])
    total = np.float32(0.0)
    for i in range(width):
        total += exp(logits[i] - top)
    shift = top + np.float32(np.log(total))
    for place in range(num_best):
        log_probs[place] = _LOWEST
        ids[place] = 0
    floor = _LOWEST
    for begin in range(0, width, PART // 8):
        end = min(width, begin + PART // 8)
        most = _LOWEST
        for i in range(begin, end):
            most = max(most, logits[i])
        if most > floor:
            for i in range(begin, end):
                value = logits[i]
                if value > floor:
                    place = num_best - 1
                    while place > 0 and log_probs[place - 1] < value:
                        log_probs[place] = log_probs[place - 1]
                        ids[place] = ids[place - 1]
                        place -= 1
                    log_probs[place] = value
                    ids[place] = i
                    floor = log_probs[num_best - 1]
    for place in range(num_best):
        log_probs[place] -= shift


@kernel
def _mix(x):
    """One splitmix64 output (Steele, Lea and Flood 2014), on uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@kernel
def draw_pass(thread, num_threads, kind, sync, scores, keys, indices, noisy, part, best, best_ids):
    """argmax of scores [R, V] fp32 plus Gumbel noise keyed by (key, output index, token).

    The noise is that of sampling.gumbel; rows that are not noisy get none. part [threads, 1024].
    """
    num_rows, width = scores.shape
    num_parts = (width + PART - 1) // PART
    low, high = share(num_parts, thread, num_threads)
    own = part[thread]
    for row in range(num_rows):
        best[thread, row] = _LOWEST
        best_ids[thread, row] = 0
        stream = _mix(_mix(np.uint64(keys[row])) + np.uint64(indices[row]))
        for index in range(low, high):
            begin = index * PART
            size = min(PART, width - begin)
            if noisy[row]:
                for i in range(size):
                    bits = _mix(stream + np.uint64(begin + i)) >> np.uint64(11)
                    u = np.float32((np.float64(np.int64(bits)) + 0.5) * 1.1102230246251565e-16)
                    u = min(u, np.float32(0.99999994))
                    # -log(1 - u): its series where u is small, as the winners' are
                    series = u + u * u * (_HALF + u * (_THIRD + u * _QUARTER))
                    wait = series if u < np.float32(0.01) else -log(np.float32(1.0) - u)
                    own[i] = scores[row, begin + i] - log(wait)
            else:
                for i in range(size):
                    own[i] = scores[row, begin + i]
            top = _LOWEST
            for i in range(size):
                top = max(top, own[i])
            if top > best[thread, row]:
                i = 0
                while own[i] != top:
                    i += 1
                best[thread, row] = top
                best_ids[thread, row] = begin + i
    barrier(sync.ctypes.data, num_threads, 1)
    if thread == 0:
        for row in range(num_rows):
            for other in range(1, num_threads):
                if best[other, row] > best[0, row]:
                    best[0, row] = best[other, row]
                    best_ids[0, row] = best_ids[other, row]
