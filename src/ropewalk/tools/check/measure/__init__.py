"""The second stage: measure what the target computes, and name its bugs."""
