"""One process of a measured system: answers calls on a pipe, and sleeps on it in between.

Run by `benchmarks.pool`. The first line on stdin names the job (`module:function`) and its
arguments, every further line is a call of one of its methods, and every answer is one JSON line.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any, TextIO


def private_stdout() -> TextIO:
    """Reserve the pipe for answers: all other output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def serve(calls: TextIO, answers: TextIO) -> None:
    """Create the job, then answer calls until the pipe closes; an exception is an answer too."""
    job: Any = None
    for line in calls:
        call = json.loads(line)
        try:
            if job is None:
                module, name = call["job"].split(":")
                job = getattr(importlib.import_module(module), name)(**call["args"])
                result = None
            else:
                result = getattr(job, call["method"])(**call["args"])
            answer = {"result": result}
        except Exception:  # passed to the parent, which raises it
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    serve(sys.stdin, private_stdout())
    os._exit(0)  # the other ranks are gone by now: no orderly teardown of process groups
