"""Tokenizers of a model of bytes, where token n is byte n: for llama2.c's `run.c`, and for transformers."""

from __future__ import annotations

import struct
from typing import Any


def llama2c() -> bytes:
    """The tokenizer.bin of `run.c`: the longest piece in bytes (int32), then score (float32), length (int32), bytes.

    Every byte is a piece of its own, so looking it up gives its number, and no two pieces join to a third. Only byte 0,
    which ends a string in C, is written as `<0x00>`.
    """
    pieces = [b"<0x00>", *(bytes([byte]) for byte in range(1, 256))]
    longest = max(len(piece) for piece in pieces)
    return struct.pack("<i", longest) + b"".join(struct.pack("<fi", 0.0, len(piece)) + piece for piece in pieces)


def hugging_face(max_positions: int) -> dict[str, dict[str, Any]]:
    """File name → contents as JSON: what `AutoTokenizer.from_pretrained` reads. Text becomes its UTF-8 bytes.

    It is a byte-level BPE without merges. Nothing is normalised, nothing is added, and no text is special.
    """
    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": False,
                "use_regex": False,
            },
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": vocabulary,
                "merges": [],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_positions,
        },
    }


def _characters() -> list[str]:
    """The character by which byte-level BPE writes each byte, as GPT-2 has it.

    Printable characters of Latin-1 stand for their own byte; the other bytes take the characters from U+0100 on.
    """
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]
