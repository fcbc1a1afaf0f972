"""A plugin that makes vLLM rotate through ropewalk. Set `VLLM_PLUGINS=ropewalk` to enable it.

vLLM itself is imported only when the plugin registers.
"""

from ropewalk.integrations.vllm.plugin import register, report

__all__ = ["register", "report"]
__dir__ = __all__.copy
