"""Files of torch.save: each archive and pickle is read as torch.load reads it, or refused at bounded cost."""

from __future__ import annotations

import shutil
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import limited
from checkpoint_files import meta_weights, refused, run, weights, write_meta

FILE = "consolidated.00.pth"
TO = ("--to", "interleaved", "--max-positions", 64)
Members = list[tuple[zipfile.ZipInfo, bytes]]


def repack(file: Path, change: Callable[[Members], object]) -> None:
    """Write the members of an archive again, uncompressed, after a change."""
    with zipfile.ZipFile(file) as archive:
        members = [(zipfile.ZipInfo(old.filename), archive.read(old)) for old in archive.infolist()]
    change(members)
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
        warnings.simplefilter("ignore", UserWarning)  # of a name that is there twice
        for member, content in members:
            archive.writestr(member, content)


def check_numbers(source: Path, target: Path) -> None:
    """Rows of interleaved weights stay in place, so the numbers are those of `weights`."""
    run(source, target, *TO)
    converted = load_file(target / "model.safetensors")
    assert converted.keys() == weights().keys()
    for name, tensor in weights().items():
        assert torch.equal(converted[name], tensor), name


def deflate(members: Members) -> None:
    for member, _ in members:
        member.compress_type = zipfile.ZIP_DEFLATED


def deflate_one(members: Members) -> None:
    next(member for member, _ in members if member.filename.endswith("/data/5")).compress_type = zipfile.ZIP_DEFLATED


def lengthen(members: Members) -> None:
    members[:] = [(member, content * 2 if "/data/5" in member.filename else content) for member, content in members]


def shorten(members: Members) -> None:
    members[:] = [(member, content[:-2] if "/data/5" in member.filename else content) for member, content in members]


def omit(members: Members) -> None:
    members[:] = [(member, content) for member, content in members if not member.filename.endswith("/data/5")]


def repeat(members: Members) -> None:
    content = next(content for member, content in members if member.filename.endswith("/data/5"))
    members.append((zipfile.ZipInfo("consolidated.00/data/5"), bytes(len(content))))


def swap_bytes(members: Members) -> None:
    """Write the file as a big-endian machine does."""
    for i, (member, content) in enumerate(members):
        if "/data/" in member.filename:
            content = bytes(byte for pair in zip(content[1::2], content[::2], strict=True) for byte in pair)
        members[i] = member, b"big" if member.filename.endswith("/byteorder") else content


class TestArchives:
    @pytest.mark.parametrize("change", [deflate, deflate_one, swap_bytes])
    def test_what_only_torch_load_reads(self, change: Callable[[Members], object], tmp_path: Path) -> None:
        """The message says how to save the file so that it is read."""
        source, file = write_meta(tmp_path / "a", meta_weights()), tmp_path / "a" / FILE
        repack(file, change)
        loaded = torch.load(file, weights_only=True)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in meta_weights().items())
        match = "or save only its tensors: torch.save(torch.load(FILE, weights_only=True), FILE)."
        refused(match, source, tmp_path / "b", *TO, target=source)
        torch.save(torch.load(file, weights_only=True), file)
        check_numbers(source, tmp_path / "b")

    @pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_other_compression(self, method: int, tmp_path: Path) -> None:
        source = write_meta(tmp_path / "a", meta_weights())
        repack(source / FILE, lambda members: [setattr(member, "compress_type", method) for member, _ in members])
        refused("is compressed", source, tmp_path / "b", *TO, target=source)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lengthen, "data/5 has 2,048 bytes instead of 1,024"),
            (shorten, "data/5 has 1,022 bytes instead of 1,024"),
            (omit, "data/5"),
            (repeat, "consolidated.00/data/5 is there twice"),
        ],
    )
    def test_members_that_do_not_fit(self, change: Callable[[Members], object], match: str, tmp_path: Path) -> None:
        source = write_meta(tmp_path / "a", meta_weights())
        repack(source / FILE, change)
        refused(match, source, tmp_path / "b", *TO, target=source)

    @pytest.mark.parametrize(
        ("at", "to", "match"),
        [
            (8, b"\1\0", "encrypted"),  # a flag
            (10, b"\10\0", "is compressed"),  # the method
            (20, b"\2\0\0\0", "is compressed"),  # the stored size
            (42, b"\2\0\0\0", "Bad magic number"),  # the place of its header
            (20, b"\0\0\0\x70\0\0\0\x70", "extends beyond the end of the file"),  # both sizes
        ],
    )
    def test_an_entry_of_the_directory(self, at: int, to: bytes, match: str, tmp_path: Path) -> None:
        source, file = write_meta(tmp_path / "a", meta_weights()), tmp_path / "a" / FILE
        repack(file, lambda members: None)
        content = bytearray(file.read_bytes())
        entry = content.rindex(b"/data/5") - len("consolidated.00") - 46
        assert content[entry : entry + 4] == b"PK\1\2"
        content[entry + at : entry + at + len(to)] = to
        file.write_bytes(content)
        refused(match, source, tmp_path / "b", *TO, target=source)

    def test_members_of_more_than_4_gib(self, tmp_path: Path) -> None:
        """Their headers have 64-bit sizes."""
        source, file = write_meta(tmp_path / "a", meta_weights()), tmp_path / "a" / FILE
        shutil.copy(file, tmp_path / "other")
        with zipfile.ZipFile(tmp_path / "other") as old, zipfile.ZipFile(file, "w") as new:
            for name in old.namelist():
                with new.open(name, "w", force_zip64=True) as member:
                    member.write(old.read(name))
        check_numbers(source, tmp_path / "b")

    def test_bytes_before_the_archive(self, tmp_path: Path) -> None:
        source, file = write_meta(tmp_path / "a", meta_weights()), tmp_path / "a" / FILE
        file.write_bytes(b"something else" + file.read_bytes())
        check_numbers(source, tmp_path / "b")

    def test_the_format_before_pytorch_1_6(self, tmp_path: Path) -> None:
        source = write_meta(tmp_path / "a", meta_weights())
        torch.save(meta_weights(), source / FILE, _use_new_zipfile_serialization=False)
        refused("File is not a zip file", source, tmp_path / "b", *TO, target=source)
        torch.save(torch.load(source / FILE, weights_only=True), source / FILE)
        check_numbers(source, tmp_path / "b")


