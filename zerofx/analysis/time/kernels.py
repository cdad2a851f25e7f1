"""The kernels of a region, each with its operations and the bytes that it moves.

Op by op, every node except a view is a kernel. Inductor leaves matrix products, attention and
similar nodes alone and fuses the nodes between them. All connected nodes at the same depth, counted
in such unfused nodes, form one group, which reads each outside value once and writes the values
that leave it.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.compat.flops import counted_flops
from zerofx.compat.graphs import pytree
from zerofx.ir.graphs import alias_source, is_alias, is_fused, root_producer
from zerofx.ir.meta import nbytes, value
from zerofx.kernels.ops import FUSED

# -- The products of a convolution, pass by pass: its result, and the gradients of its inputs ------


FORWARD, INPUT, WEIGHT = "forward", "input", "weight"
PASSES = (FORWARD, INPUT, WEIGHT)
WINDOWS = {"1x1": 1, "3x3": 9}  # measured windows and their pixels; 3x3 represents all others
_CONVOLUTION = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


@dataclass(frozen=True)
class ConvolutionPass:
    """One of the products of a convolution.

    direction: "forward", or "input" and "weight" for the gradient of either.
    rows: samples x pixels of the result. weight_numel: elements of the weight; `rows` times these
        are multiplied. is_pointwise: the window is one pixel.
    """

    direction: str
    rows: int
    weight_numel: int
    is_pointwise: bool

    @property
    def window(self) -> str:
        return "1x1" if self.is_pointwise else "3x3"


def passes(node: fx.Node) -> tuple[ConvolutionPass, ...]:
    """Return the products of a convolution, or of its backward; () for other nodes.

    A transposed convolution multiplies like the gradient of an input, and its input gradient like a
    forward.
    """
    if node.target not in (_CONVOLUTION, _BACKWARD):
        return ()
    is_backward = node.target is _BACKWARD
    given, weight = _tensors(node)[1:3] if is_backward else _tensors(node)[:2]
    result = _tensors(node)[0] if is_backward else value(node)
    is_transposed = bool(node.args[7 if is_backward else 6])
    outer = given if is_transposed else result
    rows = outer.numel() // outer.shape[1]
    wanted = node.args[10] if is_backward else (True,)
    names = (INPUT, WEIGHT) if is_backward else (FORWARD,)
    turned = {FORWARD: INPUT, INPUT: FORWARD} if is_transposed else {}
    is_pointwise = weight.shape[2:].numel() == 1
    return tuple(
        ConvolutionPass(turned.get(name, name), rows, weight.numel(), is_pointwise)
        for name, is_wanted in zip(names, wanted, strict=False)  # type: ignore[arg-type]
        if is_wanted
    )


def copied_bytes(node: fx.Node, leaves: bool) -> int:
    """Return the bytes moved to change the layout of a compiled forward's images and weights.

    Inductor convolves on CPUs in channels-last layout. Inputs in another layout are copied before,
    and a result that leaves the region is copied back by the kernel that reads it first.
    """
    if node.target is not _CONVOLUTION:
        return 0
    turned = sum(2 * t.nbytes for t in _tensors(node)[:2] if not _has_channels_last(t))
    return turned + (nbytes(value(node)) if leaves else 0)


def _has_channels_last(tensor: Tensor) -> bool:
    """Return whether a value has Inductor's layout; this is the case for images with one side."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    form = formats.get(tensor.dim())
    return form is None or tensor.is_contiguous(memory_format=form)


def _tensors(node: fx.Node) -> list[Tensor]:
    return list(_found(node))


def _found(node: fx.Node) -> Iterator[Tensor]:
    for given in node.args:
        if isinstance(given, fx.Node):
            yield value(given)


PRODUCT, CONVOLUTION, ATTENTION, POINTWISE, REDUCTION, BATCH_NORM, LAYOUT, POOL, OTHER = (
    "matmul", "convolution", "attention", "pointwise", "reduction", "batch_norm", "layout", "pool",
    "other",
)  # fmt: skip
# -- The kernels of a region, each with its operations and the bytes that it moves -----------------


