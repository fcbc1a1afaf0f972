"""Benchmark ropewalk against a copy, the usual code and other libraries, alternately in one process.

Every contender's result is checked first. Contenders with wrong results are not timed.
"""

from ropewalk.programs.bench.decode import DecodeSettings as DecodeSettings
from ropewalk.programs.bench.decode import run_decode as run_decode
from ropewalk.programs.bench.on_gpu import GpuSettings as GpuSettings
from ropewalk.programs.bench.on_gpu import run_on_gpu as run_on_gpu
from ropewalk.programs.bench.run import Settings as Settings
from ropewalk.programs.bench.run import run as run
