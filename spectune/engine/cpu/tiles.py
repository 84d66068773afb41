"""Matrix-product tiles in registers: R rows times C blocks of 16 outputs, summed in order of k.

Weights are packed [outputs/64][k][64] in units of 32 bits: a pair of bf16 along k, or one fp32. One
tile walks k once and keeps R·C vectors of sums, so each output is the same chain of additions
whatever R is. bf16 pairs go through AVX512_BF16's dot product (fp32 sums), fp32 through fused
multiply-add, int8 weights are widened on the way in.
"""

from __future__ import annotations

import functools

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

LANES = 16
BLOCK = 64  # outputs a packed block
MAX_ROWS = 6  # 6 rows x 4 vectors of sums, 4 of weights, 1 of inputs: 29 of 32 registers

_F32, _I64, _I32, _I16, _I8 = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8)


class _BFloat(ir.types._BaseFloatType):  # type: ignore[misc]
    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()

_FLOATS = ir.VectorType(_F32, LANES)
_WORDS = ir.VectorType(_I32, LANES)
_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def _splat(builder, value, vector):
    blank = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(blank, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, blank, ir.Constant(_WORDS, [0] * LANES))


def _pointer(builder, address, offset, kind):
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def _dot_bf16(builder, total, inputs, weights):
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS]), name)
    return builder.call(function, [total, inputs, weights])


def _dot_f32(builder, total, inputs, weights):
    name = "llvm.fma.v16f32"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), name)
    return builder.call(function, [inputs, weights, total])


def _load_weights(builder, kind: str, address, step, block: int):
    """16 outputs of one k step, as the dot product wants them."""
    width = LANES if kind == "int8" else 4 * LANES
    offset = builder.add(builder.mul(step, ir.Constant(_I64, 4 * width)), ir.Constant(_I64, block * width))
    if kind == "int8":
        raw = builder.load(_pointer(builder, address, offset, ir.VectorType(_I8, LANES)))
        raw.align = 16
        return builder.sitofp(builder.sext(raw, _WORDS), _FLOATS)
    vector = builder.load(_pointer(builder, address, offset, _WORDS))
    vector.align = 64
    return builder.bitcast(vector, _PAIRS if kind == "bf16" else _FLOATS)


def _load_input(builder, kind: str, address, offset):
    """One 32-bit unit of a row in all lanes."""
    if kind == "bf16":
        word = builder.load(_pointer(builder, address, offset, _I32))
        return builder.bitcast(_splat(builder, word, _WORDS), _PAIRS)
    return _splat(builder, builder.load(_pointer(builder, address, offset, _F32)), _FLOATS)


def _prefetch(builder, address):
    """Ask for a cache line that will be read soon (second-level cache); any address is harmless."""
    byte_pointer = _I8.as_pointer()
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name)
    if function is None:
        kinds = [byte_pointer, _I32, _I32, _I32]
        function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name)
    hints = [ir.Constant(_I32, value) for value in (0, 2, 1)]
    builder.call(function, [builder.inttoptr(address, byte_pointer), *hints])