MULTIPLIES = (PRODUCT, CONVOLUTION, ATTENTION)
_APART_KINDS = (*MULTIPLIES, POOL, OTHER)
_REDUCTIONS = ("norm", "softmax", "sum", "mean", "var", "amax", "loss", "logsumexp")
_APART = ("scatter", "index_put", "sort", "embedding_dense_backward", "max_pool", "cumsum", "topk")
_POOLS = tuple(f"aten.{kind}_pool{dims}d" for kind in ("max", "avg") for dims in (1, 2, 3))
_LOOKUPS = ("embedding.", "gather.", "index_select", "index.Tensor", "nll_loss_forward")
_UNREAD = {"nll_loss_backward": (1,)}  # op -> arguments of which it reads only the shape
EXP, TANH, ERF, LOG, POW, SIN = FUNCTIONS = ("exp", "tanh", "erf", "log", "pow", "sin")
# Ops that take a function of each element. The backward of tanh, sigmoid and softmax takes none.
_TAKES = {
    EXP: ("exp", "exp2", "expm1", "sigmoid", "silu", "silu_backward", "_softmax", "_log_softmax",
          "_log_softmax_backward_data", "logsumexp", "softplus", "softplus_backward", "elu",
          "log_sigmoid_forward", "log_sigmoid_backward"),
    TANH: ("tanh", "mish"),
    ERF: ("erf", "erfc", "gelu", "gelu_backward"),
    LOG: ("log", "log2", "log10", "log1p", "logaddexp", "xlogy"),
    POW: ("pow",),
    SIN: ("sin", "cos", "tan"),
}  # fmt: skip
_FUNCTION_OF = {op: function for function, ops in _TAKES.items() for op in ops}
_MULTIPLIED = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)  # exponents of which kernels take no logarithm


@dataclass(frozen=True)
class Kernel:
    """One kernel, or one group that a compiler fuses into a few.

    kind: "matmul", "convolution", "attention", "pool", or by its memory access:
        "pointwise", "reduction", "batch_norm" (statistics of samples), "layout" (a copy into
        another layout), "other".
    nbytes: bytes read and written. functions: exponentials and the like, each with the number of
        elements that it is taken of. window_numel: of a pool, the elements of all windows. dtype:
        format of its products. convolution: the pass of a convolution. attended: of an attention,
        queries x keys x width of one head.
    """

    kind: str
    flops: float
    nbytes: int
    functions: tuple[tuple[str, int], ...] = ()
    window_numel: int = 0
    dtype: torch.dtype = torch.float32
    convolution: ConvolutionPass | None = None
    attended: int = 0


def kernels(nodes: Sequence[fx.Node], compiled: bool, on_cpu: bool = True) -> tuple[Kernel, ...]:
    """Return the kernels of a region's nodes, as Inductor fuses them or op by op.

    on_cpu: Inductor generates CPU code, which copies the inputs of convolutions to another layout.
    """
    work = [n for n in nodes if _works(n)]
    alone = [n for n in work if not compiled or _is_apart(n)]
    found = [k for n in alone for k in _passes(_kernel([n], kind_of(n)), n)]
    if compiled:
        if on_cpu:
            found += _layouts(nodes, alone)
        rest = [n for n in work if not _is_apart(n)]
        for group in _groups(nodes, rest):
            kinds = {kind_of(n) for n in group}
            kind = next((k for k in (BATCH_NORM, REDUCTION) if k in kinds), POINTWISE)
            found.append(_kernel(group, kind))
    return tuple(found)


