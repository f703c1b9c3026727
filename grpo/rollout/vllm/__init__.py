"""The vLLM engine: completions from vLLM servers, which get the policy's weights before each rollout. Imported when it is switched on."""

from grpo.rollout.vllm.client import Server, ServerError
from grpo.rollout.vllm.engine import VLLMEngine

__all__ = ["Server", "ServerError", "VLLMEngine"]
