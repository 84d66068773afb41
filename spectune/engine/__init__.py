"""This decodes: the reference engine, plain and speculative, on CPU and CUDA from the same code.

Letters of tensor shapes, used everywhere in engine/ and draft/:
    B batch rows      T tokens per row in one pass    N tree nodes, the root included
    S attended keys   H hidden size                   V target vocabulary
    D draft vocabulary in shapes ([.., D]), draft depth in prose
"""
