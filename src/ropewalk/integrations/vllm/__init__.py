"""Make vLLM rotate through ropewalk: `VLLM_PLUGINS=ropewalk`. vLLM is imported only when the plugin registers."""

from ropewalk.integrations.vllm.plugin import register as register
from ropewalk.integrations.vllm.plugin import report as report
