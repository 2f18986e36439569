"""Products by another library are the same products."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from titanlite import host
from titanlite.models.layers import Linear


@pytest.fixture
def onednn() -> Iterator[None]:
    library = host._multiply_by_onednn.__wrapped__()
    yield
    library._destroy()


def products() -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(48, 32, generator=generator), torch.randn(32, 24, generator=generator)
    return {
        "rows": (a, b),
        "a transposed weight": (a, b.t().contiguous().t()),
        "a transposed input": (a.t().contiguous().t(), b),
        "rows apart": (torch.randn(48, 64, generator=generator)[:, ::2], b),
        "no rows": (a[:0], b),
        "nothing to sum": (a[:, :0], b[:0]),
        "float64": (a.double(), b.double()),
        "bfloat16": (a.bfloat16(), b.bfloat16()),
    }


def calls_of_onednn(a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    with torch.profiler.profile() as profile:
        product = a @ b
    return product, sum(it.count for it in profile.key_averages() if it.key == "mkldnn::_linear_pointwise")


@pytest.mark.usefixtures("onednn")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN here")
@pytest.mark.parametrize("name", products())
def test_products_by_onednn(name: str) -> None:
    a, b = products()[name]
    product, calls = calls_of_onednn(a, b)
    assert calls == (name in ("rows", "a transposed weight"))
    assert (product.shape, product.dtype) == ((len(a), b.shape[1]), a.dtype)
    expected = (a.double() @ b.double()).to(a.dtype)
    torch.testing.assert_close(product, expected, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.usefixtures("onednn")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN here")
def test_gradients_of_products_by_onednn() -> None:
    torch.manual_seed(0)
    layer, x = Linear(16, 24), torch.randn(2, 8, 16, requires_grad=True)
    layer(x).square().sum().backward()
    with torch.no_grad():
        d_y = 2 * (x @ layer.weight.t()).flatten(0, 1)
        assert x.grad is not None
        assert layer.weight.grad is not None
        torch.testing.assert_close(x.grad.flatten(0, 1), (d_y.double() @ layer.weight.double()).float())
        torch.testing.assert_close(layer.weight.grad, (d_y.double().t() @ x.flatten(0, 1).double()).float())


def test_only_where_mkl_holds_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[None] = []
    monkeypatch.setattr(host, "_multiply_by_onednn", lambda: made.append(None))
    for answer in (False, True):
        monkeypatch.setattr(host, "mkl_holds_back", lambda answer=answer: answer)
        host.multiply_by_onednn()
        assert len(made) == answer


@pytest.mark.usefixtures("onednn")
def test_what_cannot_be_multiplied_is_an_error_as_ever() -> None:
    a, b = torch.ones(4, 6), torch.ones(5, 3)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.mm(a, b)
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(a, torch.ones(6, 3, dtype=torch.float64))
