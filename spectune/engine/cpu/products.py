"""Products of a few rows with packed weights, and what is done to each block of 64 outputs.

A weight is three addresses: packed values, fp32 bias and fp32 scale (0 where it has none). Threads
share the blocks of outputs; each block is finished where it was summed.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from spectune.engine.cpu.addresses import as_floats
from spectune.engine.cpu.jit import kernel
from spectune.engine.cpu.scalar import exp, stored_as, value_of
from spectune.engine.cpu.tiles import MAX_ROWS, has_bf16, tile

_BLOCK = 64
_HALF = 32


def multiply_rows(kind, n, x, x_bytes, w, steps, out, out_bytes, ahead, ahead_bytes):
    """out [n, 64] = x [n, steps units] times one packed block; `kind` is an element of the weights' kind."""


def add_rows(kind, n, x, x_bytes, w, steps, out, out_bytes, ahead, ahead_bytes):
    """As `multiply_rows`, added to what `out` holds."""


def _dispatch(kind: str, adds: bool):
    one, two, three, four, five, six = (tile(kind, rows, 4, adds=adds) for rows in range(1, MAX_ROWS + 1))

    def by_rows(kind, n, x, x_bytes, w, steps, out, out_bytes, ahead, ahead_bytes):
        if n == 1:
            one(x, x_bytes, w, steps, out, out_bytes, ahead, ahead_bytes)
        elif n == 2:
            two(x, x_bytes, w, steps, out, out_bytes, ahead, ahead_bytes)
        elif n == 3:
            three(x, x_bytes, w, steps, out, out_bytes, ahead, ahead_bytes)
        elif n == 4:
            four(x, x_bytes, w, steps, out, out_bytes, ahead, ahead_bytes)
        elif n == 5:
            five(x, x_bytes, w, steps, out, out_bytes, ahead, ahead_bytes)
        else:
            six(x, x_bytes, w, steps, out, out_bytes, ahead, ahead_bytes)

    return by_rows


_KINDS = {types.uint16: "bf16" if has_bf16() else "halves", types.float32: "f32", types.int8: "int8"}


@overload(multiply_rows)
def _multiply_rows(kind, n, x, x_bytes, w, steps, out, out_bytes, ahead, ahead_bytes):
    return _dispatch(_KINDS[kind], adds=False)


@overload(add_rows)
def _add_rows(kind, n, x, x_bytes, w, steps, out, out_bytes, ahead, ahead_bytes):
    return _dispatch(_KINDS[kind], adds=True)


@kernel
def chunk(first, num_rows):
    """Rows of the next tile from `first` on: equal parts of at most six."""
    left = num_rows - first
    tiles = (left + 5) // 6
    return (left + tiles - 1) // tiles


@kernel
def share(num_units, thread, num_threads):
    """Half-open range of units that a thread works on."""
    return num_units * thread // num_threads, num_units * (thread + 1) // num_threads


@kernel
def block_sums(kind, x, first, n, num_rows, weight, block, steps, sums):
    """sums [n, 64] fp32 of rows first.. of x with one block, scale and bias applied.

    Each tile of rows asks for its part of the next block meanwhile: sums and memory overlap.
    """
    num_parts = (num_rows + 5) // 6
    part = first * num_parts // num_rows
    size = steps * _BLOCK * 4
    if kind.itemsize == 1:
        size = steps * _BLOCK
    ahead = weight[0] + (block + 1) * size + part * size // num_parts
    ahead_bytes = size // (steps * num_parts)
    if num_parts == 1:  # one tile waits for memory all the time: asking ahead only gets in its way
        ahead, ahead_bytes = sums.ctypes.data, 0
    multiply_rows(
        kind[0],
        n,
        x.ctypes.data + first * x.strides[0],
        x.strides[0],
        weight[0] + block * size,
        steps,
        sums.ctypes.data,
        sums.strides[0],
        ahead,
        ahead_bytes,
    )
    if weight[2] != 0:
        scale = as_floats(weight[2] + block * _BLOCK * 4, _BLOCK)
        for row in range(n):
            for lane in range(_BLOCK):
                sums[row, lane] *= scale[lane]
    if weight[1] != 0:
        bias = as_floats(weight[1] + block * _BLOCK * 4, _BLOCK)
        for row in range(n):
            for lane in range(_BLOCK):
                sums[row, lane] += bias[lane]


@kernel
def project(kind, x, num_rows, weight, steps, out, width, sums, thread, num_threads):
    """out [rows, width] = x times weight, in the storage of out."""
    low, high = share((width + _BLOCK - 1) // _BLOCK, thread, num_threads)
    for block in range(low, high):
        first = 0
        lanes = min(_BLOCK, width - block * _BLOCK)
        while first < num_rows:
            n = chunk(first, num_rows)
            block_sums(kind, x, first, n, num_rows, weight, block, steps, sums)
            for row in range(n):
                for lane in range(lanes):
                    out[first + row, block * _BLOCK + lane] = stored_as(out[0, 0], sums[row, lane])
            first += n


@kernel
def project_add(kind, x, num_rows, weight, steps, out, width, sums, thread, num_threads):
    """out [rows, width] += x times weight (rounded first, as the plain pass does)."""
    low, high = share((width + _BLOCK - 1) // _BLOCK, thread, num_threads)
    for block in range(low, high):
        first = 0
        lanes = min(_BLOCK, width - block * _BLOCK)
        while first < num_rows:
            n = chunk(first, num_rows)
            block_sums(kind, x, first, n, num_rows, weight, block, steps, sums)
            for row in range(n):
                for lane in range(lanes):
                    column = block * _BLOCK + lane
                    product = value_of(stored_as(out[0, 0], sums[row, lane]))
                    out[first + row, column] = stored_as(
                        out[0, 0], value_of(out[first + row, column]) + product
                    )
            first += n


@kernel
def project_silu(kind, x, num_rows, weight, steps, out, width, sums, thread, num_threads):
    """out [rows, width] = silu(gate) · up; a block holds 32 gates and the 32 ups of the same features."""
    low, high = share((width + _HALF - 1) // _HALF, thread, num_threads)
    for block in range(low, high):
        first = 0
        lanes = min(_HALF, width - block * _HALF)
        while first < num_rows:
            n = chunk(first, num_rows)
            block_sums(kind, x, first, n, num_rows, weight, block, steps, sums)
            for row in range(n):
                for lane in range(lanes):
                    gate = value_of(stored_as(out[0, 0], sums[row, lane]))
                    up = value_of(stored_as(out[0, 0], sums[row, _HALF + lane]))
                    gated = value_of(stored_as(out[0, 0], gate / (np.float32(1.0) + exp(-gate))))
                    out[first + row, block * _HALF + lane] = stored_as(out[0, 0], gated * up)
            first += n


@kernel
def rms_norm(x, num_rows, weight, eps, out, offset):
    """out[:, offset : offset + H] = x / rms(x) · weight, sums in fp32."""
    width = weight.shape[0]
    for row in range(num_rows):
        total = np.float32(0.0)
        for i in range(width):
            value = np.float32(value_of(x[row, i]))
            total += value * value
        inverse = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            out[row, offset + i] = stored_as(out[0, 0], np.float32(value_of(x[row, i])) * inverse * weight[i])
