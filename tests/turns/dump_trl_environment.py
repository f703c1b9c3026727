"""Records what TRL's GRPOTrainer makes of scripted turns with ``environment_factory=Pantry``: trl_conversations.json.

``PYTHONPATH=/path/to/trl:/path/to/this/repository OMP_NUM_THREADS=1 python dump_trl_environment.py``. Only the sampled
tokens are scripted (``_generate_single_turn``); tools, masks, messages, rewards and metrics are TRL's own.
"""

import json
from pathlib import Path

from grpo.data.tiny import EOS
from grpo.data.tiny import build_tokenizer as build_tiny_tokenizer

HERE = Path(__file__).resolve().parent
LENGTH, ITERATIONS, GROUP = 448, 3, 11
TEMPLATE = r"""
{%- if tools %}{{ '<|im_start|>system\n# Tools\n<tools>' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}{% endif %}
{%- for m in messages %}{% if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
CALL = {"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "repeats": True, "content": "json"}
CALL["transform"] = {"type": "function", "function": "{content}"}
RESPONSE = {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n"}
RESPONSE["fields"] = {"tool_calls": CALL, "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}}
ROWS = [
    {"prompt": [{"role": "user", "content": "Take eggs."}], "eggs": 9, "hint": ""},
    {"prompt": [{"role": "user", "content": "Take food."}], "eggs": 5, "hint": "figs go fast"},
]


def build_tokenizer():
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    return tokenizer


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def take(item: str, amount: int | str, **more) -> str:
    return call("take", json.dumps({"item": item, "amount": amount} | more))


def look_with_room_left(tokenizer, eggs: int, left: int) -> str:
    """A look behind so much text that behind its answer there is room for ``left`` tokens."""
    answer = f"\n<|im_start|>user\n<tool_response>\n{eggs} eggs, 2 figs\n</tool_response>{EOS}\n<|im_start|>assistant\n"
    return "x" * (LENGTH - left - len(tokenizer.encode(call("look") + EOS + answer))) + call("look")


def scripts(tokenizer) -> dict[str, list[str]]:
    """The turns of each completion, ``GROUP`` for each row. Each turn gets its EOS, and is then cut at ``LENGTH``."""
    look = call("look")
    return {
        "plain answer": ["I take none."],
        "one call": [take("eggs", 3), "Done."],
        "two calls in a turn": [take("eggs", 1) + "\n" + look, " Done. \n"],
        "unknown tool": [call("eat"), "Oh."],
        "tools that are none": [call("reset") + call("get_reward"), "Oh."],
        "missing argument, extra argument": [call("take", '{"item": "eggs"}'), take("eggs", 1, at=2), "Oh."],
        "a call that raises": [take("ham", 1), "Oh."],
        "broken JSON": ['<tool_call>\n{"name": "look", "arguments": {}\n</tool_call>', "never"],
        "a good call, then broken JSON": [look + "\n<tool_call>\n{look}\n</tool_call>", "never"],
        "state, and calls beyond the last iteration": [look, take("figs", 1), look, look, "never"],
        "text before a call, text around a call": ["I look.\n" + look, "So \n" + look + "\nOn.", "It is\nthere.\n"],
        "a call without a name": ['<tool_call>\n{"arguments": {}}\n</tool_call>', "never"],
        "integer as a string": [take("eggs", "2"), take("eggs", "two"), "Oh."],
        "arguments null, arguments missing": [call("look", "null"), look.replace(', "arguments": {}', ""), "Oh."],
        "arguments in a string": [call("take", json.dumps('{"item": "figs", "amount": 1}')), "Done."],
        "a list for a call": ['<tool_call>\n["look"]\n</tool_call>', "never"],
        "a call without its end": [look.removesuffix("\n</tool_call>"), "never"],
        "cut in text": ["y" * 500],
        "cut in a call": ["y" * (LENGTH - 30) + look, "never"],
        "answer one token too long": [look_with_room_left(tokenizer, 5, -1), "never"],
        "answer fits exactly": [look_with_room_left(tokenizer, 5, 0), "Done."],
        "last turn cut": [look_with_room_left(tokenizer, 5, 4), "Done."],
    }


def main() -> None:
    import datasets
    import torch
    import transformers
    import trl
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl_environment import Pantry

    tokenizer = build_tokenizer()
    names, turns = zip(*scripts(tokenizer).items(), strict=True)
    found: dict = {}

    class Recorder(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, images, fields, num_generations, has_tool_images=False):
            if num_generations > 1:
                self.behind, self.number = [[] for _ in turns], [0 for _ in turns]
            sampled, i = [], -1
            for ids in prompt_ids:  # in the order of the completions, of which some have ended
                i = next(k for k in range(i + 1, len(turns)) if ids[: len(self.behind[k])] == self.behind[k])
                sampled.append(tokenizer.encode(turns[i][self.number[i]] + EOS)[:LENGTH])
                self.behind[i], self.number[i] = ids + sampled[-1], self.number[i] + 1
            return sampled, [[-1.0] * len(ids) for ids in sampled]

        def _generate(self, prompts):
            result = super()._generate(prompts)
            found.update(zip(("prompt_ids", "completion_ids", "mask", "messages"), result, strict=False))
            keys = ("tools/call_frequency", "tools/failure_frequency")
            found["metrics"] = {key: self._metrics["train"][key][-1] for key in keys}
            return result

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            found.update(row=[dict(row) for row in inputs], reward=rewards[:, 0].tolist(), taken=self.number)
            return rewards

    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, max_position_embeddings=4096)
    ends = dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    config = Qwen2Config(vocab_size=len(tokenizer), num_attention_heads=4, num_key_value_heads=2, **sizes, **ends)
    args = trl.GRPOConfig(
        output_dir=str(HERE / "output"), use_cpu=True, bf16=False, report_to="none", save_strategy="no", max_steps=1,
        per_device_train_batch_size=len(turns), num_generations=GROUP, learning_rate=1e-9, shuffle_dataset=False,
        max_completion_length=LENGTH, max_tool_calling_iterations=ITERATIONS, gradient_checkpointing=False,
    )  # fmt: skip
    options = dict(args=args, processing_class=tokenizer, environment_factory=Pantry)
    Recorder(Qwen2ForCausalLM(config), train_dataset=datasets.Dataset.from_list(ROWS), **options).train()

    record = {"versions": {m.__name__: m.__version__ for m in (trl, transformers, torch)}}
    record |= {"max_completion_length": LENGTH, "max_tool_calling_iterations": ITERATIONS, "metrics": found["metrics"]}
    keys = ("row", "prompt_ids", "completion_ids", "mask", "messages", "reward")
    columns = zip(names, turns, found["taken"], *(found[key] for key in keys), strict=True)
    record["completions"] = [
        dict(zip(("case", "turns", "turns_sampled", *keys), values, strict=True)) for values in columns
    ]
    (HERE / "trl_conversations.json").write_text(json.dumps(record, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
