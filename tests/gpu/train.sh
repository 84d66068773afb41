#!/usr/bin/env bash
# Trains a head on one GPU in resumable calls of at most 8 minutes; see tests/gpu/train.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m tests.gpu.train "$@"
