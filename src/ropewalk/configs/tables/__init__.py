"""The tables of models and formats, and nothing else: what each one implies and its configs do not state."""
