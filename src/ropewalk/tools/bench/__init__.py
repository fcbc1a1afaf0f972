"""Compare the speed of ropewalk with that of memory copies, of other libraries, and of the RoPE code in most projects.

These contenders are timed alternately in one process. The result of each is checked first, and contenders with wrong
results are not timed.
"""

from ropewalk.tools.bench.decode import DecodeSettings as DecodeSettings
from ropewalk.tools.bench.decode import run_decode as run_decode
from ropewalk.tools.bench.on_gpu import GpuSettings as GpuSettings
from ropewalk.tools.bench.on_gpu import run_on_gpu as run_on_gpu
from ropewalk.tools.bench.run import Settings as Settings
from ropewalk.tools.bench.run import run as run
from ropewalk.tools.bench.sweep import SweepSettings as SweepSettings
from ropewalk.tools.bench.sweep import run_sweep as run_sweep
