"""The NVMe tier: tensors to and from disk, by threads, past the page cache.

    submit -> Request -> pieces -> threads -> preadv / pwritev

`engine.py` takes requests, `work.py` hands their pieces to threads, `transfer.py` moves them.
`file.py` and `store.py` are what others use.
"""
