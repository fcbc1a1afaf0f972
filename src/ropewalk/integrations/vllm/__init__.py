"""A plugin that makes vLLM rotate through ropewalk. Set `VLLM_PLUGINS=ropewalk` to enable it.

vLLM itself is imported only when the plugin registers.
"""

from ropewalk.integrations.vllm.plugin import register as register
from ropewalk.integrations.vllm.plugin import report as report
