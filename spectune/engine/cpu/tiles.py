"""Matrix-product tiles in registers: R rows times C blocks of 16 outputs, summed in order of k.

Weights are packed [outputs/64][k][64] in units of 32 bits: a pair of bf16 along k, or one fp32. One
tile walks k once and keeps R·C vectors of sums, so each output is the same chain of additions
whatever R is. bf16 pairs go through AVX512_BF16's dot product (fp32 sums) or, on a CPU without it, as
two numbers widened to fp32 (exactly, for bf16 is the upper half of an fp32); fp32 goes through fused
multiply-add, int8 weights are widened on the way in.
"""

from __future__ import annotations

import functools

import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

LANES = 16
BLOCK = 64  # outputs a packed block
_RUN = 256  # pairs of inputs widened at a time: 6 rows of them are 12 KiB
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


@functools.cache
def has_bf16() -> bool:
    """Whether this CPU multiplies pairs of bf16 (AVX512_BF16)."""
    return bool(binding.get_host_cpu_features().get("avx512bf16", False))


@functools.cache
def has_avx512() -> bool:
    """Whether vectors of 16 fp32 fit a register of this CPU (AVX512F), as the tiles are cut for."""
    return bool(binding.get_host_cpu_features().get("avx512f", False))


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


def _half(builder, words, side: int):
    """The first (0) or second (1) bf16 of 16 pairs as fp32: in memory the first is the lower half."""
    if side == 0:
        words = builder.shl(words, ir.Constant(_WORDS, [16] * LANES))
    else:
        words = builder.and_(words, ir.Constant(_WORDS, [-65536] * LANES))
    return builder.bitcast(words, _FLOATS)


def _below(builder, count):
    """Mask of the first `count` lanes; all of them where there are more."""
    lanes = ir.Constant(_I64, LANES)
    short = builder.trunc(builder.select(builder.icmp_signed("<", count, lanes), count, lanes), _I32)
    return builder.icmp_signed("<", ir.Constant(_WORDS, list(range(LANES))), _splat(builder, short, _WORDS))


