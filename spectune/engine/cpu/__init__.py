"""The fast twin of the plain pass on CPUs: whole layers as compiled loops over packed weights.

Every row of a pass is computed in an order that does not depend on how many rows stand beside it, nor
on the shape of the draft tree it belongs to. So a token scored while verifying a draft has bit by bit
the logits that plain decoding would have given it, in bf16 too: speculation stays lossless without
near ties. Compiled by numba (LLVM inside the wheel, no compiler of the system), once per machine.
"""
