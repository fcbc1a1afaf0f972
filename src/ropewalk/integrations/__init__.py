"""Integrations that make transformers, vLLM and torchtitan rotate through ropewalk, and a pytest fixture."""
