"""vLLM's side of rollout.py, started with vLLM's own Python: samples completions of given lengths when a line is read.

The one argument is a JSON object: model, precision, compiled, the token ids of the prompts, and the lengths of each prompt's completions.
Output lines: ``ready``, then for every line read the seconds and the number of tokens.
"""

import json
import os
import sys
from types import SimpleNamespace

replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what vLLM prints goes to stderr
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
}

from vllm import LLM, SamplingParams


def main() -> None:
    a = SimpleNamespace(**json.loads(sys.argv[1]))
    engine = LLM(
        a.model,
        dtype="bfloat16" if a.precision == "bf16" else "float32",
        enforce_eager=not a.compiled,
        max_model_len=len(a.prompts[0]) + max(map(max, a.lengths)),
        max_num_seqs=sum(map(len, a.lengths)),
        skip_tokenizer_init=True,
    )
    rows = [(prompt, length) for prompt, lengths in zip(a.prompts, a.lengths, strict=True) for length in lengths]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in rows]
    sampling = [
        SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False) for _, length in rows
    ]
    print("ready", file=replies, flush=True)
    for _ in sys.stdin:
        engine.reset_prefix_cache()  # the prompts of a rollout are new
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        print(sum(len(output.outputs[0].token_ids) for output in outputs), file=replies, flush=True)


if __name__ == "__main__":
    main()
