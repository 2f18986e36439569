"""Build the stand-in for a GPU, `null_gpu.c`, for the CUDA build of PyTorch in this environment.

    python tests/null_gpu/build.py FOLDER

Makes FOLDER/libnull_gpu.so, to be preloaded, and FOLDER/lib, where it has the names of the driver and of NVML. It needs
gcc and a second. `environment` returns the variables that a process needs to see the device.

The symbols come from the installed packages, so that another version of PyTorch needs no change here: each function of
NVIDIA's libraries that PyTorch's libraries call, and each function of the driver that cuda.h declares. A function that
null_gpu.c leaves out returns 0. A matmul is counted as a kernel too.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
REPLACED = ("cudart", "cublas", "cublasLt", "cudnn", "cufft", "cusolver", "cusparse", "cusparseLt", "nccl")
"""NVIDIA's libraries whose functions do nothing. The others need no device to load."""
MATMUL = re.compile(r"cublas\w*(gemm|Gemm|trsm|geam)|cublasLtMatmul$|cusparseSp?MM$")
TARGET = """
#define NV_IF_TARGET(...)
#define NV_IF_ELSE_TARGET(...)
#define NV_DISPATCH_TARGET(...)
#define NV_IS_DEVICE 0
#define NV_IS_HOST 1
"""
"""Replacement of a C++ header of CCCL, which cuda_fp16.h includes."""


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    build(Path(sys.argv[1]))
    print("\n".join(f"{key}={value}" for key, value in environment(Path(sys.argv[1])).items()))


def environment(folder: Path) -> dict[str, str]:
    """Variables of a process that sees the device. They act from its start."""
    folder = folder.resolve()
    return {
        "LD_PRELOAD": str(folder / "libnull_gpu.so"),
        "LD_LIBRARY_PATH": str(folder / "lib"),
        "TRITON_LIBCUDA_PATH": str(folder / "lib"),
        "TORCHINDUCTOR_MAX_AUTOTUNE": "0",  # timings mean nothing
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def has_cuda_build() -> bool:
    """Return True if the PyTorch of this environment is a CUDA build with NVIDIA's packages beside it."""
    return (_package("torch") / "lib" / "libtorch_cuda.so").exists() and find_spec("nvidia") is not None


def build(folder: Path) -> None:
    """Build the library.

    Raises:
        RuntimeError: gcc fails, with what it prints.
    """
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    (folder / "include/nv").mkdir(parents=True, exist_ok=True)
    (folder / "include/nv/target").write_text(TARGET)
    nvidia = [path for root in _roots("nvidia") for path in sorted(root.glob("*/include"))]
    headers = [f"-I{path}" for path in [*nvidia, folder / "include"]]
    headers += ["-idirafter", str(_package("triton") / "backends/nvidia/include")]  # crt, which no package of CUDA has
    written = folder / "null_gpu.o"
    _run("gcc", "-std=gnu11", "-O1", "-w", "-fPIC", "-c", str(HERE / "null_gpu.c"), *headers, "-o", str(written))
    rest = (needed_functions() | driver_functions(headers)) - symbols([written], "--defined-only")
    source = folder / "rest.c"
    source.write_text("\n".join(["void null_gpu_launch(const char *);", *map(_function, sorted(rest)), ""]))
    library = folder / "libnull_gpu.so"
    flags = ["-shared", "-fPIC", "-O1", "-w", "-fno-builtin"]
    _run("gcc", *flags, "-o", str(library), str(written), str(source), "-ldl", "-lpthread", "-lrt")
    for name in ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"):
        link = folder / "lib" / name
        link.unlink(missing_ok=True)
        link.symlink_to(library.resolve())


def needed_functions() -> set[str]:
    """Return the functions of the replaced libraries that PyTorch's libraries call."""
    replaced = [
        library
        for root in _roots("nvidia")
        for name in REPLACED
        for library in sorted(root.glob(f"*/lib/lib{name}.so.*"))
    ]
    return symbols(sorted((_package("torch") / "lib").glob("*.so")), "--undefined-only") & symbols(
        replaced, "--defined-only"
    )


def driver_functions(headers: list[str]) -> set[str]:
    """Return the functions of the driver, which is in no package: those of cuda.h after its macros."""
    command = ["gcc", "-E", "-P", *headers, "-include", "cuda.h", "-x", "c", "/dev/null"]
    return set(re.findall(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(", _run(*command)))


def symbols(libraries: Iterable[Path], which: str) -> set[str]:
    """Return the names of symbols, without their versions: those that libraries define, or those that they lack."""
    found: set[str] = set()
    for library in libraries:
        dynamic = [] if library.suffix == ".o" else ["-D"]
        lines = _run("nm", *dynamic, which, str(library)).splitlines()
        found.update(line.split()[-1].split("@")[0] for line in lines if line.split()[-2] in "TWUi")
    return found


def _function(name: str) -> str:
    launch = f'null_gpu_launch("{name}"); ' if MATMUL.match(name) else ""
    return f"long {name}(void) {{ {launch}return 0; }}"


def _package(name: str) -> Path:
    return _roots(name)[0]


def _roots(name: str) -> list[Path]:
    """Return the folders of an installed package, without importing it."""
    spec = find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise RuntimeError(f"{name} is not installed: the stand-in needs the CUDA build of PyTorch (torch===VERSION)")
    return [Path(path) for path in spec.submodule_search_locations]


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{result.stderr.strip()}")
    return result.stdout


if __name__ == "__main__":
    main()
