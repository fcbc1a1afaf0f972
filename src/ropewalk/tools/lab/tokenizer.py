"""Tokenizer files of a byte model, in which token n is byte n, for llama2.c's `run.c` and for transformers."""

from __future__ import annotations

import struct
from typing import Any


def llama2c() -> bytes:
    """Build the tokenizer.bin of `run.c`: length of the longest piece, then score, length and bytes of each piece.

    Lengths are int32, in bytes, and scores are float32. Each byte is one piece, whose index is the value of the byte.
    No merges are possible. Byte 0, which would end a C string, is written as `<0x00>`.
    """
    pieces = [b"<0x00>", *(bytes([byte]) for byte in range(1, 256))]
    longest = max(len(piece) for piece in pieces)
    return struct.pack("<i", longest) + b"".join(struct.pack("<fi", 0.0, len(piece)) + piece for piece in pieces)


def hugging_face(max_positions: int) -> dict[str, dict[str, Any]]:
    """Return the content of the JSON files for `AutoTokenizer.from_pretrained`, by file name.

    The tokenizer encodes text as its UTF-8 bytes. It is a byte-level BPE without merges, normalization, added tokens or
    special tokens.
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
    """Return the character for each byte in byte-level BPE, as in GPT-2.

    Printable Latin-1 characters represent their own byte. The other bytes use the characters from U+0100 on.
    """
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]
