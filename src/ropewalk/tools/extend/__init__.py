"""From "this model at 128k" to the config and the command of each engine: `extend`, behind `ropewalk extend`.

`plan` chooses a method and its config, `extended` finds what to type, `text` says it, and `write` writes a folder.
"""

from ropewalk.tools.extend.extended import DEFAULT as DEFAULT
from ropewalk.tools.extend.extended import Extended as Extended
from ropewalk.tools.extend.extended import extend as extend
from ropewalk.tools.extend.write import write as write