def _passes(kernel: Kernel, node: fx.Node) -> list[Kernel]:
    """Return a convolution's kernels, one per pass; other kernels unchanged."""
    found = passes(node)
    parts = max(len(found), 1)
    return [
        replace(kernel, flops=kernel.flops / parts, nbytes=kernel.nbytes // parts, convolution=one)
        for one in found or (None,)
    ]


def _layouts(nodes: Sequence[fx.Node], alone: Sequence[fx.Node]) -> list[Kernel]:
    """Return the copies that convert inputs of compiled convolutions to the required layout."""
    inside = set(nodes)
    sizes = (copied_bytes(n, _leaves(n, inside)) for n in alone)
    return [Kernel(LAYOUT, 0.0, size) for size in sizes if size]


def kind_of(node: fx.Node) -> str:
    """Return the kind of kernel of a single node."""
    name = str(node.target)
    if "attention" in name:
        return ATTENTION
    if node_flops(node) > 0.0:
        return CONVOLUTION if "convolution" in name else PRODUCT
    if any(word in name for word in _POOLS) and "backward" not in name:
        return POOL
    if any(word in name for word in _APART):
        return OTHER
    if "batch_norm" in name and "backward" not in name:
        return BATCH_NORM
    is_reduction = any(word in name for word in _REDUCTIONS) and "loss_backward" not in name
    return REDUCTION if is_reduction else POINTWISE


def function_of(node: fx.Node) -> str:
    """Return the function that a node takes of each element; "" if it only adds and multiplies."""
    function = _FUNCTION_OF.get(_op_name(node), "")
    if function == POW and node.args[1] in _MULTIPLIED:
        return ""
    if function == ERF and node.kwargs.get("approximate") == TANH:
        return TANH
    return function


def _op_name(node: fx.Node) -> str:
    """Return the name of an ATen op without its overload: `tanh`."""
    namespace, _, rest = str(node.target).partition(".")
    return rest.partition(".")[0] if namespace == "aten" else ""


def node_flops(node: fx.Node) -> float:
    """Return the operations of a node's matrix products; pointwise work counts only as traffic."""
    if node.target in FUSED:
        return _of_products(node)
    args, kwargs = pytree.tree_map(_value, (node.args, node.kwargs))
    known = counted_flops(node.target, args, kwargs, value(node))
    if known is not None:
        return known
    if "grouped" in str(node.target) and "scaled" not in str(node.target):
        return _of_experts(node)
    return _of_attention(node) if "attention" in str(node.target) else 0.0


def _value(argument: Any) -> Any:
    return value(argument) if isinstance(argument, fx.Node) else argument


def _of_attention(node: fx.Node) -> float:
    """Count two products forward, five backward, of size heads x queries x keys."""
    found = _query_and_key(node)
    if found is None:
        return 0.0
    query, key = found
    products = 5 if "backward" in str(node.target) else 2
    return products * 2.0 * query.numel() * key.shape[-2]


def _query_and_key(node: fx.Node) -> tuple[Tensor, Tensor] | None:
    """Return the query and the key of an attention or of its backward, None of another node."""
    tensors = [v for n in node.all_input_nodes if isinstance(v := value(n), torch.Tensor)]
    full = [t for t in tensors if t.dim() == 4]
    if "attention" not in str(node.target) or len(full) < 3:
        return None
    return (full[1], full[2]) if "backward" in str(node.target) else (full[0], full[1])


def _attended(node: fx.Node) -> int:
    found = _query_and_key(node)
    return 0 if found is None else found[0].shape[-2:].numel() * found[1].shape[-2]


def _of_experts(node: fx.Node) -> float:
    """Count the product of each row and the matrix of its expert, two of them in backward.

    Of rows that are divided among ranks each has its share, which is exact for even loads.
    """
    first, second, ends = (*map(_value, node.args[:3]), None, None)[:3]
    if not isinstance(ends, torch.Tensor):  # a batch of equal groups
        return 0.0
    matrices = second if second.dim() == 3 else value(node)
    times = 2 if "backward" in str(node.target) else 1
    share = matrices.shape[0] / ends.shape[0]
    return times * 2.0 * first.numel() * second.shape[-1] * share


def _of_products(node: fx.Node) -> float:
    """Count a fused loss head's product of rows and weight, three times as often in backward."""
    if "cross_entropy" not in str(node.target):
        return 0.0
    matrices = [v for n in node.all_input_nodes if isinstance(v := value(n), torch.Tensor)]
    hidden, weight = [t for t in matrices if t.dim() == 2][:2]
    times = 3 if "grads" in str(node.target) or "backward" in str(node.target) else 1
    return times * 2.0 * hidden.numel() * weight.shape[0]


def _works(node: fx.Node) -> bool:
    """Return whether a node is a kernel: neither a view nor a part of a result."""
    return (
        node.op == "call_function"
        and node.target is not operator.getitem
        and not is_alias(node)
        and nbytes(value(node)) > 0
    )


def _is_apart(node: fx.Node) -> bool:
    """Return whether a compiler calls a kernel for this node instead of fusing it."""
    return is_fused(node) or kind_of(node) in _APART_KINDS


def _groups(nodes: Sequence[fx.Node], fusible: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield fused groups: nodes of the same depth, connected by values or by common inputs."""
    depth: dict[fx.Node, int] = {}
    inside = set(nodes)
    for node in nodes:
        before = [n for n in node.all_input_nodes if n in inside]
        depth[node] = max((depth[n] + (_works(n) and _is_apart(n)) for n in before), default=0)
    group: dict[fx.Node, fx.Node] = {n: n for n in fusible}

    def root(node: fx.Node) -> fx.Node:
        while group[node] is not node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    for node in fusible:
        for source in map(_source, node.all_input_nodes):
            if source in group and depth[source] == depth[node]:
                group[root(node)] = root(source)
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in fusible:
        found.setdefault(root(node), []).append(node)
    yield from found.values()


def _source(node: fx.Node) -> fx.Node:
    """Return the call that owns the memory of a value."""
    return root_producer(alias_source(root_producer(node)))


def _kernel(group: Sequence[fx.Node], kind: str) -> Kernel:
    """Sum the bytes that a group reads from outside and the bytes that others read of it."""
    inside = set(group)
    reads: dict[fx.Node, int] = {}
    for node in group:
        rows_only = any(word in f"{node.target}" for word in _LOOKUPS)
        unread = [node.args[i] for i in _UNREAD.get(_op_name(node), ())]
        for given in node.all_input_nodes:
            source = _source(given)
            if source in inside or given in unread:
                continue
            size = min(_span(given), nbytes(value(node)) if rows_only else _span(given))
            reads[source] = max(reads.get(source, 0), size)
    writes = sum(nbytes(value(n)) for n in group if len(group) == 1 or _leaves(n, inside))
    tensor = _first(group[0])
    taken: Counter[str] = Counter()
    for node in group:
        if function := function_of(node):
            taken[function] += _numel(node)
    windows = tensor.numel() * _window(group[0]) if kind == POOL else 0
    flops = sum(node_flops(n) for n in group) if kind in MULTIPLIES else 0.0
    return Kernel(
        kind, flops, sum(reads.values()) + writes, tuple(taken.items()), windows, tensor.dtype,
        attended=_attended(group[0]) if kind == ATTENTION else 0,
    )  # fmt: skip


def _first(node: fx.Node) -> torch.Tensor:
    """Return the result of a node, or the first of its results."""
    first = value(node)
    return first if isinstance(first, torch.Tensor) else next(iter(_tensors_in(first)))


def format_of(node: fx.Node) -> torch.dtype:
    """Return the format of a node's products; fp32 for a node without tensors as results."""
    val = value(node)
    has_any = isinstance(val, torch.Tensor) or bool(_tensors_in(val))
    return _first(node).dtype if has_any else torch.float32


def _window(node: fx.Node) -> int:
    """Return the number of elements that a pool reads per element of its result."""
    sides, dims = node.args[1], int(str(node.target).partition("_pool")[2][0])
    assert isinstance(sides, Sequence), sides
    return math.prod(sides) ** (dims if len(sides) == 1 else 1)  # type: ignore[arg-type]


def _leaves(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Return whether something outside a group reads a node, directly or through views."""
    todo = list(node.users)
    while todo:
        user = todo.pop()
        if user in inside:
            continue
        if user.target is operator.getitem or is_alias(user):
            todo += user.users
            continue
        return True
    return False


def _span(node: fx.Node) -> int:
    """Return the bytes of memory that a value covers; a broadcast value's elements count once."""
    val = value(node)
    if not isinstance(val, torch.Tensor):
        return nbytes(val)
    numel = 1
    for size, step in zip(val.shape, val.stride(), strict=True):
        numel *= size if step else 1
    return numel * val.element_size()


def _tensors_in(val: object) -> list[torch.Tensor]:
    return [v for v in val if isinstance(v, torch.Tensor)] if isinstance(val, (tuple, list)) else []


def _numel(node: fx.Node) -> int:
    val = value(node)
    return val.numel() if isinstance(val, torch.Tensor) else 0


def region_key(nodes: Sequence[fx.Node]) -> tuple:
    """Return the key of a region's price: ops, wiring and shapes."""
    number = {n: i for i, n in enumerate(nodes)}
    return tuple(
        (
            node.target,
            tuple((number.get(a), _shape(a)) for a in node.all_input_nodes),
            _shape(node),
            any(u not in number for u in node.users),
        )
        for node in nodes
    )


def _shape(node: fx.Node) -> tuple:
    val = value(node)
    if isinstance(val, torch.Tensor):
        return tuple(val.shape), tuple(val.stride()), val.dtype
    return tuple((tuple(v.shape), v.dtype) for v in _tensors_in(val))