OTHER: dict[str, Callable[[], object]] = {
    "sparse": lambda: torch.ones(32).to_sparse(),
    "without memory": lambda: torch.ones(32, device="meta"),
    "integers": lambda: torch.ones(32, dtype=torch.int8),
    "complex": lambda: torch.ones(32, dtype=torch.complex64),
    "every second element": lambda: torch.ones(64)[::2],
    "one element for all": lambda: torch.ones(1).expand(32),
    "the other order": lambda: torch.ones(4, 8).t(),
    "negated by a flag": lambda: torch._neg_view(torch.ones(32)),  # its numbers are not those of the file
    "a list": lambda: [torch.ones(32)],
    "a number": lambda: 32,
}


class TestPickles:
    def test_what_state_dict_returns(self, tmp_path: Path) -> None:
        """It is an OrderedDict with an attribute, here of parameters."""
        tensors = OrderedDict((name, nn.Parameter(tensor)) for name, tensor in meta_weights().items())
        tensors._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
        check_numbers(write_meta(tmp_path / "a", tensors), tmp_path / "b")

    def test_views_of_one_storage(self, tmp_path: Path) -> None:
        flat = torch.cat([tensor.flatten() for tensor in meta_weights().values()])
        tensors, begin = {}, 0
        for name, tensor in meta_weights().items():
            tensors[name] = flat[begin : begin + tensor.numel()].view(tensor.shape)
            begin += tensor.numel()
        check_numbers(write_meta(tmp_path / "a", tensors), tmp_path / "b")

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
    def test_dtypes(self, dtype: torch.dtype, tmp_path: Path) -> None:
        tensors = {name: tensor.to(dtype) for name, tensor in meta_weights().items()}
        run(write_meta(tmp_path / "a", tensors), tmp_path / "b", *TO)
        for name, tensor in load_file(tmp_path / "b" / "model.safetensors").items():
            assert torch.equal(tensor, weights()[name].to(dtype))

    @pytest.mark.parametrize("name", OTHER)
    def test_other_values(self, name: str, tmp_path: Path) -> None:
        other = OTHER[name]()
        source = write_meta(tmp_path / "a", meta_weights() | {"norm.weight": other})
        match = "save only its tensors" if name == "a list" else f"norm.weight of {FILE} must be a contiguous vector"
        refused(match, source, tmp_path / "b", *TO, target=source)

    @pytest.mark.parametrize("value", [torch.ones(3), [], {"a": {"b": torch.ones(3)}}, {3: torch.ones(3)}, {}])
    def test_other_contents(self, value: object, tmp_path: Path) -> None:
        refused("must", write_meta(tmp_path / "a", value), tmp_path / "b", *TO, target=tmp_path / "a")


def pickled(content: bytes) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        members[:] = [(m, content if m.filename.endswith("data.pkl") else old) for m, old in members]

    return change


def order(content: bytes) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        members[:] = [(m, content if m.filename.endswith("byteorder") else old) for m, old in members]

    return change


HOSTILE: dict[str, Callable[[Members], None]] = {
    "a long pickle": pickled(b"\x80\2}" + b"N0" * 2**26),
    "a pickle of the largest size": pickled(b"\x80\2}" + b"N" * (2**20 - 10)),
    "a long byte order": order(b" " * 2**27),
    "a key with a hash of 2**60 steps": pickled(b"\x80\2}(K\1q\0" + b"h\0h\0\x86q\0" * 60 + b"K\1u."),
    "a large array": pickled(b"\x80\2cbuiltins\nbytearray\nL99999999999L\n\x85R."),
    "a large tensor": pickled(b"\x80\2ctorch\nFloatTensor\nJ\xff\xff\xff\x7f\x85R."),
    "a large memo": pickled(b"\x80\2}r\xff\xff\xff\x7f."),
    "a long string that is not there": pickled(b"\x80\2X\xff\xff\xff\x7f."),
    "many members": lambda members: members.extend((zipfile.ZipInfo(f"a/data/{i}"), b"") for i in range(40_000)),
    "no end": pickled(b"\x80\2}"),
    "nothing": pickled(b"."),
    "an empty stack": pickled(b"\x80\2u."),
    "a tensor of a number": pickled(b"\x80\2ctorch._utils\n_rebuild_tensor_v2\nK\1\x85R."),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_at_bounded_cost(name: str, tmp_path: Path) -> None:
    source = write_meta(tmp_path / "a", {"norm.weight": torch.ones(3)})
    repack(source / FILE, HOSTILE[name])
    said, seconds = limited.run("convert", source, tmp_path / "b", *TO)
    assert said.startswith("Error: convert: "), said
    assert said.count("\n") == 1
    assert len(said) < 3000
    assert seconds < 6
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
