#!/usr/bin/env bash
# Measures spectune's engine on one GPU in one call of at most 8 minutes; see tests/gpu/drive.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m tests.gpu.drive "$@"
