"""Models with caches of every kind: sampled as their forward pass computes, or refused by name."""

import pytest
import torch
from architectures import GPT2, PHI3, READS_IMAGES, SIZES, V
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo.algorithm.batch import Problem, collate
from grpo.algorithm.logprobs import CompletionScorer
from grpo.data.tiny import build_tokenizer
from grpo.model import Policy
from grpo.rollout import BuiltinEngine, SamplingParams, check_model

DELTA = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
DELTA |= dict(head_dim=8, layer_types=["linear_attention", "full_attention"])
MAMBA2 = dict(
    mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8
)
HYBRID = MAMBA2 | dict(
    layer_types=["mamba", "attention"], num_local_experts=2, num_experts_per_tok=1
)
SAMPLED = {
    "llama": SIZES,
    "phi3": PHI3,
    "mistral": SIZES | dict(sliding_window=4),
    "lfm2": SIZES | dict(layer_types=["conv", "full_attention"]),
    "qwen3_5_text": SIZES | DELTA,
    "granitemoehybrid": SIZES | HYBRID,
    "gpt2": GPT2,
    READS_IMAGES[0]: READS_IMAGES[1],
}
REFUSED = {
    "recurrent_gemma": SIZES
    | dict(lru_width=32, block_types=["recurrent", "attention"], head_dim=8),
    "mamba": dict(vocab_size=V, hidden_size=32, num_hidden_layers=2, state_size=8),
}
"""Models whose decode steps give other logits."""


def policy_of(model_type, options) -> Policy:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **options)
    attention = "eager" if "mamba" in model_type else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(4 if p.dim() == 2 and "A_log" not in name and "embed" not in name else 1)
    return Policy(model, build_tokenizer(), tuple(range(2, V, 10)), 0, torch.device("cpu"), "fp32")


def check(policy, **options):
    return check_model(policy, CompletionScorer(policy.model), **options)


@pytest.mark.parametrize("name", SAMPLED)
@torch.no_grad()
def test_sampled_and_scored_as_each_row_alone(name):
    policy = policy_of(name, SAMPLED[name])
    scorer = CompletionScorer(policy.model)
    check_model(policy, scorer)
    problems = [Problem(i, "", tuple(range(3, 3 + n))) for i, n in enumerate((9, 4, 1))]
    groups = BuiltinEngine(policy).generate(
        problems, SamplingParams(3, 24), seed_key=(0, "test", 0)
    )
    batch = collate(groups, torch.zeros(3, 3), pad_id=0)
    scored_BT, _ = scorer(*batch.scorer_inputs)
    rows = [
        (group.problem.prompt_ids, completion)
        for group in groups
        for completion in group.completions
    ]
    assert len({len(completion.ids) for _, completion in rows}) > 2, "rows leave at different times"
    for b, (prompt, completion) in enumerate(rows):
        n = len(completion.ids)
        logits_SV = policy.model(
            torch.tensor([[*prompt, *completion.ids]]), use_cache=False
        ).logits[0]
        logprobs_TV = logits_SV[len(prompt) - 1 : -1].log_softmax(dim=-1)
        alone_T = logprobs_TV.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        torch.testing.assert_close(batch.sampling_logprobs_BT[b, :n], alone_T, rtol=0, atol=1e-4)
        torch.testing.assert_close(scored_BT[b, :n], alone_T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sampled_is_refused_by_name(name):
    policy = policy_of(name, REFUSED[name])
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"ForCausalLM cannot be sampled: .* other logits"):
        check(policy)
    assert torch.equal(torch.get_rng_state(), state)


