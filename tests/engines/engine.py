"""Run one engine of vLLM, and write the generated tokens and the state of ropewalk in each worker to a file.

`python engine.py MODEL OPTIONS OUT`: OPTIONS is a JSON object with "llm" (the arguments of `vllm.LLM`), "tokens" (the
number of tokens to generate) and "prompts" (lists of token ids). OUT is the JSON file to write, an object with "tokens"
and "workers" (None for a worker in which ropewalk is not active).
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
