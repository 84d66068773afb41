"""Arithmetic that explains measurements: speedup, cost, roofline, waterfall. Runs nothing.

Symbols
    alpha   acceptance probability of one draft token     tau    tokens per step, target's own included
    K, gamma  drafts of a chain                           c      one draft step / one plain step
    T_0     one plain decoding round                      T_D, T_V, T_oh  draft, verify, other seconds
"""
