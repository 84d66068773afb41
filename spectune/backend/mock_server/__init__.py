"""A server that speaks a serving engine's protocol with declared times and acceptance. Simulated.

settings    what is declared: times, acceptance, failures, quirks of the stream
engine      sequences, steps and counters that follow from the settings; knows no protocol
http        just enough HTTP/1.1
vllm_face   vLLM's routes over the engine
sglang_face SGLang's routes over the same engine
running     the server in a thread or a process of its own
"""

from __future__ import annotations

from spectune.backend.mock_server.running import MockServer, mock_process, mock_thread
from spectune.backend.mock_server.settings import Fault, MockSettings

__all__ = ["Fault", "MockServer", "MockSettings", "mock_process", "mock_thread"]
