"""`fuzz`: the modules of this folder, and how many examples are tried.

``DEVSTREAM_FUZZ=500`` sets the number of examples of each test; by default there are as many as an ordinary run
has time for. ``DEVSTREAM_FUZZ_INDUCTOR=20`` is how many programs Inductor compiles, by default none.
``DEVSTREAM_FUZZ_DEVICE=cuda`` runs them there; the default is the CPU.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for _name in ("_oracle", "_programs"):
    _known = f"_fuzz{_name}"
    if _known not in sys.modules:
        _spec = importlib.util.spec_from_file_location(_known, Path(__file__).with_name(f"{_name}.py"))
        sys.modules[_known] = _module = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(_module)