MOSHI = dict(
    vocab_size=V,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
MOSHI |= dict(ffn_dim=64, head_dim=8)


def test_a_window_that_the_cache_has_and_the_forward_pass_has_not():
    """Rows differ from the length of the window on."""
    policy = policy_of("moshi", MOSHI | dict(sliding_window=20, eos_token_id=2, pad_token_id=0))
    check(policy, max_row_tokens=20)
    with pytest.raises(ValueError, match=r"MoshiForCausalLM cannot be sampled.*other logits"):
        check(policy, max_row_tokens=21)


def test_queries_that_are_scaled_by_position_decode_through_their_own_modules():
    """Ministral 3: beyond 16 tokens, where the written-out decode step would differ."""
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
    rope |= dict(
        llama_4_scaling_beta=0.5,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    )
    for scaling, matches in ((rope, False), (rope | dict(llama_4_scaling_beta=0.0), True)):
        policy = policy_of(
            "ministral3",
            SIZES | dict(head_dim=8, rope_parameters=scaling, max_position_embeddings=64),
        )
        assert check_model(policy, CompletionScorer(policy.model)) is None
        assert policy.is_llama is matches


def test_kernels_without_fp32_are_compared_in_the_runs_precision():
    """As flash attention's; what is wrong shows in bf16, too."""

    def refuse_fp32(module, arguments):
        if not torch.is_autocast_enabled("cpu"):
            raise RuntimeError("bf16 alone")

    AttentionInterface.register("bf16_alone", sdpa_attention_forward)
    AttentionMaskInterface.register("bf16_alone", sdpa_mask)
    right = policy_of("qwen2", SIZES)
    wrong = policy_of("recurrent_gemma", REFUSED["recurrent_gemma"])
    for policy in (right, wrong):
        policy.precision = "bf16"
        policy.model.config._attn_implementation = "bf16_alone"
        policy.model.get_input_embeddings().register_forward_pre_hook(refuse_fp32)
    check(right)
    with pytest.raises(ValueError, match="other logits"):
        check(wrong)
    right.precision = "fp32"
    with pytest.raises(RuntimeError, match="bf16 alone"):
        check(right)


def test_an_exception_of_the_models_code_is_the_reason_for_padded_rows():
    """An empty text must not look like no reason."""
    for text, reason in (("no such layout", "no such layout"), ("", "its layers mix")):
        policy = policy_of("qwen2", SIZES)

        def refuse(module, inputs, options, text=text):
            if options.get("packed") is not None or options.get("forked") is not None:
                raise RuntimeError(text)

        policy.backbone.register_forward_pre_hook(refuse, with_kwargs=True)
        scorer = CompletionScorer(policy.model)
        assert check_model(policy, scorer).startswith(reason)
        assert not scorer.is_packed
        assert policy.model.config._attn_implementation == "sdpa"


def test_tokens_that_no_text_has_trained_are_no_reason_for_padded_rows():
    """Reserved tokens stand at the ends of a vocabulary. Here no model can compute them."""
    policy = policy_of("llama", SIZES | dict(tie_word_embeddings=False))
    with torch.no_grad():
        embeddings_VH = policy.model.get_input_embeddings().weight
        embeddings_VH[1 : V // 4] = torch.nan  # the padding has id 0
        embeddings_VH[-V // 4 :] = torch.nan
    assert check(policy) is None
    assert policy.is_llama


def test_a_models_own_rounding_is_no_reason_for_padded_rows():
    """The sharp attention of twelve layers makes 3e-4 deviations of the rounding of its products."""
    sizes = SIZES | dict(hidden_size=256, intermediate_size=256, num_hidden_layers=12)
    policy = policy_of("llama", sizes)
    with torch.no_grad():
        for layer in policy.model.model.layers:
            layer.self_attn.q_proj.weight *= 14
            layer.self_attn.k_proj.weight *= 14
    assert check(policy) is None
    assert policy.is_llama


@pytest.mark.parametrize("error", [0.004, 0.04])
def test_small_errors_of_packed_rows_are_no_rounding(error):
    """Log-probs that are wrong by 1e-3 to 1e-2 deviations."""
    policy = policy_of("llama", SIZES)

    def distort(module, inputs, options, output):
        if options.get("packed") is not None:
            output.last_hidden_state[..., 0] += error

    policy.backbone.register_forward_hook(distort, with_kwargs=True)
    assert check(policy).startswith("its layers mix")
    assert not policy.is_llama


@pytest.mark.parametrize("share", [0.1, 0.002])
def test_rows_that_change_each_other_are_no_rounding(share):
    """The smaller share changes log-probs by 3e-3 deviations."""
    policy = policy_of("llama", SIZES)

    def mix(module, inputs, output):
        output.last_hidden_state += share * output.last_hidden_state.mean(dim=0)

    policy.backbone.register_forward_hook(mix)
    with pytest.raises(ValueError, match="cannot be sampled"):
        check(policy)
