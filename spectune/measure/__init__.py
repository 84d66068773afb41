"""MEASURE: requests of a cell, interleaved arms, the judgement of a point, cautions."""
