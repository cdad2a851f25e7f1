"""What lives off the device: its memory on the host and on NVMe, and the ways there and back."""
