"""The bugs that a check can name. A file of `measure/` reports the code of each.

Search there for the code of a similar bug: it may also be in a set of codes that a later step does not judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["wrong", "caution"]


@dataclass(frozen=True)
class Bug:
    """A kind of bug.

    Args:
        title: what is wrong, in a few words.
        fix: how to fix it, if that does not follow from the title.
        severity: "wrong" if results are wrong, "caution" if they are right now but a common use makes them wrong.
    """

    title: str
    fix: str = ""
    severity: Severity = "wrong"


BUGS: dict[str, Bug] = {
    "wrong-device": Bug(
        "a tensor stays on the CPU although the input is on another device",
        "Create tensors on the device of the input (device=x.device), and keep tables in buffers.",
    ),
    "not-repeatable": Bug(
        "the same call gives other bits",
        "Let no two threads write the same element, and read no element before it is written.",
    ),
    "output-not-written": Bug(
        "elements of a result are never written",
        "Let the kernel cover all tokens, heads and channels, or copy the input to the output first.",
    ),
    "memory-overwritten": Bug(
        "memory next to a tensor of the call is overwritten",
        "Mask every store by the numbers of tokens, heads and channels, and use the strides of its tensor.",
    ),
    "not-rotated": Bug("nothing is rotated", "Look at the axis of x that the number of tokens is read from."),
    "heads-taken-for-tokens": Bug(
        "the angles vary along another axis than that of the tokens",
        "Read the number of tokens from the other axis of x.",
    ),
    "wrong-shape": Bug("a call returns something else than one tensor of the shape of each input"),
    "heads-differ": Bug("some heads are rotated differently"),
    "query-and-key-crossed": Bug("a result is computed from the other tensor"),
    "wrong-norm": Bug(
        "the norm of q or k is wrong",
        "Divide each head by the root of its mean square, multiply by the weight of q or k, and rotate after that.",
    ),
    "segments-ignored": Bug("positions do not restart where cu_seqlens starts a sequence"),
    "key-not-rotated": Bug("k is not rotated"),
    "not-a-rotation": Bug(
        "pairs are changed but not rotated",
        "Return (a cos − b sin, b cos + a sin), computing both from the input pair. rotate_half is cat(-x2, x1).",
    ),
    "channel-overwritten": Bug(
        "a channel of each pair is overwritten before the other is computed", "Compute both before either is written."
    ),
    "tables-misused": Bug("the tables are taken for angles"),
    "mixed-pairings": Bug(
        "the two channels of a pair are rotated by different angles",
        "Use cat(f, f) for the tables of half pairing, and repeat_interleave for those of interleaved pairing. Repeat "
        "the sections of several axes in the same way.",
    ),
    "cos-and-sin-swapped": Bug("cos and sin are swapped", "Swap them where they are used or returned."),
    "rotates-backwards": Bug(
        "pairs are rotated by minus their angle",
        "Flip the sign of sin (or drop the conjugate): (a cos − b sin, b cos + a sin).",
    ),
    "rotated-twice": Bug("every pair is rotated by twice its angle", "Rotate in one place only."),
    "frequencies-reversed": Bug(
        "the slowest pair comes first", "Let the exponent grow with the index of the pair: base ** (-2i / dim)."
    ),
    "wrong-layer": Bug(
        "other layers rotate than those of the config", "Count layers from 0, and read from the config which rotate."
    ),
    "wrong-pairing": Bug(
        "the pairing is not the pairing of the weights",
        "Change the pairing in the code, or permute the rows of the q and k projections to match it.",
    ),
    "wrong-slice": Bug("the wrong channels are rotated"),
    "rest-not-passed": Bug("channels outside the rotated slice are changed"),
    "key-unlike-query": Bug("k is rotated differently from q"),
    "attention-factor": Bug(
        "cos and sin are multiplied by the wrong factor",
        "Multiply cos and sin by that of the scheme, if any, once for q and once for k. The score contains its square.",
    ),
    "base-ignored": Bug(
        "a second object ignores the base that was passed to it",
        "Pass it on to the code that computes the angles, and make it part of the key under which tables are cached.",
    ),
    "axis-ignored": Bug("an axis of the positions has no effect"),
    "axes-exchanged": Bug("two axes of the positions are exchanged"),
    "wrong-side": Bug(
        "the tokens of a grid are counted with the wrong one of its sides",
        "The column of token i is i % columns, its row is i // columns (in a video % rows), and its frame is "
        "i // (rows · columns).",
    ),
    "order-of-tokens": Bug(
        "the tokens of a grid are counted in another order",
        "Let the column change from token to token (meshgrid with indexing='ij'). If patches are merged, those of one "
        "block follow each other.",
    ),
    "grids-mixed-up": Bug(
        "the tokens of one grid are counted by the sides of another, where a call has several",
        "Read the sides of each grid from its own row of the sizes, or refuse grids of several sizes.",
        "caution",
    ),
    "sections-permuted": Bug("the sections are in another order"),
    "section-layout": Bug(
        "the pairs are divided among the axes in another way",
        "Read from the config the sizes of the sections, and whether they are interleaved.",
    ),
    "axis-frequencies": Bug(
        "the pairs of an axis have the frequencies of others",
        "Number the pairs once over all axes, or again for each axis, as the model does.",
    ),
    "tokens-before-rotated": Bug("the tokens before those that rotate are not left as they are, or counted as well"),
    "positions-off-by-one": Bug(
        "positions are off by one or more", "Count from 0: a token after n others has position n, and the first has 0."
    ),
    "scaling-ignored": Bug("the scaling of the config has no effect", "Apply it (rope_scaling, rope_parameters)."),
    "scaling-inverted": Bug("the scaling is applied in the wrong direction", "Divide the frequencies by the factor."),
    "scaling-twice": Bug("the scaling is applied twice"),
    "ntk-exponent": Bug("NTK uses the wrong exponent", "Multiply the base by factor ** (dim / (dim - 2))."),
    "yarn-ramp-swapped": Bug("YaRN's ramp is reversed", "Keep the fast pairs, and divide the slow ones by the factor."),
    "yarn-original-length": Bug(
        "YaRN's ramp begins and ends at the scaled length",
        "Compute the ramp from original_max_position_embeddings, not from max_position_embeddings.",
    ),
    "yarn-truncate": Bug(
        "the ends of YaRN's ramp are rounded although the config forbids it, or not rounded although it asks for it",
        "Round the lower end down and the upper end up, unless truncate is false.",
    ),
    "llama3-smooth-inverted": Bug(
        "Llama 3's ramp is reversed",
        "Multiply the unscaled frequency by smooth, and the frequency divided by the factor by 1 - smooth.",
    ),
    "frequencies-over-head-dim": Bug(
        "the exponents are divided by the size of the head instead of the rotated part",
        "Divide by rotary_dim: base ** (-2i / rotary_dim).",
    ),
    "wrong-exponent": Bug(
        "the exponents of the frequencies are wrong",
        "Use base ** (-2i / dim), dim being the number of rotated channels, with i from 0 to dim/2 - 1.",
    ),
    "wrong-base": Bug("the base is wrong", "Pass the base: rope_theta, inside rope_parameters since transformers 5."),
    "length-ignored": Bug(
        "the scaling does not depend on the sequence length as it should",
        "Compare the length of the whole sequence, not the position of each token, with the length of training.",
    ),
    "lengths-exchanged": Bug("the frequencies of short and of long sequences are exchanged"),
    "low-precision-input": Bug("x is rounded to 16 bits", "Compute in float32 what is passed in float32."),
    "low-precision-frequencies": Bug("inv_freq is rounded to 16 bits", "Keep it in float32; .bfloat16() rounds it."),
    "low-precision-angles": Bug("the angles are rounded to 16 bits", "Multiply positions and inv_freq in float32."),
    "low-precision-tables": Bug("cos and sin are rounded to 16 bits", "Keep them in float32 if x is float32."),
    "low-precision-positions": Bug("positions are rounded to 16 bits", "Keep them as integers until the product."),
    "wrong-frequencies": Bug("the frequencies are wrong", "Compare them with those of `ropewalk explain`, or of Rope."),
    "result-overwritten": Bug("the next call overwrites the result of a call", "Return a new tensor."),
    "earlier-calls-matter": Bug(
        "the result depends on earlier calls", "Keep no state in forward that the arguments do not determine."
    ),
    "positions-ignored": Bug("the positions that are passed have no effect", "Gather the angles at positions."),
    "positions-misread": Bug("positions of another integer dtype are misread"),
    "offset-ignored": Bug("the offset has no effect on the angles", "Count positions from the offset."),
    "rows-disturb-each-other": Bug("the result for one row of the batch depends on the positions of another"),
    "first-row-positions": Bug("all rows of the batch get the positions of the first", "Use those of each row."),
    "rows-mixed-up": Bug(
        "rows of the batch get the positions of other rows",
        "If batch and seq are flattened, flatten positions in the same order.",
    ),
    "one-position": Bug("all tokens of a call get the position of one", "Use that of each token."),
    "one-token-wrong": Bug("a single token is rotated by the wrong angle", "Use its position when decoding as well."),
    "last-token-wrong": Bug("the last token of a row is not rotated", "Let the loop or the grid cover it, too."),
    "batch-ignored": Bug("a batch of several rows is wrong"),
    "positions-restart": Bug("positions restart at some token", "Continue the count from chunk to chunk."),
    "positions-overflow": Bug("positions overflow a small integer", "Keep them in int32 or int64."),
    "table-wraps": Bug("positions past the end of the table wrap around", "Make the table longer, or raise."),
    "table-clamps": Bug("positions past the end of the table get its last row", "Make the table longer, or raise."),
    "unrotated-past-table": Bug("tokens past the end of the table are not rotated", "Make the table longer, or raise."),
    "zeros-past-table": Bug("tokens past the end of the table become zero", "Make the table longer, or raise."),
    "not-finite": Bug("the result is not finite", "Compute the angles in float32."),
    "wrong-far-positions": Bug("tokens at some positions have wrong angles"),
    "size-dependent": Bug(
        "right at the usual sizes, wrong at others",
        "Look for a size that is rounded up to a power of two, divided by a block, assumed, or that of another tensor.",
    ),
    "grouped-heads": Bug("k is wrong if it has fewer heads than q"),
    "strided-input": Bug("the result for non-contiguous views is wrong", "Use the strides of the tensor, or copy it."),
    "input-changed": Bug(
        "the input is overwritten", "Work on a copy. `contiguous` and `reshape` may return the same memory."
    ),
    "arguments-changed": Bug("positions or tables that are passed are overwritten", "Work on a copy of them."),
    "value-changed": Bug("v is changed"),
    "cache-not-written": Bug("the cache is not written"),
    "wrong-slot": Bug(
        "keys or values are stored at other slots",
        "Store token i at slots[i]. With blocks, that is row slots[i] % block_size of block slots[i] // block_size.",
    ),
    "padding-stored": Bug("a token with slot −1 is stored"),
    "stored-key-unlike-key": Bug(
        "what is stored is not the rotated key", "Store the key after its norm and after its rotation, once."
    ),
    "wrong-output-dtype": Bug("the output has another dtype than the input", "Cast the result back: `.type_as(x)`."),
    "in-place-gradient": Bug(
        "the gradient of a function in place is wrong",
        "Call ctx.mark_dirty for what is overwritten, and save for backward only what forward leaves unchanged.",
    ),
    "wrong-gradient": Bug("the gradient is wrong", "Rotate the gradient by minus the angle, and detach no part of it."),
    "gradient-overwritten": Bug(
        "the backward pass overwrites the gradient that it is passed",
        "Work on a copy: autograd may pass the same tensor to other functions.",
        "caution",
    ),
    "no-gradient": Bug(
        "the function has no gradient, as kernels for inference",
        "To train with it, remove `detach` and `no_grad`, or add a backward pass.",
        "caution",
    ),
    "unstated-layout": Bug(
        "right in the layout that was found, and wrong for several rows or heads in another",
        "Pass --layout (in Python, layout=), to state which one the code has.",
        "caution",
    ),
    "raises": Bug("a call that models make raises", "Read the message. No wrong result is returned.", "caution"),
    "wider-output": Bug(
        "the output has a wider dtype than the input",
        "Cast the result back: `.type_as(x)`. If the caller does so, pass --ignore wider-output.",
        "caution",
    ),
    "output-order": Bug(
        "channels are written in another order than they were read",
        "Write each pair where it was read (stack, not cat). Scores are right only if q and k share the order.",
        "caution",
    ),
    "lost-by-autocast": Bug(
        "the angles are rounded under torch.autocast",
        "Multiply positions and inv_freq elementwise, or disable autocast around it. Autocast rounds matrix products.",
        "caution",
    ),
}
"""Code → bug. A bug is listed, and reported, before the bugs that it can cause."""
