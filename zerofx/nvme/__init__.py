"""Move tensors to disk and back, fast, without blocking: threads over O_DIRECT.

    import torch, zerofx.nvme as nvme

    x = torch.randn(4096, 4096)
    with nvme.File("/nvme/activations.bin", "w") as file:
        request = file.submit_write(x, offset=0)   # returns at once
        ...                                        # compute meanwhile; leave x as it is
        request.wait()                             # raises NvmeError if it could not be written
        y = file.read(torch.empty(4096, 4096))

`File` is a file of raw bytes at offsets that you choose. `NvmeStore` is a file with a named place
for each value, its space taken beforehand, and a checksum for every 256 KiB. `aligned_empty` makes
tensors that move without a copy in memory. `IOEngine` has the threads; without one of your own,
all files share the process's.

    submit -> Request -> pieces -> threads -> preadv / pwritev

`engine.py` takes requests, `work.py` hands their pieces to threads, `transfer.py` moves them.
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
