"""Kernels over flat memory and of fused patterns: one file each, with formula and torch form.

The names imported here are those that an emitted `kernels.py` uses; the import registers the fused
ops.
"""

from zerofx.kernels import ops as ops
from zerofx.kernels.cross_entropy import Options as Options
from zerofx.kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy
from zerofx.kernels.cross_entropy import (
    linear_cross_entropy_backward as linear_cross_entropy_backward,
)
from zerofx.kernels.launch import as_rows as as_rows
from zerofx.kernels.launch import batch_stride as batch_stride
from zerofx.kernels.launch import kernel as kernel
from zerofx.kernels.launch import use_triton as use_triton
from zerofx.kernels.launch import with_unit_stride as with_unit_stride
