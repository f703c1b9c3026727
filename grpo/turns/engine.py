"""Plays conversations: an engine samples the turns of the model, and tools or an environment answer each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from grpo.algorithm.batch import Completion, Group, Problem, ToolCall, Turns
from grpo.algorithm.seeding import derive_seed
from grpo.config import Config, DataConfig
from grpo.data import Rows, make_problems
from grpo.data.tiny import is_tiny_tokenizer
from grpo.rewards.calls import Place
from grpo.rollout import Engine, SamplingParams, Stops
from grpo.rollout.interface import ROWS_PER_CALL
from grpo.system import UserError
from grpo.turns.format import TurnFormat
from grpo.turns.function import sample_by_function
from grpo.turns.tools import ENVIRONMENT, Tools
from grpo.workers import Answer

Message = dict[str, Any]
"""A chat message."""


@dataclass
class Conversation:
    """One completion of a problem: its environment, and its turns so far. A thread of the row's worker runs it."""

    tools: Tools
    form: TurnFormat
    stops: Stops
    """Gives the texts of turns."""
    problem: Problem
    row: int
    """Its number in the rollout, which chooses the worker and the environment."""
    max_length: int
    """Most tokens of all turns and answers."""
    group_seed: int
    """The resets of a group's environments share it."""
    seed: int
    ids: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    num_requests: int = 0
    num_turns: int = 0
    last_text: str = ""
    """The text of the model's last turn."""
    stop_reason: str | None = None
    failure: str = ""

    def __post_init__(self) -> None:
        columns = self.problem.columns
        self.schemas = self.tools.schemas_of(columns)
        self.key_of_tool = {tool: key for key, info in self.tools.infos_of(columns).items() for tool in info.tools}
        self.key = self.tools.environment_of(columns)
        """The key of the environment."""
        self.environment = self.tools.environments.get(self.key)

    def begin(self) -> str | list[Message] | None:
        """Reset the environment; what it adds to the prompt."""
        row = {"prompt": self.problem.prompt} | self.problem.columns
        row.pop(ENVIRONMENT, None)
        return self._ask_environment("begin", "reset", row, self.group_seed)

    def reply(self, ids: Sequence[int]) -> list[int] | None:
        """The tokens that follow a turn (:data:`grpo.rollout.interface.Replies`)."""
        text, calls = self._read_turn(ids)
        if self.stop_reason is not None:  # the environment has failed
            return None
        is_last_turn = self.tools.max_turns is not None and self.num_turns >= self.tools.max_turns
        answers = []
        if self.environment is not None and self.environment.steps:
            answers = self._step(text)
            if is_last_turn:
                self.stop_reason = self.stop_reason or "max_turns"
        elif not calls:
            self.stop_reason = "stop"
        elif is_last_turn:
            self.stop_reason = "max_turns"
        else:
            answers = [self._call(*call) for call in calls]
        if self.stop_reason is not None:
            return None

        most = self.tools.max_tool_tokens
        if most is not None:
            answers = [message | {"content": self.form.cut(message["content"], most)} for message in answers]
        answer_ids = self.form.answer(answers, ids[-1], self.max_length - len(self.ids))
        if answer_ids is None:
            self.stop_reason = "length"
            return None
        self.messages += answers
        self.ids += answer_ids
        return answer_ids

    def _read_turn(self, ids: Sequence[int]) -> tuple[str, list[Any]]:
        """Add a turn of the model; its text and its calls."""
        text = self.stops.text(ids)
        prefix = [*self.problem.prompt_ids, *self.ids]
        message, calls = self.form.read(text, ids, prefix, self.schemas)
        self.ids += ids
        self.messages.append(message)
        self.num_turns += 1
        self.last_text = message["content"]
        return text, calls

    def _call(self, name: str, arguments: dict[str, Any] | str) -> Message:
        key = self.key_of_tool.get(name)
        if isinstance(arguments, str):  # what is wrong with the call
            answer = Answer("error", message=arguments)
        elif key is None:
            answer = Answer("error", message=f"Tool {name} not found.")
        else:
            answer = self.tools.ask(self.row, key, "call", name, arguments, self._next_seed())

        content = answer.value
        error = ""
        if answer.kind != "ok":
            error = self.tools.failure_text(answer)
            content = {"error": error}  # the words of TRL
            is_lost = answer.is_worker_lost or isinstance(answer.value, UserError)
            if key == self.key and is_lost:
                self._fail(f"{name}: {error}")
        self.calls.append(ToolCall(name, answer.seconds, error))
        return {"role": "tool", "name": name, "content": str(content)}

    def _step(self, action: str) -> list[Message]:
        result = self._ask_environment("step", "step", action, self._next_seed())
        if result is None:
            return []
        self.rewards.append(result.reward)
        if result.done:
            self.stop_reason = "environment"
        if isinstance(result.observation, str):
            return [{"role": "user", "content": result.observation}]
        return list(result.observation)

    def _ask_environment(self, method: str, name: str, *arguments: Any) -> Any:
        """What a method of the environment returns; None if it fails, and the conversation with it.

        ``name``: of the user's method, for the message.
        """
        answer = self.tools.ask(self.row, self.key, method, *arguments)
        if answer.kind == "ok":
            return answer.value
        self._fail(f"{name}: {answer.error or self.tools.failure_text(answer)}")
        return None

    def _next_seed(self) -> int:
        self.num_requests += 1
        return derive_seed(self.seed, "tool", self.num_requests)

    def _fail(self, reason: str) -> None:
        self.stop_reason = "failed"
        self.failure = reason

    def end(self, completion: Completion) -> Turns:
        """The record of a complete completion, with the environment's own reward."""
        rest = completion.ids[len(self.ids) :]
        if rest:  # a turn without an end has had no reply
            self._read_turn(rest)
            self.stop_reason = self.stop_reason or "length"

        reward = None
        place = None
        name = None
        if self.environment is not None:
            place = Place(self.key, self.row)
            name = self.environment.name
            if self.environment.steps and self.stop_reason != "failed":
                reward = None if None in self.rewards else float(sum(self.rewards))
            elif self.environment.has_reward and self.stop_reason != "failed":
                reward = self._ask_environment("reward", "get_reward")

        known = vars(completion) | {"text": self.last_text, "finished": self.stop_reason != "length"}
        return Turns(
            **known,
            num_turns=self.num_turns,
            messages=tuple(self.messages),
            stop_reason=self.stop_reason or "length",
            rewards=tuple(self.rewards),
            calls=tuple(self.calls),
            environment=place,
            environment_name=name,
            environment_reward=reward,
        )


