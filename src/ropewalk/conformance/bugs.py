"""What may be found wrong: a code for each bug, its title and what to do about it. Earlier ones explain later ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["wrong", "caution"]


@dataclass(frozen=True)
class Bug:
    """A kind of bug.

    Args:
        title: what is wrong, in a few words.
        fix: what to do about it.
        severity: "wrong" gives wrong numbers as it is used now; "caution" gives them once something else is done.
    """

    title: str
    fix: str
    severity: Severity = "wrong"


BUGS: dict[str, Bug] = {
    "not-rotated": Bug("nothing is rotated", "Return the rotated tensors, not the ones that came."),
    "heads-taken-for-tokens": Bug(
        "the angles run along the heads, not along the tokens", "Take the number of tokens from the other axis of x."
    ),
    "query-and-key-crossed": Bug("q and k come back in each other's place", "Exchange the two results."),
    "key-not-rotated": Bug("k is not rotated", "Rotate k by the same angles as q."),
    "not-a-rotation": Bug(
        "pairs are changed, but not rotated",
        "Return (a cos − b sin, b cos + a sin), both from the pair as it came; rotate_half is cat(-x2, x1).",
    ),
    "mixed-pairings": Bug(
        "the two channels of a pair are rotated by different angles",
        "Tables in halves (cat(f, f)) belong to half pairing, columns twice (repeat_interleave) to interleaved.",
    ),
    "cos-and-sin-swapped": Bug(
        "cos and sin stand in each other's place", "Exchange them where they are used or returned."
    ),
    "rotates-backwards": Bug(
        "pairs are rotated by minus their angle",
        "Turn the sign of sin (or drop the conjugate): (a cos − b sin, b cos + a sin).",
    ),
    "rotated-twice": Bug("every pair is rotated by twice its angle", "Rotate in one place alone."),
    "frequencies-reversed": Bug(
        "the slowest pair comes first", "The exponents grow from pair to pair: base ** (-2i / dim)."
    ),
    "wrong-pairing": Bug(
        "the pairing is not that of the weights",
        "Swap the pairing in the code, or permute the rows of the q and k projections to it.",
    ),
    "wrong-slice": Bug(
        "other channels are rotated than should be", "Rotate the slice of the head that the config means."
    ),
    "rest-not-passed": Bug("channels that are not rotated do not come back as they were", "Copy them to the output."),
    "key-unlike-query": Bug("k is rotated otherwise than q", "Use the same formula and the same tables for both."),
    "attention-factor": Bug(
        "cos and sin are multiplied by another factor than should be",
        "Multiply cos and sin of q and of k by the attention factor once: the score has its square.",
    ),
    "base-ignored": Bug(
        "the base that is passed has no effect on a second object",
        "Make the base part of the key under which tables are kept.",
    ),
    "positions-off-by-one": Bug("positions are one off", "The first token has position 0, and is not rotated."),
    "scaling-ignored": Bug("the scaling of the config has no effect", "Read rope_scaling (rope_parameters)."),
    "scaling-inverted": Bug("the scaling works the wrong way round", "Divide the frequencies by the factor."),
    "ntk-exponent": Bug("NTK has the wrong exponent", "The base grows by factor ** (dim / (dim - 2))."),
    "yarn-ramp-swapped": Bug(
        "YaRN's ramp is the wrong way round", "Keep the fast pairs and divide the slow ones by the factor."
    ),
    "yarn-truncate": Bug(
        "the ends of YaRN's ramp are rounded where the config says not to, or the other way round",
        "Round them down and up unless truncate is false.",
    ),
    "llama3-smooth-inverted": Bug(
        "Llama 3's ramp is the wrong way round",
        "smooth multiplies the unscaled frequency, 1 - smooth the one divided by the factor.",
    ),
    "frequencies-over-head-dim": Bug(
        "the exponents are over the whole head, not over the rotated part",
        "Divide by rotary_dim: base ** (-2i / rotary_dim).",
    ),
    "wrong-exponent": Bug(
        "the exponents are over another size than the rotated channels",
        "Use base ** (-2i / dim), i from 0 to dim/2 - 1.",
    ),
    "wrong-base": Bug(
        "the base is not what it should be",
        "Pass the base; in a config read rope_theta (rope_parameters since transformers 5).",
    ),
    "length-ignored": Bug(
        "the scaling does not depend on the length of the sequence as it should",
        "Choose the factors by the length of the sequence, not by the position of each token.",
    ),
    "low-precision-frequencies": Bug("inv_freq is rounded to 16 bits", "Keep inv_freq in float32."),
    "low-precision-angles": Bug("the angles are rounded to 16 bits", "Multiply positions and inv_freq in float32."),
    "low-precision-tables": Bug("cos and sin are rounded to 16 bits", "Keep them in float32 where x is float32."),
    "low-precision-positions": Bug(
        "positions are rounded to 16 bits", "Keep positions integers until they are multiplied."
    ),
    "wrong-frequencies": Bug(
        "the frequencies are not what they should be", "Compare inv_freq with `ropewalk explain`."
    ),
    "earlier-calls-matter": Bug(
        "the result depends on what was called before", "Keep no state in forward that the arguments do not determine."
    ),
    "positions-ignored": Bug("the positions that are passed have no effect", "Gather the angles at positions."),
    "offset-ignored": Bug("the offset has no effect on the angles", "Count positions from the offset."),
    "rows-disturb-each-other": Bug(
        "a row of the batch changes with the positions of another",
        "Let nothing depend on the largest position of the batch.",
    ),
    "first-row-positions": Bug(
        "all rows of the batch get the positions of the first", "Index with the whole positions."
    ),
    "rows-mixed-up": Bug(
        "rows of the batch get positions that are not theirs", "Where batch and seq are folded, fold positions alike."
    ),
    "one-token-wrong": Bug("a single token is rotated by another angle", "Use its position at decoding, too."),
    "batch-ignored": Bug("rows of the batch after the first come out wrong", "Write all rows."),
    "positions-restart": Bug("from some token on, positions begin again", "Count positions on from chunk to chunk."),
    "table-wraps": Bug("past its end the table begins again", "Make the table longer, or raise."),
    "table-clamps": Bug("past its end the table repeats its last row", "Make the table longer, or raise."),
    "unrotated-past-table": Bug("past the end of the table tokens are not rotated", "Make the table longer, or raise."),
    "zeros-past-table": Bug("past the end of the table zeros come back", "Make the table longer, or raise."),
    "not-finite": Bug("the result is not finite", "Compute the angles in float32."),
    "wrong-far-positions": Bug(
        "far tokens have other angles", "Compare the angles with position times inv_freq there."
    ),
    "grouped-heads": Bug(
        "k with fewer heads than q comes out wrong", "Rotate every head of k, and change their number nowhere."
    ),
    "strided-input": Bug(
        "views that are not contiguous come out wrong", "Use the strides of the tensor, or copy it first."
    ),
    "input-changed": Bug(
        "the input is written to", "Work on a copy; `contiguous` and `reshape` may return the same memory."
    ),
    "wrong-output-dtype": Bug("the output has another dtype than the input", "Cast the result back: `.type_as(x)`."),
    "no-gradient": Bug("no gradient reaches the input", "Do not detach, and no `no_grad`."),
    "wrong-gradient": Bug("the gradient is wrong", "The gradient of a rotation is the rotation by minus the angle."),
    "raises": Bug("it raises where models call it", "See the message; nothing wrong comes out.", "caution"),
    "output-order": Bug(
        "channels are written in another order than they were read",
        "Scores are right as long as q and k are both written so; write pairs where they were read (stack, not cat).",
        "caution",
    ),
    "graph-break": Bug("torch.compile breaks the graph", "Use no values of tensors in Python.", "caution"),
    "lost-by-half": Bug(
        ".bfloat16() or .half() of the module rounds its angles",
        "Keep inv_freq out of the buffers, or make it again in float32 in forward.",
        "caution",
    ),
    "lost-on-meta": Bug(
        "made on the meta device, the module has no angles after the checkpoint is loaded",
        "Make the table in forward, or fill the buffer again after loading.",
        "caution",
    ),
}
"""Code → bug, in the order in which they are reported."""

ORDER = {code: place for place, code in enumerate(BUGS)}
