"""Run one engine of vLLM in this process and its workers, and write what it generated and what rotated.

`python engine.py MODEL OPTIONS OUT`: OPTIONS is JSON, "llm" for the arguments of `vllm.LLM`, "tokens", and "prompts" as
lists of numbers. OUT is where the answer goes, as JSON: "tokens" and "workers" (None where ropewalk is not in force).
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Run the engine."""
    from vllm import LLM, SamplingParams

    from ropewalk import RopeError
    from ropewalk.integrations.vllm import report

    model, options, out = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    settings = {"skip_tokenizer_init": True, "max_num_seqs": 4, "dtype": "float32", **options["llm"]}
    llm = LLM(model=model, **settings)
    asked = SamplingParams(max_tokens=options["tokens"], temperature=0.0, detokenize=False, ignore_eos=True)
    tokens = []
    for rounds in options["prompts"]:  # one call of generate for each round
        made = llm.generate([{"prompt_token_ids": each} for each in rounds], asked, use_tqdm=False)
        tokens += [list(each.outputs[0].token_ids) for each in made]
    try:
        workers = report(llm)
    except RopeError:
        workers = None
    out.write_text(json.dumps({"tokens": tokens, "workers": workers}))


if __name__ == "__main__":
    main()
