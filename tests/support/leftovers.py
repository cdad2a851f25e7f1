"""What nothing may leave behind in a process."""

from __future__ import annotations

import torch


def python_dispatches() -> bool:
    """Return whether every operator of this thread goes through Python, as in symbolic tracing.

    It makes each operator several times as slow, and a collective holds the GIL.
    """
    key = torch._C.DispatchKey.PythonDispatcher
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(key))
