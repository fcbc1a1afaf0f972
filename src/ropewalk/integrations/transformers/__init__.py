"""Make models of transformers rotate through ropewalk. This package does not import transformers itself."""

from ropewalk.integrations.transformers.door import Accelerated as Accelerated
from ropewalk.integrations.transformers.door import accelerate as accelerate
from ropewalk.integrations.transformers.door import restore as restore
