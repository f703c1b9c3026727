"""Which fast paths of an update (:mod:`grpo.attention.fast_paths`) are right for a run's model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from grpo.algorithm.logprobs import CompletionScorer
from grpo.attention import fast_paths
from grpo.distributed import World, abandon_pass, is_sharded, share
from grpo.model import Policy, decoder_layers
from grpo.rollout.llama_decoder import has_llama_layers

TOLERANCE = {"fp32": 1e-3, "bf16": 0.05}


def prove_update(
    world: World, policy: Policy, scorer: CompletionScorer, others: Iterable[CompletionScorer], *, checkpointing: bool
) -> list[str]:
    """Switch on those that give the log-probs, entropies and gradients of the plain code; a line for each other one.

    All ranks call it together. Layers are compiled if they are Llama's and not checkpointed; those of ``others``, the
    reference, too, so that its log-probs are rounded alike.
    """
    if not fast_paths.may_use(world.device, fast_paths.UPDATE):
        return []
    parts = [fast_paths.SCORES] * scorer.plain_head + [fast_paths.FLEX] * scorer.packed
    if scorer.packed and has_llama_layers(policy.backbone) and not checkpointing:
        for model in (policy.model, *(other.model for other in others)):
            fast_paths.compile_layers(decoder_layers(model))
        parts.append(fast_paths.LAYERS)
    notes = []
    for part in parts:
        tolerance = TOLERANCE[policy.precision]
        notes += fast_paths.prove(part, lambda: _scores_and_gradients(policy, scorer), tolerance, world.all_true)
    return notes


def _scores_and_gradients(policy: Policy, scorer: CompletionScorer) -> list[Tensor]:
    """Of two batches of different sizes: log-probs, entropies and the gradients of small weights, this rank's share."""
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    watched = [p for p in trained if p.ndim == 1] or trained
    found = []
    try:
        for U, G, T in ((2, 3, 40), (3, 4, 60)):
            inputs = [x.to(policy.device) for x in _random_batch(policy, U, G, T)]
            with policy.autocast():
                logprobs_BT, entropies_BT = scorer(*inputs)
            (logprobs_BT * torch.arange(1.0, T + 1, device=policy.device)).sum().backward()
            mask_BT = inputs[2]
            found += [logprobs_BT[mask_BT].detach(), entropies_BT[mask_BT]]
            found.append(torch.cat([share(p.grad).flatten() for p in watched if p.grad is not None]))
            policy.model.zero_grad()
    except Exception:
        if is_sharded(scorer):
            abandon_pass(scorer)
        raise
    finally:
        policy.model.zero_grad()
    return found


def _random_batch(policy: Policy, U: int, G: int, T: int) -> tuple[Tensor, ...]:
    """Inputs of the scorer: U prompts of up to 150 tokens, G completions each, of up to T tokens."""
    rng, vocabulary = torch.Generator().manual_seed(U), policy.model.get_input_embeddings().weight.shape[0]
    longest, B = min((policy.context_length or 300) - T, 150), U * G
    prompt_lengths_B = torch.randint(longest // 2, longest + 1, (U,), generator=rng).repeat_interleave(G)
    lengths_B = torch.randint(1, T + 1, (B,), generator=rng)
    ids_BS = torch.randint(vocabulary, (B, longest + T), generator=rng)
    group_B = torch.arange(U).repeat_interleave(G)
    prompts_BS = ids_BS[::G].repeat_interleave(G, dim=0)
    ids_BS = torch.where(torch.arange(longest + T) < prompt_lengths_B[:, None], prompts_BS, ids_BS)
    return ids_BS, prompt_lengths_B, torch.arange(T) < lengths_B[:, None], group_B
