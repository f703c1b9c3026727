"""Plays conversations: an engine samples the turns of the model, and tools or an environment answer each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from typing import Any

from grpo.algorithm.batch import Completion, Group, Problem, ToolCall, Turns
from grpo.algorithm.seeding import derive_seed
from grpo.config import Config, DataConfig
from grpo.data import Rows, make_problems
from grpo.data.tiny import is_tiny_tokenizer
from grpo.rewards.worker import Pickled
from grpo.rollout import Engine, SamplingParams, Stops
from grpo.system import UserError
from grpo.turns.format import TurnFormat
from grpo.turns.function import sample_by_function
from grpo.turns.tools import COLUMN, Tools
from grpo.turns.worker import Reply


@dataclass
class Conversation:
    """One completion of a problem: its environment, and its turns so far. A thread of the row's worker runs it."""

    tools: Tools
    form: TurnFormat
    stops: Stops
    """Gives the texts of turns."""
    problem: Problem
    row: int
    """Its number in the rollout, which chooses the worker."""
    max_length: int
    """Most tokens of all turns and answers."""
    group_seed: int
    """The resets of a group's environments share it."""
    seed: int
    environment: bytes | int | None = None
    ids: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    num_requests: int = 0
    num_turns: int = 0
    last_text: str = ""
    """Of the model's last turn."""
    stop_reason: str | None = None
    failure: str = ""

    def __post_init__(self) -> None:
        self.schemas = self.tools.schemas_of(self.problem.columns)
        self.name, self.info = self.tools.environment_of(self.problem.columns)
        self.is_here = self.name in self.tools.here.environments

    def begin(self) -> str | list[dict[str, str]] | None:
        """Reset the environment; what it adds to the prompt."""
        row = {"prompt": self.problem.prompt} | self.problem.columns
        row.pop(COLUMN, None)
        reply = self._request(
            "begin",
            self.name,
            row,
            self.group_seed,
        )
        self.environment = reply.environment
        if reply.failed:
            self._fail(f"reset: {reply.text}")
            return None
        return reply.text

    def reply(self, ids: Sequence[int]) -> list[int] | None:
        """The tokens that follow a turn (:data:`grpo.rollout.interface.Replies`)."""
        text = self.stops.text(ids)
        prefix = [*self.problem.prompt_ids, *self.ids]
        message, calls = self.form.read(text, ids, prefix, self.schemas)
        self.ids += ids
        self._add_turn(message)
        is_last_turn = self.tools.max_turns is not None and self.num_turns >= self.tools.max_turns
        if self.stop_reason is not None:  # the environment has failed
            return None
        if self.info is not None and self.info.steps:
            answers = self._step(text)
            self.stop_reason = self.stop_reason or ("max_turns" if is_last_turn else None)
        elif not calls or is_last_turn:
            answers, self.stop_reason = [], "max_turns" if calls else "stop"
        else:
            answers = [self._call(*call) for call in calls]
        if self.stop_reason is not None:
            return None
        if (most := self.tools.max_tool_tokens) is not None:
            answers = [message | {"content": self.form.cut(message["content"], most)} for message in answers]
        found = self.form.answer(answers, ids[-1], self.max_length - len(self.ids))
        if found is None:
            self.stop_reason = "length"
            return None
        self.messages += answers
        self.ids += found
        return found

    def _add_turn(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.num_turns, self.last_text = self.num_turns + 1, message["content"]

    def _call(self, name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
        if isinstance(arguments, str):  # what is wrong with the call
            reply = Reply(None, arguments, failed=True)
        elif self.info is not None and name in self.info.methods:
            reply = self._request(
                "call",
                self.environment,
                name,
                arguments,
                self._next_seed(),
            )
            if reply.environment is not None:
                self.environment = reply.environment
            elif isinstance(self.environment, int):  # a pickled one is as it was before the call
                self._fail("its environment was in the worker that was killed")
        else:
            reply = self.tools.request(
                self.row,
                name in self.tools.here.tools,
                "call",
                None,
                name,
                arguments,
                self._next_seed(),
            )

        error = str(reply.text) if reply.failed else ""
        self.calls.append(ToolCall(name, reply.seconds, error))
        # The words of TRL, for what is no text and for errors.
        content = {"error": reply.text} if reply.failed else reply.text
        return {
            "role": "tool",
            "name": name,
            "content": str(content),
        }

    def _step(self, action: str) -> list[dict[str, Any]]:
        seed = self._next_seed()
        reply = self._request("step", self.environment, action, seed)
        if reply.failed:
            self._fail(f"step: {reply.text}")
            return []
        self.environment = reply.environment
        self.rewards.append(reply.reward)
        if reply.done:
            self.stop_reason = "environment"
        if isinstance(reply.text, str):
            return [{"role": "user", "content": reply.text}]
        return list(reply.text or ())

    def _request(self, method: str, *arguments: Any) -> Reply:
        """The reply of the process that has the environment."""
        return self.tools.request(
            self.row,
            self.is_here,
            method,
            *arguments,
        )

    def _next_seed(self) -> int:
        self.num_requests += 1
        return derive_seed(self.seed, "tool", self.num_requests)

    def _fail(self, reason: str) -> None:
        self.stop_reason, self.failure = "failed", reason

    def end(self, completion: Completion) -> Turns:
        """The record of a complete completion, with the environment's own reward."""
        if rest := completion.ids[len(self.ids) :]:  # a turn without an end has had no reply
            prefix = [*self.problem.prompt_ids, *self.ids]
            message, _ = self.form.read(self.stops.text(rest), rest, prefix, self.schemas)
            self._add_turn(message)
            self.stop_reason = self.stop_reason or "length"
        reward = None
        environment = None
        has_failed = self.stop_reason == "failed"
        has_reward = self.info is not None and self.info.has_reward and not has_failed
        if isinstance(self.environment, int) or has_reward:
            reply = self._request("end", self.environment)
            reward = reply.reward
            if reply.failed and not has_failed:
                self._fail(f"get_reward: {reply.text}")
        if self.info is not None and not has_failed:
            if self.info.steps:
                reward = None if None in self.rewards else float(sum(self.rewards))
            if isinstance(self.environment, bytes):
                source = self.tools.sources[self.name]
                environment = Pickled(
                    source.name,
                    self.environment,
                    source.name in self.tools.objects,
                )

        known = {field.name: getattr(completion, field.name) for field in fields(Completion)}
        known["text"] = self.last_text
        known["finished"] = self.stop_reason != "length"
        return Turns(
            **known,
            num_turns=self.num_turns,
            messages=tuple(self.messages),
            stop_reason=self.stop_reason or "length",
            rewards=tuple(self.rewards),
            calls=tuple(self.calls),
            environment=environment,
            environment_name=self.info and self.info.class_name,
            environment_reward=reward,
        )


class TurnsEngine:
    """An engine (:class:`grpo.rollout.interface.Engine`) whose completions are conversations with tools."""

    def __init__(self, engine: Engine, tools: Tools, config: Config, warn: Callable[[str], None] = print):
        """``warn`` gets a line about the first environment that fails in a rollout. ValueError: see :meth:`check`."""
        self.engine, self.tools, self.data, self.warn = engine, tools, config.data, warn
        self.policy, self.communicates = engine.policy, engine.communicates
        self.reported: set[str] = set()
        """The tools that a warning has been printed about."""
        self.form = TurnFormat(
            engine.policy.tokenizer,
            engine.policy.eos_ids,
            tools.format,
            config.data.chat_template_kwargs,
        )

    def check(self) -> None:
        """ValueError unless the chat template and the environments are fit for the run."""
        if not self.tools.function:
            notes = self.form.check(uses_tools=not self.tools.steps, schemas=self.tools.all_schemas)
            for note in [] if is_tiny_tokenizer(self.policy.tokenizer) else notes:
                self.warn(note)

    def close(self) -> None:
        self.tools.close()
        self.engine.close()

    def __getattr__(self, name: str) -> Any:
        """Other attributes are those of the wrapped engine: its weights, its dry run."""
        return getattr(self.engine, name)

    def __str__(self) -> str:
        return str(self.engine)

    def generate(
        self,
        problems: Sequence[Problem],
        sampling: SamplingParams,
        *,
        seed_key: tuple[int, str, int],
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Group]:
        """See :meth:`grpo.rollout.interface.Engine.generate`; the completions are :class:`Turns`.

        UserError if the environments of a group begin with different prompts.
        """
        if self.tools.function:
            return sample_by_function(self.engine, self.tools, problems, sampling, seed_key, on_tokens)
        self.tools.begin_rollout()
        G = sampling.num_generations
        stops = Stops(self.policy, sampling.stop)
        conversations = []
        for problem in problems:
            group_seed = derive_seed(*seed_key, problem.index, -1)
            if self.tools.owns_prompts:  # without a dataset, a row is its seed
                group_seed = problem.columns["seed"]
            for g in range(G):
                conversation = Conversation(
                    self.tools,
                    self.form,
                    stops,
                    problem,
                    len(conversations),
                    sampling.max_completion_length,
                    group_seed,
                    derive_seed(*seed_key, problem.index, g),
                )
                conversations.append(conversation)
        problems = self._begin(problems, conversations, G)

        def reply(row: int, ids: Sequence[int]) -> Future:
            return self.tools.submit(row, conversations[row].reply, ids)

        groups = self.engine.generate(
            problems,
            sampling,
            seed_key=seed_key,
            on_tokens=on_tokens,
            replies=reply,
        )
        sampled = [completion for group in groups for completion in group.completions]
        futures = []
        for conversation, completion in zip(conversations, sampled, strict=True):
            futures.append(self.tools.submit(conversation.row, conversation.end, completion))
        completions = [future.result() for future in futures]

        self._warn_of_failures(conversations)
        return [Group(problem, tuple(completions[p * G : (p + 1) * G])) for p, problem in enumerate(problems)]

    def _warn_of_failures(self, conversations: list[Conversation]) -> None:
        failures = [c.failure for c in conversations if c.failure]
        if failures:
            self.warn(f"warning: the environments of {len(failures)} completions have failed, first with {failures[0]}")
        for name in self.tools.names:
            calls = []
            for conversation in conversations:
                calls += [call for call in conversation.calls if call.name == name]
            all_failed = all(call.failed for call in calls)
            if calls and all_failed and name not in self.reported:
                self.reported.add(name)
                self.warn(f"warning: all {len(calls)} calls of {name} failed, first with {calls[0].error[:200]}")

    def _begin(self, problems: Sequence[Problem], conversations: list[Conversation], G: int) -> list[Problem]:
        """Reset the environments, and append what they say to the prompts."""
        if not self.tools.description.environments:
            return list(problems)
        futures = [self.tools.submit(c.row, c.begin) for c in conversations]
        texts, begun = [future.result() for future in futures], []
        for p, problem in enumerate(problems):
            of_group = [(c, texts[c.row]) for c in conversations[p * G : (p + 1) * G]]
            found = [text for c, text in of_group if c.stop_reason != "failed"]
            if any(text != found[0] for text in found):
                raise UserError(
                    f"reset() of {of_group[0][0].info.class_name} gave the completions of one problem different "
                    "prompts: draw from `seed`, an argument that they share, or from the module random"
                )
            try:
                begun.append(problem if not found or found[0] is None else self._with_prompt(problem, found[0]))
            except ValueError as error:  # the text of the user's environment makes a prompt that is too long, or none
                begun.append(problem)
                for c, _ in of_group:
                    c._fail(str(error))
            for c, _ in of_group:
                c.problem = begun[-1]
        return begun

    def _with_prompt(self, problem: Problem, text: str | list[dict[str, str]]) -> Problem:
        """The problem with ``text`` behind its last message, or with messages in its place."""
        prompt = problem.prompt
        if isinstance(text, list):
            prompt = text
        elif isinstance(prompt, list):
            prompt = [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + text}]
        else:
            prompt = (prompt or "") + text
        return replace(
            one_problem(prompt, problem.columns, self.data, self.policy.tokenizer, self.tools), index=problem.index
        )


def one_problem(prompt: Any, columns: dict[str, Any], data: DataConfig, tokenizer: Any, tools: Tools) -> Problem:
    """A prompt of an environment as a problem. ValueError if it is too long."""
    rows = Rows(f"the reset with {prompt!r:.80}", [prompt], [columns])
    (problem,) = make_problems(rows, data, tokenizer, schemas_of=tools.schemas_of).problems
    return problem
