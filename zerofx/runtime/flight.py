"""A collective of one bucket, on its way."""

from __future__ import annotations

from torch import Tensor

from zerofx.comm.collectives import Work
from zerofx.layout.buckets import Bucket


def full_name(bucket: Bucket) -> str:
    """Name a bucket for errors: its units and its first parameters."""
    names = ", ".join(bucket.names[:3]) + (", ..." if len(bucket.names) > 3 else "")
    return f"bucket {bucket.index} ({bucket.label()}: {names})"


def label(verb: str, bucket: Bucket) -> str:
    """Name a collective for the watchdog."""
    return f"{verb} of {full_name(bucket)}"


class Flight:
    """A launched transfer: `tensor` may be read only after `wait`."""

    __slots__ = ("bucket", "tensor", "work")

    def __init__(self, tensor: Tensor | None, work: Work | None, bucket: int) -> None:
        self.tensor = tensor
        self.work = work
        self.bucket = bucket

    def wait(self) -> Tensor | None:
        """Return what was delivered (None for a reduction that was put off)."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        tensor, self.tensor = self.tensor, None  # the schedule's name for this outlives it
        return tensor
