"""Compile accelerated models in a new process, where no other test has installed a dispatcher. Print the results.

python compile_worker.py dynamo NAME ...     fullgraph, only with Dynamo: name and relative difference from eager mode
python compile_worker.py inductor NAME       forward, and forward with backward, with Inductor
python compile_worker.py pickled FILE        load a whole model from a file before importing anything else of ropewalk
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))


def dynamo(*names: str) -> object:
    import tiny_models
    from model_checks import relative, tokens
    from ropewalk.integrations.transformers import accelerate

    said = {}
    for name in names:
        model, ids = tiny_models.build(name), tokens(2, 16)
        accelerate(model, length=tiny_models.LENGTH.get(name))
        places = torch.arange(16)[None]
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad():
            got = compiled(input_ids=ids, position_ids=places, use_cache=False)[0]
            said[name] = relative(got, model(input_ids=ids, position_ids=places, use_cache=False)[0])
        torch.compiler.reset()
    return said


def inductor(name: str) -> object:
    import tiny_models
    from model_checks import FAR, gradients, output, relative, rms, tokens
    from ropewalk.integrations.transformers import accelerate

    model, ids = tiny_models.build(name), tokens(2, 16)
    accelerate(model)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        near, far = (relative(output(compiled, ids, at), output(model, ids, at)) for at in (0, FAR))
    eager = gradients(model, ids)
    got = {name.removeprefix("_orig_mod."): grad for name, grad in gradients(compiled, ids).items()}
    return {"near": near, "far": far, "gradient": max(rms(got[name], eager[name]) for name in eager)}


def pickled(file: str) -> object:
    """Print the outputs of the model before and after `restore`, and those that were saved with it."""
    model, ids, exact, plain = torch.load(file, weights_only=False)
    from ropewalk.integrations.transformers import restore

    places = torch.arange(99_936, 99_936 + ids.shape[1])[None]
    with torch.no_grad():
        first = torch.equal(model(input_ids=ids, position_ids=places)[0], exact)
        restore(model)
        return [first, torch.equal(model(input_ids=ids, position_ids=places)[0], plain)]


if __name__ == "__main__":
    sys.stdout.write(
        json.dumps({"dynamo": dynamo, "inductor": inductor, "pickled": pickled}[sys.argv[1]](*sys.argv[2:]))
    )
