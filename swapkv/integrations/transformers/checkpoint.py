"""Checkpoints of other programs, written as plain ones."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert_gguf(source: Path, directory: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a plain checkpoint: float32 safetensors, no pickle.

    `directory` exists and gets what `PagedTransformer.load` reads. A model of 270M parameters takes about a minute,
    most of it for reading the vocabulary.
    Raises ImportError if the packages gguf or accelerate are missing, OSError if the disk is full.
    """
    where, file = str(source.parent), source.name
    try:
        packed = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32, local_files_only=True)
    except ImportError as error:
        raise ImportError("GGUF files need an extra: pip install 'swapkv[transformers]'") from error
    config = packed.config
    tokenizer = AutoTokenizer.from_pretrained(
        where, gguf_file=file, tokenizer_type=config.model_type, local_files_only=True
    )
    tokenizer.save_pretrained(directory)
    del config.quantization_config  # with it transformers refuses to save, though nothing is quantized any more
    with torch.device("meta"):
        plain = type(packed)(config)
    plain.load_state_dict(packed.state_dict(), assign=True)
    plain.save_pretrained(directory)
