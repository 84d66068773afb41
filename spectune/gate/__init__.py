"""GUARD: a gate file, the evidence of a check, its judgement and outcomes. Runs nothing by itself."""
