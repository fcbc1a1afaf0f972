"""Test tokenizers of bytes with transformers, and with llama2.c's algorithm, which is written out here."""

from __future__ import annotations

import itertools
import re
import struct
from pathlib import Path

import pytest
import torch

from ropewalk import Rope
from ropewalk.tools.lab import export
from ropewalk.tools.lab.model import LanguageModel, Size

TEXTS = [
    "def f(x):\n    return x",
    "  two  spaces \t\r\n",
    "é☃😀",
    "e\u0301 Å ﬁ",  # not normalised
    "\x00\x01\x7f",
    "<s></s><unk><0x41> don't 1234",
    " ",
    "",
]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(Size(256, 16, 24, 1, 2, tied=True)).eval()


@pytest.fixture(scope="module")
def rope() -> Rope:
    return Rope(8, 1e4, "half")


@pytest.fixture(scope="module")
def folder(model: LanguageModel, rope: Rope, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    for name, content in export.hugging_face(model, rope, 64).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_transformers(text: str, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(text)["input_ids"]
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text
    assert (len(tokenizer), tokenizer.model_max_length, tokenizer.all_special_tokens) == (256, 64, [])


def test_transformers_has_every_byte(folder: Path) -> None:
    """Each byte is one token. Bytes that are not UTF-8 decode to the replacement character."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(set(tokenizer.convert_ids_to_tokens(list(range(256))))) == 256
    for byte in range(256):
        assert tokenizer.decode([byte]) == bytes([byte]).decode(errors="replace")


class RunC:
    """The tokenizer of run.c (commit 350e04f), written from its code.

    The file has the length of the longest piece (int32), then score (float32), length (int32) and bytes of each piece.
    Reading zero bytes is an error. Strings end at the first byte 0.
    """

    def __init__(self, data: bytes, vocab_size: int) -> None:
        (self.longest,) = struct.unpack_from("<i", data)
        at, self.pieces, self.scores = 4, [], []
        for _ in range(vocab_size):
            score, length = struct.unpack_from("<fi", data, at)
            assert 1 <= length <= self.longest
            self.pieces.append(data[at + 8 : at + 8 + length].split(b"\0")[0])
            self.scores.append(score)
            at += 8 + length
        assert at == len(data)
        assert len(set(self.pieces)) == vocab_size  # it looks pieces up by binary search
        assert all(self.pieces)  # an empty one would join with any other
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}

    def encode(self, text: bytes) -> list[int]:
        tokens = [1] + ([self.ids[b" "]] if text else [])
        # A character is a byte and up to three that continue it; one that is no piece falls back to its bytes, plus 3.
        for character in re.findall(rb"(?s).[\x80-\xbf]{0,3}", text):
            found = self.ids.get(character)
            tokens += [found] if found is not None else [byte + 3 for byte in character]
        while True:  # join the pair with the best score
            pairs = [self.pieces[a] + self.pieces[b] for a, b in itertools.pairwise(tokens)]
            known = [(self.scores[self.ids[pair]], -i) for i, pair in enumerate(pairs) if pair in self.ids]
            if not known:
                return tokens
            i = -max(known)[1]
            tokens[i : i + 2] = [self.ids[pairs[i]]]

    def printed(self, tokens: list[int]) -> bytes:
        out = b""
        for before, token in itertools.pairwise(tokens):
            if token == 1:
                break
            piece = self.pieces[token]
            if before == 1 and piece.startswith(b" "):
                piece = piece[1:]
            if raw := re.match(rb"<0x([0-9A-Fa-f]{1,2})>", piece):
                piece = bytes([int(raw[1], 16)]).split(b"\0")[0]
            # A single byte is printed only if the C locale calls it printable or white space.
            out += piece if len(piece) != 1 or 0x20 <= piece[0] < 0x7F or piece[0] in b"\t\n\v\f\r" else b""
        return out


@pytest.fixture(scope="module")
def run_c() -> RunC:
    return RunC(export.llama2c_tokenizer(), 256)


def test_run_c_reads_a_prompt_in_ascii_as_its_bytes(run_c: RunC) -> None:
    """They follow token 1 and a space, which run.c puts before every prompt."""
    every = bytes(range(1, 128))
    assert run_c.encode(every) == [1, 32, *every]
    assert run_c.encode(b"") == [1]
    assert run_c.encode(b"<0x00>") == [1, 32, *b"<0x00>"]


def test_what_run_c_makes_of_other_characters(run_c: RunC) -> None:
    assert run_c.encode("aé".encode()) == [1, 32, 97, 0xC3 + 3, 0xA9 + 3]  # as docs/lab-model.md says
    for byte in range(128, 256):  # alone, as in Latin-1, it is itself, and never an index beyond the vocabulary
        assert run_c.encode(bytes([byte])) == [1, 32, byte]


def test_what_run_c_prints(run_c: RunC) -> None:
    text = b"def f():\n\treturn 1"
    assert run_c.printed(run_c.encode(text)) == text
    assert run_c.printed([32, 97, 0xC3, 0xA9, 0, 98, 1, 99]) == b"ab"


def test_only_models_of_bytes_have_a_tokenizer(rope: Rope) -> None:
    other = LanguageModel(Size(61, 16, 24, 1, 2))
    assert set(export.hugging_face(other, rope, 64)) == {"config.json", "model.safetensors"}
