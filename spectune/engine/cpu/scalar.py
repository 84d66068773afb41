"""What the loops do with single numbers: bf16 in and out, exp, and the barrier between threads."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from spectune.engine.cpu.jit import kernel

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


@intrinsic
def widen(context, bits):
    """fp32 value of bf16 bits."""

    def generate(context, builder, signature, args):
        word = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(word, _F32)

    return types.float32(types.uint16), generate


@intrinsic
def narrow(context, value):
    """bf16 bits of an fp32 value, rounded to nearest, ties to even (NaN stays NaN or infinity)."""

    def generate(context, builder, signature, args):
        word = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(word, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.add(builder.add(word, ir.Constant(_I32, 0x7FFF)), odd)
        return builder.trunc(builder.lshr(rounded, ir.Constant(_I32, 16)), _I16)

    return types.uint16(types.float32), generate


@intrinsic
def _from_bits(context, bits):
    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), generate


def value_of(stored):
    """fp32 value of a stored element (bf16 bits as uint16, or fp32)."""


def stored_as(like, value):
    """`value` as an element of the storage of `like`."""


@overload(value_of, inline="always")
def _value_of(stored):
    if stored == types.uint16:
        return lambda stored: widen(stored)
    return lambda stored: stored


@overload(stored_as, inline="always")
def _stored_as(like, value):
    if like == types.uint16:
        return lambda like, value: narrow(value)
    return lambda like, value: value


@kernel
def exp(x):
    """e^x in fp32 to a relative error of (4 + 2|x|) / 2^24, branch-free so that loops vectorise; x below 88."""
    t = max(x * np.float32(1.4426950408889634), np.float32(-126.0))
    whole = np.floor(t + np.float32(0.5))
    f = t - whole
    p = np.float32(1.5353362e-4)
    p = p * f + np.float32(1.3398874e-3)
    p = p * f + np.float32(9.6184370e-3)
    p = p * f + np.float32(5.5503324e-2)
    p = p * f + np.float32(2.4022648e-1)
    p = p * f + np.float32(6.9314720e-1)
    p = p * f + np.float32(1.0)
    return p * _from_bits(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))


@intrinsic
def _to_bits(context, value):
    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], _I32)

    return types.int32(types.float32), generate


@kernel
def log(x):
    """Natural logarithm in fp32 to 2 units in the last place, branch-free; x positive and normal."""
    bits = _to_bits(x) - np.int32(0x3F3504F3)  # mantissa in [sqrt(1/2), sqrt(2))
    exponent = np.float32(bits >> np.int32(23))
    f = _from_bits((bits & np.int32(0x007FFFFF)) + np.int32(0x3F3504F3)) - np.float32(1.0)
    square = f * f
    p = np.float32(7.0376836292e-2)
    p = p * f + np.float32(-1.1514610310e-1)
    p = p * f + np.float32(1.1676998740e-1)
    p = p * f + np.float32(-1.2420140846e-1)
    p = p * f + np.float32(1.4249322787e-1)
    p = p * f + np.float32(-1.6668057665e-1)
    p = p * f + np.float32(2.0000714765e-1)
    p = p * f + np.float32(-2.4999993993e-1)
    p = p * f + np.float32(3.3333331174e-1)
    tail = p * f * square + exponent * np.float32(-2.12194440e-4) - np.float32(0.5) * square
    return f + tail + exponent * np.float32(0.693359375)


@intrinsic
def _arrive(context, address):
    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(_I64, 1), "seq_cst")

    return types.int64(types.int64), generate


@intrinsic
def load_atomic(context, address):
    """The int64 at an address, not before what other threads wrote ahead of it."""

    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_atomic(context, address, value):
    """Store an int64 so that who sees it sees everything written before."""

    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        builder.store_atomic(args[1], pointer, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def give_way(context):
    """Let another thread of the machine run (sched_yield)."""

    def generate(context, builder, signature, args):
        function = builder.module.globals.get("sched_yield")
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(_I32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


_SPINS = 4000  # about ten microseconds before the core is offered to others


@kernel
def wait_for(address, least):
    """Spin until the counter at `address` reaches `least`."""
    spins = 0
    while load_atomic(address) < least:
        spins += 1
        if spins > _SPINS:
            give_way()


@kernel
def wait_while(address, value, spins):
    """Spin at most `spins` times while the counter at `address` equals `value`."""
    while load_atomic(address) == value and spins > 0:
        spins -= 1
        if spins % _SPINS == 0:
            give_way()


@kernel
def barrier(address, num_threads, phase):
    """All threads arrive before one leaves; returns the next phase. Phases count from 1."""
    if num_threads > 1:
        _arrive(address)
        wait_for(address, num_threads * phase)
    return phase + 1