def _load_masked(builder, pointer, mask):
    """16 words; lanes that the mask leaves out are zero and not touched in memory."""
    name = "llvm.masked.load.v16i32.p0"
    function = builder.module.globals.get(name)
    if function is None:
        kinds = [pointer.type, _I32, mask.type, _WORDS]
        function = ir.Function(builder.module, ir.FunctionType(_WORDS, kinds), name)
    return builder.call(function, [pointer, ir.Constant(_I32, 4), mask, ir.Constant(_WORDS, [0] * LANES)])


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
        kind: bf16, f32 or int8 (weights; int8 takes fp32 inputs); halves is bf16 on any CPU.
        num_rows: rows R of inputs. num_blocks: vectors of 16 outputs, of the 4 that a block holds.
        adds: start from what `out` (fp32) holds instead of zero.
    """
    walk = _walk_halves if kind == "halves" else _walk

    def generate(context, builder, signature, args):
        inputs, row_bytes, weights, num_steps, out, out_row_bytes, ahead, ahead_bytes = args

        def out_pointer(row: int, block: int):
            offset = builder.mul(out_row_bytes, ir.Constant(_I64, row))
            return _pointer(builder, builder.add(out, offset), ir.Constant(_I64, 4 * LANES * block), _FLOATS)

        cells = [(row, block) for row in range(num_rows) for block in range(num_blocks)]
        sums = [ir.Constant(_FLOATS, [0.0] * LANES) for _ in cells]
        if adds:
            for index, (row, block) in enumerate(cells):
                sums[index] = builder.load(out_pointer(row, block))
                sums[index].align = 4
        rows = [
            builder.add(inputs, builder.mul(row_bytes, ir.Constant(_I64, row))) for row in range(num_rows)
        ]
        asks = (ahead, ahead_bytes) if num_rows >= 4 and not adds else None
        totals = walk(builder, kind, rows, weights, num_steps, sums, asks)
        for index, (row, block) in enumerate(cells):
            builder.store(totals[index], out_pointer(row, block)).align = 4
        return context.get_dummy_value()

    def typed(context, inputs, row_bytes, weights, num_steps, out, out_row_bytes, ahead, ahead_bytes):
        return types.void(*[types.int64] * 8), generate

    return intrinsic(typed)


def _walk(builder, kind: str, rows, weights, num_steps, sums, asks):
    """Sums after all steps of k; `sums` are those before it, row by row."""
    dot = _dot_bf16 if kind == "bf16" else _dot_f32
    num_blocks = len(sums) // len(rows)

    def step(index, sums):
        vectors = [_load_weights(builder, kind, weights, index, block) for block in range(num_blocks)]
        _ask(builder, asks, index)
        column = builder.mul(index, ir.Constant(_I64, 4))
        values = (_load_input(builder, kind, row, column) for row in rows)
        return [
            dot(builder, sums[row * num_blocks + block], value, vectors[block])
            for row, value in enumerate(values)
            for block in range(num_blocks)
        ]

    return _loop(builder, num_steps, sums, step)


def _walk_halves(builder, kind: str, rows, weights, num_steps, sums, asks):
    """As `_walk` for bf16 without a product for it: twice as many multiply-adds, in fp32.

    Inputs are widened a run of steps at a time and then read as numbers, not as pairs, for what the products
    leave of a core is little; weights are widened in registers, first numbers of pairs before second ones.
    """
    num_blocks = len(sums) // len(rows)
    run, lanes = ir.Constant(_I64, _RUN), ir.Constant(_I64, LANES)
    wide = [[cgutils.alloca_once(builder, _F32, size=run) for _ in rows] for _ in (0, 1)]

    def steps(index, sums):
        begin = builder.mul(index, run)
        left = builder.sub(num_steps, begin)
        count = builder.select(builder.icmp_signed("<", left, run), left, run)

        def widen(part, _):
            place = builder.mul(part, lanes)
            offset = builder.mul(builder.add(begin, place), ir.Constant(_I64, 4))
            mask = _below(builder, builder.sub(count, place))
            for number, row in enumerate(rows):
                words = _load_masked(builder, _pointer(builder, row, offset, _WORDS), mask)
                for side in (0, 1):
                    pointer = builder.gep(wide[side][number], [place])
                    half = _half(builder, words, side)
                    builder.store(half, builder.bitcast(pointer, _FLOATS.as_pointer())).align = 4
            return []

        def step(place, sums):
            totals = list(sums)
            at = builder.add(begin, place)
            _ask(builder, asks, at)
            for side in (0, 1):
                vectors = []
                for block in range(num_blocks):
                    offset = builder.mul(at, ir.Constant(_I64, 4 * BLOCK))
                    offset = builder.add(offset, ir.Constant(_I64, 4 * LANES * block))
                    words = builder.load(_pointer(builder, weights, offset, _WORDS))
                    words.align = 64
                    vectors.append(_half(builder, words, side))
                for row in range(len(rows)):
                    value = _splat(builder, builder.load(builder.gep(wide[side][row], [place])), _FLOATS)
                    for block in range(num_blocks):
                        cell = row * num_blocks + block
                        totals[cell] = _dot_f32(builder, totals[cell], value, vectors[block])
            return totals

        _loop(builder, builder.sdiv(builder.add(count, ir.Constant(_I64, LANES - 1)), lanes), [], widen)
        return _loop(builder, count, sums, step)

    num_runs = builder.sdiv(builder.add(num_steps, ir.Constant(_I64, _RUN - 1)), run)
    return _loop(builder, num_runs, sums, steps)


def _loop(builder, count, carried, body):
    """for index in range(count): carried = body(index, carried); what is carried at the end."""
    before = builder.block
    loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed(">", count, ir.Constant(_I64, 0)), loop, done)
    builder.position_at_end(loop)
    index = builder.phi(_I64)
    index.add_incoming(ir.Constant(_I64, 0), before)
    values = [builder.phi(value.type) for value in carried]
    found = body(index, values)
    following = builder.add(index, ir.Constant(_I64, 1))
    end = builder.block
    index.add_incoming(following, end)
    for phi, first, later in zip(values, carried, found, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, end)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    results = []
    for first, later in zip(carried, found, strict=True):
        result = builder.phi(first.type)
        result.add_incoming(first, before)
        result.add_incoming(later, end)
        results.append(result)
    return results


def _ask(builder, asks, index) -> None:
    """Prefetch what step `index` asks for, where this tile asks for anything."""
    if asks is not None:
        line = builder.add(asks[0], builder.mul(index, asks[1]))
        _prefetch(builder, line)
        _prefetch(builder, builder.add(line, ir.Constant(_I64, 64)))


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
