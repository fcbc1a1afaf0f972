"""The lab: a language model small enough for a laptop, and what long-context scaling does to it."""
