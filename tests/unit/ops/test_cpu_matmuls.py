"""Which library multiplies float32 matrices on a CPU, and that it rounds nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from titanlite.ops import cpu, pick_kernels

FAMILY = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\n"
AMD = FAMILY + "flags\t\t: fpu avx2 avx512f avx512_bf16\n\nprocessor\t: 1\n"


@pytest.fixture(autouse=True)
def _choice_as_it_was() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.matmul.fp32_precision = "none"  # as at first  # pyright: ignore[reportAttributeAccessIssue]
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("about", "is_onednn"),
    [
        (AMD, True),
        (AMD.replace("AuthenticAMD", "GenuineIntel"), False),
        (AMD.replace("26", "25"), False),
        (AMD.replace("26", "25").replace("avx512f avx512_bf16", ""), False),
        (AMD.replace("avx512f ", ""), False),
        (AMD.replace("avx512f", "avx512f amx_tile"), False),
        (AMD.replace("flags\t\t: fpu avx2 avx512f", "flags\t\t: fpu") + "flags\t\t: avx512f\n", False),
        (None, False),
    ],
)
def test_only_the_family_where_it_is_faster(
    about: str | None, is_onednn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if about is not None:
        (tmp_path / "cpuinfo").write_text(about)
    monkeypatch.setattr(cpu, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "equal", lambda *_: True)  # whatever machine this is
    pick_kernels(torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == ("medium" if is_onednn else "highest")
    assert ("oneDNN" in cpu.describe_cpu()) == is_onednn
    family = "unknown" if about is None else 25 if "25" in about else 26
    assert f"family {family}, {torch.backends.cpu.get_cpu_capability()};" in cpu.describe_cpu()


def test_what_the_user_has_chosen_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(AMD)
    monkeypatch.setattr(cpu, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.set_float32_matmul_precision("highest")
    pick_kernels(torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("what", ["rounded products", "a GPU"])
def test_not_where_products_would_be_rounded(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(AMD)
    monkeypatch.setattr(cpu, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: what == "a GPU")
    monkeypatch.setattr(torch, "equal", lambda *_: what == "a GPU")
    pick_kernels(torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("rows", [1, 17, 64, 2048])
def test_products_are_float32(rows: int) -> None:
    pick_kernels(torch.device("cpu"))
    torch.manual_seed(0)
    x, weight, out = torch.randn(rows, 256), torch.randn(96, 256), torch.randn(rows, 96)

    def assert_exact(product: Tensor, a: Tensor, b: Tensor) -> None:
        exact, size = a.double() @ b.double(), a.abs().double() @ b.abs().double()
        assert ((product - exact).abs() / size).max() < 2e-6  # bfloat16 operands: 2e-3

    assert_exact(x @ weight.T, x, weight.T)
    assert_exact(out @ weight, out, weight)
    assert_exact(out.T @ x, out.T, x)
    assert_exact(torch.addmm(torch.zeros(rows, 256), out, weight), out, weight)
    assert_exact(torch.bmm(x.expand(3, -1, -1), weight.T.expand(3, -1, -1))[2], x, weight.T)
