"""Make models of transformers rotate through ropewalk. This package does not import transformers itself."""

from ropewalk.integrations.transformers.api import Accelerated as Accelerated
from ropewalk.integrations.transformers.api import accelerate as accelerate
from ropewalk.integrations.transformers.api import restore as restore
