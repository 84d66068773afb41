"""Arrays over raw addresses, for weights that a kernel finds in a table."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from spectune.engine.cpu.jit import kernel


@intrinsic
def _pointer(context, address):
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@kernel
def as_floats(address, size):
    """fp32 array [size] at an address."""
    return carray(_pointer(address), size, np.float32)


@kernel
def as_halves(address, size):
    """Array [size] of bf16 bits at an address."""
    return carray(_pointer(address), size, np.uint16)
