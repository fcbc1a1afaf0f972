"""Models of transformers that rotate through ropewalk. Imports no transformers: the model brings it."""

from ropewalk.integrations.transformers.door import Accelerated as Accelerated
from ropewalk.integrations.transformers.door import accelerate as accelerate
from ropewalk.integrations.transformers.door import restore as restore
