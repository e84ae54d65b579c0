"""The copy kernel's source, compiled for a card by NVRTC, CUDA's run-time compiler.

The one file that imports `cuda.bindings.nvrtc`. torch's CUDA wheels bring the library, and cuda-bindings finds it there.
"""

from importlib.resources import files
from typing import Any

from swapkv.streams.cuda_driver import CudaError

try:
    from cuda.bindings import nvrtc as _nvrtc
except ImportError as error:
    raise ImportError("CUDA devices need an extra: pip install 'swapkv[cuda]'") from error

nvrtc: Any = _nvrtc
SOURCE = "cuda_kernel.cu"
_LOG_CHARS = 300


def compile_kernel(architecture: str) -> bytes:
    """The source as a cubin for `architecture`, such as `sm_90`: some tenths of a second. A cubin, not PTX, because a
    driver runs those of later compilers of its major version.

    Raises `CudaError` if there is no NVRTC (pip install nvidia-cuda-nvrtc), or it does not know the architecture.
    """
    source = files(__package__).joinpath(SOURCE).read_bytes()
    try:
        program = _call(nvrtc.nvrtcCreateProgram, source, SOURCE.encode(), 0, [], [])
    except (ImportError, OSError, RuntimeError) as error:  # what cuda-python raises where it finds no libnvrtc
        raise CudaError(
            f"no NVRTC ({type(error).__name__}): pip install nvidia-cuda-nvrtc", "NVRTC_NOT_FOUND"
        ) from error
    try:
        return _compiled(program, architecture)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _compiled(program: Any, architecture: str) -> bytes:
    try:
        _call(nvrtc.nvrtcCompileProgram, program, 1, [f"--gpu-architecture={architecture}".encode()])
    except CudaError as error:
        raise CudaError(f"{error}, for {architecture}: {_log(program)}", error.status) from error
    cubin = b" " * int(_call(nvrtc.nvrtcGetCUBINSize, program))
    _call(nvrtc.nvrtcGetCUBIN, program, cubin)
    return cubin


def _log(program: Any) -> str:
    text = b" " * int(_call(nvrtc.nvrtcGetProgramLogSize, program))
    _call(nvrtc.nvrtcGetProgramLog, program, text)
    return " ".join(text.rstrip(b"\0").decode(errors="replace").split())[:_LOG_CHARS]


def _call(function: Any, *arguments: Any) -> Any:
    status, *values = function(*arguments)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CudaError(
            f"{function.__name__}: {status.name}: update NVRTC (pip install -U nvidia-cuda-nvrtc)", status.name
        )
    return values[0] if values else None
