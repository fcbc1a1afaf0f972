"""Integrations that make other libraries rotate through ropewalk. They report what they replaced, and can undo it."""
