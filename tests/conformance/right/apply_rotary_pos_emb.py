"""The function of Hugging Face's models, which takes tables."""

import torch


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_embed = q * cos + rotate_half(q) * sin
    k_embed = k * cos + rotate_half(k) * sin
    return q_embed, k_embed


TARGET = "apply_rotary_pos_emb"
GIVEN = {}
BUGS = {
    # Only cos is multiplied by YaRN's attention factor.
    "attention_factor__only_cos": [("    q_embed =", "    cos = cos * 1.2079\n    q_embed =")],
    # Only q is multiplied by YaRN's attention factor.
    "attention_factor__only_on_queries": [("return q_embed", "return q_embed * 1.2079")],
    # A tensor with a single key head is treated as one without heads, and is not rotated.
    "size_dependent__one_key_head": [("q_embed, k_embed", "q_embed, k if k.shape[unsqueeze_dim] == 1 else k_embed")],
    # The key heads are repeated to the number of query heads with repeat instead of repeat_interleave.
    "grouped_heads__repeated_in_the_wrong_order": [
        ("k * cos", "(k := k.repeat(1, q.shape[1] // k.shape[1], 1, 1)) * cos")
    ],
    # The rotation overwrites q and k.
    "input_changed": [
        ("q * cos + rotate_half(q) * sin", "rotate_half(q) * sin + q.detach().mul_(cos)"),
        ("k * cos + rotate_half(k) * sin", "rotate_half(k) * sin + k.detach().mul_(cos)"),
    ],
    # Only q is rotated.
    "key_not_rotated": [("return q_embed, k_embed", "return q_embed, k")],
    # k is rotated in the opposite direction, so scores depend on the sum of two positions.
    "key_unlike_query__backwards": [("k * cos +", "k * cos -")],
    # The rotation is computed on detached tensors, so it has no gradient.
    "no_gradient": [("    q_embed =", "    q, k = q.detach(), k.detach()\n    q_embed =")],
    # rotate_half lacks the minus sign, so pairs are stretched instead of rotated.
    "not_a_rotation": [("(-x2,", "(x2,")],
    # q and k are returned in swapped order.
    "query_and_key_crossed": [("return q_embed, k_embed", "return k_embed, q_embed")],
    # The result is rotated a second time, as if both the model and its attention rotated.
    "rotated_twice": [
        ("return q_embed", "return q_embed * cos + rotate_half(q_embed) * sin"),
        (", k_embed", ", k_embed * cos + rotate_half(k_embed) * sin"),
    ],
    # The sign of sin is wrong, so every pair is rotated by minus its angle.
    "rotates_backwards__minus_sin": [(", sin.unsqueeze", ", -sin.unsqueeze")],
    # The memory of q and k is read as if the tensors were contiguous.
    "strided_input": [
        ("    q_embed =", "    q, k = packed(q), packed(k)\n    q_embed ="),
        (
            "def apply",
            'def packed(x):\n    strides = torch.empty(x.shape, device="meta").stride()\n'
            "    return x.as_strided(x.shape, strides)\n\n\ndef apply",
        ),
    ],
    # The result is float32 for every dtype of q and k.
    "wider_output": [("    q_embed =", "    q, k, cos, sin = (x.float() for x in (q, k, cos, sin))\n    q_embed =")],
    # A helper returns a detached tensor, so the part of the gradient that flows through sin is missing.
    "wrong_gradient__half": [("(-x2, x1), dim=-1)", "(-x2, x1), dim=-1).detach()")],
    # The result is bfloat16 for every dtype of q and k.
    "wrong_output_dtype": [("return q_embed, k_embed", "return q_embed.bfloat16(), k_embed.bfloat16()")],
    # q is not multiplied by the cosines.
    "not_a_rotation__of_zeros": [("q * cos +", "cos +")],
    # Only k is rounded.
    "low_precision_input__of_k": [("k_embed = k * cos", "k_embed = k.half() * cos")],
}
