"""vLLM that rotates through ropewalk: `VLLM_PLUGINS=ropewalk`. Imports no vLLM before it is asked to register."""

from ropewalk.integrations.vllm.plugin import register as register
from ropewalk.integrations.vllm.plugin import report as report
