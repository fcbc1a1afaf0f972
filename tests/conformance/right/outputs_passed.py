"""An operator that writes to outputs that it is passed, head by head, and leaves q and k as they are."""


def rope_out(q, k, cos, sin, q_out, k_out):
    """All: `[tokens, heads, dim]`; cos and sin: `[tokens, rotary_dim / 2]`."""
    half = cos.shape[-1]
    for x, out in ((q, q_out), (k, k_out)):
        for head in range(x.shape[1]):
            a, b = x[:, head, :half], x[:, head, half : 2 * half]
            out[:, head, :half] = a * cos - b * sin
            out[:, head, half : 2 * half] = b * cos + a * sin
            out[:, head, 2 * half :] = x[:, head, 2 * half :]


TARGET = "rope_out"
GIVEN = {"pairing": "half", "layout": "thd"}
BUGS = {
    # The grid has as many programs as q has heads, which is too few for a k with more heads.
    "output_not_written__key_heads_past_those_of_q": [("range(x.shape[1])", "range(min(x.shape[1], q.shape[1]))")],
    # All tokens get the channels of the first that do not rotate.
    "rest_not_passed__of_one_token": [("= x[:, head, 2 * half :]", "= x[:1, head, 2 * half :]")],
}
