"""For tests: a kit of laws for backends, a pytest plugin, latches, a recorder and strict modes.

    from devstream.testing import latch, strict
    from devstream.testing.conformance import BackendConformance   # needs pytest
    from devstream.testing.strategies import programs              # needs hypothesis
    pytest -p devstream.testing.plugin                             # fixtures, markers, --require

`import devstream` loads nothing of this package, and this file loads neither pytest nor Hypothesis.
"""

from devstream.testing._cpu import cpu, strict
from devstream.testing._latch import latch
from devstream.testing.recording import Recorder, RecordingBackend

__all__ = ["Recorder", "RecordingBackend", "cpu", "latch", "strict"]
