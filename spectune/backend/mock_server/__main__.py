"""`python -m spectune.backend.mock_server '{settings}'`: one JSON line with the address, then serve."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

from spectune.backend.mock_server.running import HOST, announce, listen
from spectune.backend.mock_server.settings import MockSettings


def main() -> None:
    """Serve the settings of the first argument until interrupted."""
    settings = MockSettings.from_dict(json.loads(sys.argv[1]))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(listen(settings, HOST, 0, started=announce))


if __name__ == "__main__":
    main()