@functools.cache
def tile(kind: str, num_rows: int, num_blocks: int, *, adds: bool = False):
    """Intrinsic (inputs, row_bytes, weights, num_steps, out, out_row_bytes, ahead, ahead_bytes), all int64.

    `ahead` is an address to prefetch from, `ahead_bytes` a step of k; tiles of fewer than 4 rows wait for
    memory anyway and ask for nothing.

    Args:
        kind: bf16, f32 or int8 (weights; int8 takes fp32 inputs).
        num_rows: rows R of inputs. num_blocks: vectors of 16 outputs, of the 4 that a block holds.
        adds: start from what `out` (fp32) holds instead of zero.
    """
    dot = _dot_bf16 if kind == "bf16" else _dot_f32

    def generate(context, builder, signature, args):
        inputs, row_bytes, weights, num_steps, out, out_row_bytes, ahead, ahead_bytes = args

        def out_pointer(row: int, block: int):
            offset = builder.mul(out_row_bytes, ir.Constant(_I64, row))
            return _pointer(builder, builder.add(out, offset), ir.Constant(_I64, 4 * LANES * block), _FLOATS)

        cells = [(row, block) for row in range(num_rows) for block in range(num_blocks)]
        starts = [ir.Constant(_FLOATS, [0.0] * LANES) for _ in cells]
        if adds:
            for index, (row, block) in enumerate(cells):
                starts[index] = builder.load(out_pointer(row, block))
                starts[index].align = 4
        before = builder.block
        loop, done = builder.append_basic_block("k"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", num_steps, ir.Constant(_I64, 0)), loop, done)
        builder.position_at_end(loop)
        step = builder.phi(_I64)
        step.add_incoming(ir.Constant(_I64, 0), before)
        sums = [builder.phi(_FLOATS) for _ in cells]
        vectors = [_load_weights(builder, kind, weights, step, block) for block in range(num_blocks)]
        if num_rows >= 4 and not adds:
            line = builder.add(ahead, builder.mul(step, ahead_bytes))
            _prefetch(builder, line)
            _prefetch(builder, builder.add(line, ir.Constant(_I64, 64)))
        column = builder.mul(step, ir.Constant(_I64, 4))
        totals = []
        for row in range(num_rows):
            offset = builder.add(builder.mul(row_bytes, ir.Constant(_I64, row)), column)
            value = _load_input(builder, kind, inputs, offset)
            for block in range(num_blocks):
                totals.append(dot(builder, sums[row * num_blocks + block], value, vectors[block]))
        for index, phi in enumerate(sums):
            phi.add_incoming(starts[index], before)
            phi.add_incoming(totals[index], loop)
        following = builder.add(step, ir.Constant(_I64, 1))
        step.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, num_steps), loop, done)
        builder.position_at_end(done)
        for index in range(len(cells)):
            result = builder.phi(_FLOATS)
            result.add_incoming(starts[index], before)
            result.add_incoming(totals[index], loop)
            totals[index] = result
        for index, (row, block) in enumerate(cells):
            builder.store(totals[index], out_pointer(row, block)).align = 4
        return context.get_dummy_value()

    def typed(context, inputs, row_bytes, weights, num_steps, out, out_row_bytes, ahead, ahead_bytes):
        return types.void(*[types.int64] * 8), generate

    return intrinsic(typed)


def pack(weight: Tensor) -> Tensor:
    """Weight [out, in] in bf16 or fp32 -> packed [out/64, k, 64 · unit]; zeros fill up both edges.

    k counts units of 32 bits along `in`: pairs of bf16, single fp32. The result is aligned to 64 bytes.
    """
    unit = 4 // weight.element_size()
    outputs, inputs = weight.shape
    num_blocks, num_steps = -(-outputs // BLOCK), -(-inputs // unit)
    padded = torch.zeros(num_blocks * BLOCK, num_steps * unit, dtype=weight.dtype)
    padded[:outputs, :inputs] = weight
    blocks = padded.view(num_blocks, BLOCK, num_steps, unit).permute(0, 2, 1, 3)
    return aligned_copy(blocks.reshape(num_blocks, num_steps, BLOCK * unit))


def pack_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [out, in] -> int8 [out/64, in, 64] and one scale an output [out/64 · 64] (symmetric)."""
    outputs, inputs = weight.shape
    num_blocks = -(-outputs // BLOCK)
    scale = torch.ones(num_blocks * BLOCK)
    scale[:outputs] = weight.float().abs().amax(1).clamp_min(1e-12) / 127
    padded = torch.zeros(num_blocks * BLOCK, inputs)
    padded[:outputs] = weight.float()
    levels = (padded / scale.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
    blocks = levels.view(num_blocks, BLOCK, inputs).permute(0, 2, 1)
    return aligned_copy(blocks), scale


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """gate and up [I, in] -> [2·I', in]: blocks of 32 gate rows and the 32 up rows of the same features."""
    half = BLOCK // 2
    num_blocks = -(-gate.shape[0] // half)
    both = torch.zeros(num_blocks, 2, half, gate.shape[1], dtype=gate.dtype)
    for side, weight in enumerate((gate, up)):
        padded = torch.zeros(num_blocks * half, gate.shape[1], dtype=gate.dtype)
        padded[: gate.shape[0]] = weight
        both[:, side] = padded.view(num_blocks, half, -1)
    return both.view(num_blocks * BLOCK, -1)


def aligned_copy(tensor: Tensor) -> Tensor:
    """The same values, contiguous, at an address that is a multiple of 64 bytes."""
    out = aligned_zeros(tensor.shape, tensor.dtype)
    return out.copy_(tensor)


def aligned_zeros(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Zeros at an address that is a multiple of 64 bytes."""
    num_bytes = int(torch.Size(shape).numel()) * dtype.itemsize
    storage = torch.zeros(num_bytes + 64, dtype=torch.uint8)
    start = -storage.data_ptr() % 64
    return storage[start : start + num_bytes].view(dtype).view(shape)
