"""The rotation of ropewalk, called as in a model."""

from ropewalk import Rope

ROPE = Rope(64, 500000.0, "half")


def rotate(q, k, positions):
    return ROPE.at(positions)(q, k, layout="bshd")


TARGET = "rotate"
GIVEN = {"rope": ROPE}
