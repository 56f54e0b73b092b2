"""A tensor's bytes: read for addressing and keeping, written for restoring.

Both go straight to memory, below autograd, dispatch modes and version counters, exactly as a
communication library does.
"""

from __future__ import annotations

import ctypes
import math

import pyarrow as pa
import torch

_DTYPE_NAMES: dict[torch.dtype, str] = {}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        name = _DTYPE_NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name


def tensor_nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a dense tensor's elements."""
    return tensor.numel() * tensor.element_size()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of ``tensor`` in row-major order, as bytes.

    A contiguous CPU tensor is viewed, not copied: use the bytes before the tensor changes. Others
    are copied; a CUDA tensor is copied to the host, which waits for the current stream. A sparse
    tensor is its coalesced indices followed by its values.
    """
    if tensor.layout is not torch.strided:
        sparse = tensor.detach().coalesce()
        parts = (sparse.indices(), sparse.values())
        return memoryview(b"".join(bytes(tensor_bytes(part)) for part in parts))
    nbytes = tensor.nbytes
    if nbytes == 0:
        return memoryview(b"")
    if not tensor.is_cpu or not tensor.is_contiguous():
        tensor = tensor.detach().to("cpu", copy=True).contiguous()
    return memoryview(_Bytes(tensor, nbytes).array).cast("B")


class _Bytes:
    """Keeps the tensor alive as long as a view of its memory exists."""

    __slots__ = ("array",)

    def __init__(self, tensor: torch.Tensor, nbytes: int) -> None:
        self.array = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
        # ctypes arrays take attributes, and the memoryview holds the array
        self.array.owner = tensor  # type: ignore[attr-defined]


def write_bytes(tensor: torch.Tensor, data: memoryview) -> None:
    """Make ``data`` (row-major bytes) the elements of ``tensor``.

    Raises ``ValueError`` if the sizes differ.
    """
    if tensor.layout is not torch.strided:
        _write_sparse(tensor, data)
        return
    nbytes = tensor.nbytes
    if nbytes != data.nbytes:
        raise ValueError(f"{data.nbytes} recorded bytes do not fit a tensor of {nbytes} bytes")
    if nbytes == 0:
        return
    if tensor.is_cpu and tensor.is_contiguous():
        ctypes.memmove(tensor.data_ptr(), pa.py_buffer(data).address, nbytes)
        return
    # a private copy: frombuffer wants writable memory, the trace's is not
    source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    values = source.view(tensor.dtype).view(tensor.shape)
    # another tensor over the same memory: the program's own would have a new version, and refuses if
    # it was made in inference mode
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    alias.copy_(values)


def _write_sparse(tensor: torch.Tensor, data: memoryview) -> None:
    """Recorded bytes of a sparse tensor: int64 indices, then values."""
    sparse_dim, dense = tensor.sparse_dim(), tensor.shape[tensor.sparse_dim() :]
    per_entry = sparse_dim * 8 + math.prod(dense) * tensor.element_size()
    nnz, rest = divmod(data.nbytes, per_entry)
    if rest:
        raise ValueError(f"{data.nbytes} recorded bytes are no whole number of {per_entry}-byte entries")
    split = sparse_dim * 8 * nnz
    indices = torch.empty(sparse_dim, nnz, dtype=torch.int64)
    values = torch.empty((nnz, *dense), dtype=tensor.dtype)
    write_bytes(indices, data[:split])
    write_bytes(values, data[split:])
    restored = torch.sparse_coo_tensor(
        indices, values, tensor.shape, device=tensor.device, is_coalesced=True, check_invariants=True
    )
    # not into tensor.detach(): that has indices of its own
    with torch._C._AutoDispatchBelowAutograd():
        tensor.copy_(restored)
