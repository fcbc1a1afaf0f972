"""`check` of code that takes the size of a grid, which it calls with tokens at any places of rows and columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from ropewalk import Axes, Rope, RopeError, conformance

HEAD = """
import torch

def angles_of(rows, columns, dim=64, base=100.0):
    places = torch.arange(rows * columns)
    inv_freq = base ** (-torch.arange(0, dim // 2, 2).double() / (dim // 2))
    return torch.cat(((places // columns)[:, None] * inv_freq, (places % columns)[:, None] * inv_freq), dim=-1)

def turn(x, angles):
    a, b = x.double().chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1).type_as(x)
"""
PROGRAMS = {
    "rotate": """
def rotate(x, grid_hw):
    rows, columns = grid_hw
    return turn(x, angles_of(rows, columns)[:, None])
""",
    "Video": """
class Video(torch.nn.Module):
    def __init__(self, head_dim):
        super().__init__()
        self.head_dim = head_dim

    def forward(self, q, k, grid_sizes):
        angles = [angles_of(*sides, self.head_dim).repeat(frames, 1) for frames, *sides in grid_sizes.tolist()]
        angles = torch.stack(angles)[:, :, None]
        return turn(q, angles), turn(k, angles)
""",
    "of_a_video": """
def of_a_video(x, grid):
    frames, rows, columns = grid
    return turn(x, angles_of(rows, columns).repeat(frames, 1)[:, None])
""",
    "of_other_names": """
def of_other_names(q, k, down: int, across: int):
    places = torch.arange(down * across)
    inv_freq = 100.0 ** (-torch.arange(0, 32, 2).double() / 32)
    angles = torch.cat(((places // across)[:, None] * inv_freq, (places % across)[:, None] * inv_freq), dim=-1)
    return turn(q, angles), turn(k, angles)
""",
    "in_place": """
def in_place(q, k, h, w):
    assert q.shape[1] == h * w
    for x in (q, k):
        x.copy_(turn(x, angles_of(h, w)[:, None]))
""",
    "OfASquare": """
class OfASquare(torch.nn.Module):
    # as in EVA, with the channels of half a head
    def __init__(self, dim, pt_seq_len=16, ft_seq_len=None):
        super().__init__()
        side = ft_seq_len or pt_seq_len
        self.angles = angles_of(side, side, 2 * dim)

    def forward(self, t):
        return turn(t, self.angles)
""",
    "Largest,turn": """
class Largest:
    # as in MoonViT, with a table of the largest grid, and by default of a small one
    def __init__(self, dim, max_height=64, max_width=64):
        self.angles = angles_of(max_height, max_width, dim).view(max_height, max_width, -1)

    def __call__(self, grid_hws):
        return torch.cat([self.angles[:rows, :columns].flatten(0, 1) for rows, columns in grid_hws.tolist()])[:, None]
""",
    "of_axes,turn": """
def of_axes(rope_dim_list, rope_sizes, theta=100.0):
    # as in HunyuanVideo
    places = torch.cartesian_prod(*map(torch.arange, rope_sizes)).T
    inv_freqs = (theta ** (-torch.arange(0, dim, 2).double() / dim) for dim in rope_dim_list)
    return torch.cat([place[:, None] * inv_freq for place, inv_freq in zip(places, inv_freqs)], dim=-1)[:, None]
""",
    "OfATableOf64": """
class OfATableOf64:
    def __init__(self, dim):
        self.angles = angles_of(64, 64, dim).view(64, 64, -1)

    def __call__(self, x, grid_hw):
        rows, columns = grid_hw
        return turn(x, self.angles[:rows, :columns].flatten(0, 1)[:, None])
""",
    "of_each_row": """
def of_each_row(x, grid_sizes):
    sizes, out = grid_sizes.tolist(), []
    for row in range(x.size(0)):
        frames, rows, columns = sizes[row]
        angles = angles_of(rows, columns).repeat(frames, 1)[:, None]
        a, b = x[row, : frames * rows * columns].chunk(2, dim=-1)
        out.append(torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1))
    return torch.stack(out).type_as(x)
""",
    "Patches.turned": """
class Patches:
    def __init__(self, dim, input_size: tuple[int, int, int]):
        self.angles = angles_of(*input_size[1:], dim)

    def turned(self, x):
        return turn(x, self.angles)
""",
    "Sides": """
class Sides(torch.nn.Module):
    def __init__(self, head_dim, grid_h, grid_w):
        super().__init__()
        self.angles = angles_of(grid_h, grid_w, head_dim)

    def forward(self, x):
        return turn(x, self.angles)
""",
    "OfPatches": """
class OfPatches(torch.nn.Module):
    def __init__(self, head_dim, patches=(14, 16)):
        super().__init__()
        rows, columns = patches
        self.angles = angles_of(rows, columns, head_dim)

    def forward(self, x):
        return turn(x, self.angles[:, None])
""",
    "AfterAClass": """
class AfterAClass(torch.nn.Module):
    def __init__(self, dim, grid_h=14, grid_w=14, use_cls_token=True):
        super().__init__()
        angles = angles_of(grid_h, grid_w, dim)
        self.angles = torch.cat((torch.zeros(int(use_cls_token), dim // 2), angles))

    def forward(self, x):
        return turn(x, self.angles)
""",
    "of_frames,apply_tables": """
def of_frames(embed_dim, T, H, W):
    time = torch.arange(T)[:, None] * 100.0 ** (-torch.arange(0, embed_dim // 2, 2).double() / (embed_dim // 2))
    angles = torch.cat((time.repeat_interleave(H * W, 0), angles_of(H, W, embed_dim // 2).repeat(T, 1)), dim=-1)
    return angles.cos(), angles.sin()

def apply_tables(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)
""",
    "OfLatents,turn": """
class OfLatents(torch.nn.Module):
    def __init__(self, patch_size: int, rope_dim: list[int]):
        super().__init__()
        self.patch_size, self.rope_dim = patch_size, rope_dim

    def forward(self, hidden_states):
        batch, channels, num_frames, height, width = hidden_states.shape
        sides = num_frames, height // self.patch_size, width // self.patch_size
        places = torch.meshgrid(*map(torch.arange, sides), indexing="ij")
        each = zip(places, self.rope_dim)
        each = [p.reshape(-1, 1) * 100.0 ** (-torch.arange(0, n, 2).double() / n) for p, n in each]
        return torch.cat(each, dim=-1)[:, None]
""",
    "of_side,turn": """
def of_side(grid_size: int, n_elem: int):
    return angles_of(grid_size, grid_size, n_elem)
""",
    "Tables,turn": """
class Tables:
    def __init__(self, dim):
        self.dim = dim

    def __call__(self, shape):
        return angles_of(*shape, self.dim).view(*shape, -1)
""",
}


def checked(tmp_path: Path, name: str, *replaced: str) -> conformance.Report:
    path = tmp_path / "theirs.py"
    path.write_text((HEAD + PROGRAMS[name]).replace(*replaced) if replaced else HEAD + PROGRAMS[name])
    return conformance.check(f"{path}:{name}", base=100.0, pairing="half")


@pytest.mark.parametrize("name", PROGRAMS)
def test_right_code(tmp_path: Path, name: str) -> None:
    report = checked(tmp_path, name)
    assert report.codes == [], str(report)
    of_video = {
        "of_frames,apply_tables": "pairs 0 to 15 time, 16 to 23 height, 24 to 31 width",
        "of_axes,turn": "pairs 0 to 7 time, 8 to 19 height, 20 to 31 width",
        "OfLatents,turn": "pairs 0 to 7 time, 8 to 19 height, 20 to 31 width",
    }
    assert report.found["axes"] == of_video.get(name, "pairs 0 to 15 height, 16 to 31 width")


@pytest.mark.parametrize(
    ("name", "old", "new", "codes"),
    [
        ("rotate", "// columns", "// rows", ["wrong-side"]),
        ("of_other_names", "% across", "% down", ["wrong-side"]),
        ("of_frames,apply_tables", "// columns", "// rows", ["wrong-side"]),
        (
            "OfLatents,turn",
            "for p, n in each]",
            "for p, n in each]\n        each = [x.view(*sides, -1).transpose(1, 2).flatten(0, 2) for x in each]",
            ["order-of-tokens"],
        ),
        ("of_frames,apply_tables", "T)[:, None]", "T)[:, None] ** 2", ["wrong-frequencies"]),
        ("of_other_names", "turn(k, angles)", "turn(k, angles.roll(16, -1))", ["key-unlike-query"]),
        ("OfPatches", "self.angles[:, None]", "self.angles.roll(1, -1)[:, None]", ["wrong-frequencies"]),
        ("OfASquare", "turn(t, self.angles)", "turn(t, self.angles.roll(1, -1))", ["wrong-frequencies"]),
        ("OfLatents,turn", "num_frames, height, width = h", "num_frames, width, height = h", ["wrong-side"]),
        ("AfterAClass", "// 2), angles", "// 2), angles.roll(-1, 0)", ["wrong-frequencies"]),
        ("Video", "grid_sizes.tolist", "grid_sizes[:1].tolist", ["grids-mixed-up"]),
        ("of_each_row", "sizes[row]", "sizes[0]", ["grids-mixed-up"]),
        ("Largest,turn", "grid_hws.tolist()", "[grid_hws[0].tolist()] * len(grid_hws)", ["grids-mixed-up"]),
        ("in_place", "for x in (q, k)", "for x in (q,)", ["key-not-rotated"]),
    ],
)
def test_bugs(tmp_path: Path, name: str, old: str, new: str, codes: list[str]) -> None:
    assert checked(tmp_path, name, old, new).codes == codes


def test_frames_that_change_from_token_to_token(tmp_path: Path) -> None:
    report = checked(
        tmp_path, "OfLatents,turn", "[p.reshape(-1, 1)", "[(p if n != 16 else p.permute(1, 2, 0)).reshape(-1, 1)"
    )
    assert report.codes == ["wrong-side"], str(report)
    assert "and those of one frame do not: the frame of a token is wrong" in str(report)
    of_an_image = checked(tmp_path, "rotate", "// columns", "// rows")
    assert "differ between grids of 9 × 11 and 17 × 19. No more was judged." in str(of_an_image)


OF_A_TABLE = """
import torch

def rope_apply(x, grid_sizes, freqs):
    parts = freqs.split([12, 10, 10], dim=1)
    out = []
    for row, (frames, rows, columns) in zip(x, grid_sizes.tolist()):
        places = torch.cartesian_prod(*map(torch.arange, (frames, rows, columns)))
        z = torch.view_as_complex(row.double().unflatten(-1, (-1, 2)))
        z = z * torch.cat([part[place] for part, place in zip(parts, places.T)], dim=1)[:, None]
        out.append(torch.view_as_real(z).flatten(2))
    return torch.stack(out).type_as(x)
"""


@pytest.mark.parametrize(
    ("old", "new", "codes"),
    [
        ("", "", []),
        ("(frames, rows, columns)))", "(frames, columns, rows)))", ["wrong-side"]),
        ("places.T)", "places.T[[0, 2, 1]])", ["axes-exchanged"]),
        ("[12, 10, 10]", "[10, 10, 12]", ["sections-permuted"]),
    ],
)
def test_one_table_for_the_axes_of_a_video(tmp_path: Path, old: str, new: str, codes: list[str]) -> None:
    """As in Wan's own code, whose table has a row for each number on any axis."""
    (path := tmp_path / "theirs.py").write_text(OF_A_TABLE.replace(old, new) if old else OF_A_TABLE)
    rope = Rope(64, 10_000.0, "interleaved", axes=Axes.axial((24, 20, 20)))
    report = conformance.check(f"{path}:rope_apply", rope=rope)
    assert report.codes == codes, str(report)


OF_BLOCKS = """
class OfBlocks(torch.nn.Module):
    def __init__(self, head_dim: int):
        super().__init__()
        self.head_dim, self.spatial_merge_size = head_dim, 2

    def forward(self, q, k, grid_thw):
        angles = []
        for frames, rows, columns in grid_thw.tolist():
            places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
            places = places.view(rows // 2, 2, columns // 2, 2, 2)
            places = places.transpose(1, 2).flatten(0, 3).repeat(frames, 1)
            inv_freq = 100.0 ** (-torch.arange(0, self.head_dim // 2, 2).double() / (self.head_dim // 2))
            angles.append((places[..., None] * inv_freq).flatten(1))
        angles = torch.cat(angles)[:, None]
        return turn(q, angles), turn(k, angles)
"""


@pytest.mark.parametrize(("old", "new", "codes"), [("", "", []), (".transpose(1, 2)", "", ["order-of-tokens"])])
def test_patches_in_the_order_of_merged_blocks(tmp_path: Path, old: str, new: str, codes: list[str]) -> None:
    """As in the vision towers of Qwen, whose images follow each other in one row."""
    (path := tmp_path / "theirs.py").write_text(HEAD + (OF_BLOCKS.replace(old, new) if old else OF_BLOCKS))
    report = conformance.check(f"{path}:OfBlocks", base=100.0, pairing="half")
    assert report.codes == codes, str(report)
    assert report.found["call"] == "f(q, k, grid_thw), tokens in blocks of 2 × 2"
    assert report.found.get("axes", "pairs 0 to 15 height, 16 to 31 width") == "pairs 0 to 15 height, 16 to 31 width"


def test_numbers_of_the_places_of_a_grid_are_not_judged(tmp_path: Path) -> None:
    """As in Pixtral, whose code takes row · side + column, so that its first pairs turn by the row alone."""
    code = f"""{HEAD}
def rotate(x, position_ids):
    half = 10_000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    angles = torch.cat(((position_ids // 64)[..., None] * half[::2], (position_ids % 64)[..., None] * half[1::2]), -1)
    return turn(x, angles[:, :, None])
"""
    (path := tmp_path / "theirs.py").write_text(code)
    config = {"model_type": "pixtral", "hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1}
    config |= {"head_dim": 64, "image_size": 1024, "patch_size": 16, "rope_theta": 10_000.0}
    with pytest.raises(RopeError, match="must take a position on each, got one position for each token"):
        conformance.check(f"{path}:rotate", config=config)


@pytest.mark.parametrize(("first", "codes"), [("%", []), ("//", ["axes-exchanged"])])
def test_a_config_whose_first_axis_is_the_column(tmp_path: Path, first: str, codes: list[str]) -> None:
    """As in SAM 2 and 3, whose own tables begin with the column."""
    code = f"""{HEAD}
def compute_axial_cis(dim, end_x: int, end_y: int, theta=10000.0):
    tokens, inv_freq = torch.arange(end_x * end_y), theta ** (-torch.arange(0, dim, 4).double() / dim)
    first, second = tokens {first} end_x, tokens {"//" if first == "%" else "%"} end_x
    angles = torch.cat((first[:, None] * inv_freq, second[:, None] * inv_freq), dim=-1)
    return torch.polar(torch.ones_like(angles), angles)

def apply(q, k, freqs_cis):
    pairs = (torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * freqs_cis for x in (q, k))
    return tuple(torch.view_as_real(z).flatten(-2).type_as(q) for z in pairs)
"""
    (path := tmp_path / "theirs.py").write_text(code)
    config = {"model_type": "sam3_vit_model", "hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1}
    config |= {"image_size": 28, "patch_size": 14, "window_size": 2, "global_attn_indexes": []}
    assert conformance.check(f"{path}:compute_axial_cis,apply", config=config).codes == codes


def test_a_factor_of_all_axes_counts_once(tmp_path: Path) -> None:
    assert (
        checked(tmp_path, "rotate", "turn(x, angles_of", "turn(1.2 * x, angles_of").found["attention factor"] == "1.2"
    )


def test_coordinates_that_depend_on_the_size_are_not_judged(tmp_path: Path) -> None:
    for by in ("rows / columns", "min(rows, columns)"):
        with pytest.raises(RopeError, match="must not depend on the number of tokens"):
            checked(tmp_path, "rotate", "angles_of(rows, columns)", f"(angles_of(rows, columns) / {by})")
