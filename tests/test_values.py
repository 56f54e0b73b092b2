"""A tensor's bytes, there and back: every kind of tensor, below autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ranklens_core.c10d.values import dtype_name, tensor_bytes, write_bytes

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any bits, NaNs and denormals among them (a bool's can only be 0 and 1)."""
    size = torch.empty((), dtype=dtype).element_size()
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, size), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def layouts(whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of an 8x6x4 tensor."""
    return {
        "contiguous": whole,
        "transposed": whole.transpose(0, 2),
        "sliced": whole[1:7:2, ::3],
        "column": whole[:, 2, 3],
        "channels last": whole.unsqueeze(0).contiguous(memory_format=torch.channels_last),
        "scalar": whole[3, 2, 1],
        "empty": whole[:, :0],
        "reshaped": whole.view(-1),
    }


@pytest.mark.parametrize("layout", layouts(torch.zeros(8, 6, 4)))
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_bits_survive(dtype: torch.dtype, layout: str) -> None:
    source = layouts(random_bits(dtype, 8, 6, 4))[layout]
    whole = random_bits(dtype, 8, 6, 4)
    target = layouts(whole)[layout]
    others = whole.clone()
    data = bytes(tensor_bytes(source))
    assert len(data) == source.numel() * source.element_size()

    write_bytes(target, memoryview(data))

    assert bytes(tensor_bytes(target)) == data
    # row-major, whatever the strides are
    rows = source.contiguous().flatten()
    assert data == rows.view(torch.uint8).numpy().tobytes() if source.numel() else data == b""
    # nothing outside the view changed
    layouts(others)[layout].copy_(target)
    if layout != "channels last":
        assert bytes(tensor_bytes(whole)) == bytes(tensor_bytes(others))


@given(st.lists(st.integers(0, 4), max_size=4), st.sampled_from(DTYPES), st.integers(0, 2**16))
def test_any_shape(shape: list[int], dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    source, target = random_bits(dtype, *shape), random_bits(dtype, *shape)
    write_bytes(target, tensor_bytes(source))
    assert bytes(tensor_bytes(target)) == bytes(tensor_bytes(source))


def test_contiguous_tensor_is_viewed_and_kept_alive() -> None:
    tensor = torch.tensor([1, 2], dtype=torch.uint8)
    data = tensor_bytes(tensor)
    tensor[0] = 9
    assert bytes(data) == b"\x09\x02"
    del tensor
    assert bytes(data) == b"\x09\x02"


def test_sparse_tensor() -> None:
    source = torch.sparse_coo_tensor(
        torch.tensor([[0, 4, 0], [1, 2, 1]]),
        torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]]),
        (5, 3, 2),
        check_invariants=True,
    )
    target = torch.sparse_coo_tensor(
        torch.tensor([[3], [0]]), torch.ones(1, 2), (5, 3, 2), check_invariants=True
    )
    write_bytes(target, tensor_bytes(source))
    assert torch.equal(target.to_dense(), source.to_dense())
    assert bytes(tensor_bytes(target)) == bytes(tensor_bytes(source))
    empty = torch.sparse_coo_tensor(
        torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0, 2), (5, 3, 2), check_invariants=True
    )
    write_bytes(target, tensor_bytes(empty))
    assert not target.to_dense().any()


@pytest.mark.parametrize("strided", [False, True])
def test_writing_is_unseen_by_autograd(strided: bool) -> None:
    leaf = torch.zeros(4, 2, requires_grad=True)
    product = (leaf * leaf).sum()
    target = leaf.t() if strided else leaf
    version = leaf._version
    write_bytes(target, tensor_bytes(torch.full((8,), 3.0)))
    assert leaf._version == version
    assert leaf.grad_fn is None
    product.backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[6.0] * 2] * 4


@pytest.mark.parametrize("strided", [False, True])
def test_tensor_made_in_inference_mode(strided: bool) -> None:
    with torch.inference_mode():
        whole = torch.zeros(3, 2)
    target = whole.t() if strided else whole
    write_bytes(target, tensor_bytes(torch.ones(6)))
    assert whole.tolist() == [[1.0, 1.0]] * 3
    with torch.inference_mode():
        write_bytes(target, tensor_bytes(torch.full((6,), 2.0)))
    assert whole.tolist() == [[2.0, 2.0]] * 3


@pytest.mark.parametrize(
    "target", [torch.zeros(3), torch.zeros(4, 2)[:, 0], torch.zeros(0)], ids=["dense", "strided", "empty"]
)
def test_wrong_size_is_refused(target: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=f"8 recorded bytes do not fit a tensor of {target.nbytes} bytes"):
        write_bytes(target, memoryview(bytes(8)))
    assert not target.any()


def test_part_of_a_sparse_entry_is_refused() -> None:
    target = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (5,), check_invariants=True)
    with pytest.raises(ValueError, match="no whole number of 12-byte entries"):
        write_bytes(target, memoryview(bytes(13)))
