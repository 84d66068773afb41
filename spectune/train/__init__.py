"""TEACH: self-distilled corpus, training-time test, evaluation and export of EAGLE-3 heads."""
