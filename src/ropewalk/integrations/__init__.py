"""Integrations with other libraries: transformers, vLLM and torchtitan rotate through ropewalk; a pytest fixture."""
