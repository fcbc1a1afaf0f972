"""The tables: what a model or a format implies about rotation and its configs do not state. Nothing here reads one."""