class TurnsEngine:
    """An engine (:class:`grpo.rollout.interface.Engine`) whose completions are conversations with tools.

    Args:
        warn: gets a line about the first environment that fails in a rollout.
        num_ranks: ranks that share the prompts of a step.
    """

    def __init__(
        self,
        engine: Engine,
        tools: Tools,
        config: Config,
        warn: Callable[[str], None] = print,
        num_ranks: int = 1,
    ):
        self.engine = engine
        self.tools = tools
        self.warn = warn
        self.policy = engine.policy
        self.communicates = engine.communicates
        self.reported: set[str] = set()
        """The tools that a warning has been printed about."""
        self.form = TurnFormat(
            engine.policy.tokenizer,
            engine.policy.eos_ids,
            tools.format,
            config.data.chat_template_kwargs,
        )
        self.rows_per_call = ROWS_PER_CALL
        if tools.environments:
            # An evaluation needs no more environments, and so no more sessions of a server, than a step.
            rollout = config.rollout
            self.rows_per_call = rollout.prompts_per_step // num_ranks * rollout.num_generations
        self._data = config.data

    def check(self) -> None:
        """ValueError unless the chat template and the environments are fit for the run."""
        if self.tools.function:
            return
        notes = self.form.check(uses_tools=not self.tools.steps, schemas=self.tools.all_schemas)
        if not is_tiny_tokenizer(self.policy.tokenizer):
            for note in notes:
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

        The environments of these completions live until the next call.

        Raises:
            UserError: if the environments of a group begin with different prompts.
        """
        if self.tools.function:
            return sample_by_function(self.engine, self.tools, problems, sampling, seed_key, on_tokens)
        self.tools.begin_rollout()
        stops = Stops(self.policy, sampling.stop)
        G = sampling.num_generations
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
        if self.tools.environments:
            self._begin(conversations, G)

        def reply(row: int, ids: Sequence[int]) -> Future:
            return self.tools.submit(row, conversations[row].reply, ids)

        begun = [conversation.problem for conversation in conversations[::G]]
        groups = self.engine.generate(
            begun,
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
        return [Group(problem, tuple(completions[p * G : (p + 1) * G])) for p, problem in enumerate(begun)]

    def _begin(self, conversations: Sequence[Conversation], G: int) -> None:
        """Reset the environments, and append what they say to the prompts."""
        futures = [self.tools.submit(c.row, c.begin) for c in conversations]
        texts = [future.result() for future in futures]
        for start in range(0, len(conversations), G):
            group = conversations[start : start + G]
            said = [texts[c.row] for c in group if c.stop_reason != "failed"]
            if any(text != said[0] for text in said):
                raise UserError(
                    f"reset() of {group[0].environment.name} gave the completions of one problem different "
                    "prompts: draw from `seed`, an argument that they share, or from the module random"
                )
            if not said or said[0] is None:
                continue
            try:
                problem = self._with_prompt(group[0].problem, said[0])
            except ValueError as error:  # the text of the user's environment makes a prompt that is too long, or none
                for conversation in group:
                    conversation._fail(str(error))
                continue
            for conversation in group:
                conversation.problem = problem

    def _with_prompt(self, problem: Problem, text: str | list[Message]) -> Problem:
        """The problem with ``text`` behind its last message, or with messages in its place."""
        prompt = problem.prompt
        if isinstance(text, list):
            prompt = text
        elif isinstance(prompt, list):
            last = prompt[-1] | {"content": prompt[-1]["content"] + text}
            prompt = [*prompt[:-1], last]
        else:
            prompt = (prompt or "") + text
        asked = one_problem(prompt, problem.columns, self._data, self.policy.tokenizer, self.tools)
        return replace(asked, index=problem.index)

    def _warn_of_failures(self, conversations: Sequence[Conversation]) -> None:
        failures = [c.failure for c in conversations if c.failure]
        if failures:
            self.warn(f"warning: the environments of {len(failures)} completions have failed, first with {failures[0]}")
        calls = [call for conversation in conversations for call in conversation.calls]
        for name in self.tools.names:
            errors = [call.error for call in calls if call.name == name]
            if errors and all(errors) and name not in self.reported:
                self.reported.add(name)
                self.warn(f"warning: all {len(errors)} calls of {name} failed, first with {errors[0][:200]}")


def one_problem(prompt: Any, columns: dict[str, Any], data: DataConfig, tokenizer: Any, tools: Tools) -> Problem:
    """A prompt of an environment as a problem. ValueError if it is too long."""
    rows = Rows(f"the reset with {prompt!r:.80}", [prompt], [columns])
    (problem,) = make_problems(rows, data, tokenizer, schemas_of=tools.schemas_of).problems
    return problem
