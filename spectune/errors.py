"""Every failure that spectune can name, as one tree; imports nothing.

SpectuneError (exit 1)
├── UsageError (2)              a flag, a config key or a file the user gave cannot be used
│   ├── WorkloadError (2)       a prompt file: names file, line and value
│   ├── CheckpointError (2)     target or head: names tensor, both shapes, likely cause
│   ├── InfeasibleConfig (2)    a speculative configuration that no engine can run
│   └── BackendMissing (2)      the backend or an optional dependency is not installed
├── RunError (1)                measuring failed
│   ├── DownloadFailed (1)      the default target could not be fetched
│   ├── OutOfMemory (1)         a point did not fit
│   └── EngineFailure (1)       an engine died or answered nonsense
├── StoreError (1)              a run directory is damaged or of another version
├── PhysicsError (1)            a row that cannot be true
├── CheckFailed (3)             a check failed: lossy output, regression, withdrawn policy
├── Inconclusive (4)            the noise is larger than the effect
├── NotComparable (5)           fingerprints differ
└── MetricMissing (6)           a metric that the check needs was never observed
"""


class SpectuneError(Exception):
    """Base of all named failures; `hint` says what to do next."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(SpectuneError):
    exit_code = 2


class WorkloadError(UsageError):
    pass


class CheckpointError(UsageError):
    pass


class InfeasibleConfig(UsageError):
    pass


class BackendMissing(UsageError):
    pass


class RunError(SpectuneError):
    pass


class DownloadFailed(RunError):
    pass


class OutOfMemory(RunError):
    pass


class EngineFailure(RunError):
    pass


class StoreError(SpectuneError):
    pass


class PhysicsError(SpectuneError):
    pass


class CheckFailed(SpectuneError):
    exit_code = 3


class Inconclusive(SpectuneError):
    exit_code = 4


class NotComparable(SpectuneError):
    exit_code = 5


class MetricMissing(SpectuneError):
    exit_code = 6
