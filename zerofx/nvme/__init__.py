"""Moving tensors to and from disk, fast and without blocking: threads over O_DIRECT.

    import torch, zerofx.nvme as nvme

    x = torch.randn(4096, 4096)
    with nvme.File("/nvme/activations.bin", "w") as file:
        request = file.submit_write(x, offset=0)   # returns immediately
        ...                                        # compute; do not change x meanwhile
        request.wait()                             # raises NvmeError if the write failed
        y = file.read(torch.empty(4096, 4096))

`File` is a file of raw bytes at offsets that you choose. `NvmeStore` is a file with named extents,
their space reserved in advance, and a checksum per 256 KiB. `aligned_empty` creates tensors that
move without a copy in memory. `IOEngine` owns the threads; files without an engine of their own
share the engine of the process.

    submit -> Request -> pieces -> threads -> preadv / pwritev

`engine.py` accepts requests, `work.py` hands their pieces to threads, `transfer.py` moves them.
"""

from zerofx.errors import NvmeError as NvmeError
from zerofx.nvme.aligned import aligned_empty as aligned_empty
from zerofx.nvme.engine import IOEngine as IOEngine
from zerofx.nvme.file import File as File
from zerofx.nvme.folder import free_bytes as free_bytes
from zerofx.nvme.folder import prepare as prepare
from zerofx.nvme.folder import remove_left_behind as remove_left_behind
from zerofx.nvme.request import Request as Request
from zerofx.nvme.store import NvmeStore as NvmeStore

__all__ = [
    "File",
    "IOEngine",
    "NvmeError",
    "NvmeStore",
    "Request",
    "aligned_empty",
    "free_bytes",
    "prepare",
    "remove_left_behind",
]
