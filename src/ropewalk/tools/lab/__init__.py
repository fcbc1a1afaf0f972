"""The lab: train small language models on a laptop, and measure what long-context scaling does to them."""
