"""The vLLM engine (``rollout.engine=vllm``): servers get the weights before each rollout and sample over HTTP."""

from grpo.vllm.build import build_engine

__all__ = ["build_engine"]
