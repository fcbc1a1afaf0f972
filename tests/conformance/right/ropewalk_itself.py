"""Our own, as a model calls it."""

from ropewalk import Rope

ROPE = Rope(64, 500000.0, "half")


def rotate(q, k, positions):
    return ROPE.at(positions)(q, k, layout="bshd")


TARGET = "rotate"
GIVEN = {"rope": ROPE}
