"""Plays conversations: an engine samples the turns of the model, and tools or an environment answer.

:meth:`TurnsEngine.generate` makes one :class:`Conversation` for each completion, and the engine
calls :meth:`Conversation.reply` with each turn that it has sampled:

1. the format reads the turn as a message and the calls in it,
2. each call goes to the worker of the row, or the whole turn does, as the action of an environment,
3. the results are messages, whose tokens the engine puts behind the turn, without a loss.

A call that fails, or whose worker is killed, is a result that the model reads. An environment that
is lost with its worker, or whose reset or step fails, ends the conversation: it has no reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from grpo.algorithm.batch import Completion, Group, Problem, ToolCall, Turns
from grpo.algorithm.seeding import derive_seed
from grpo.config import Config
from grpo.data import Rows, make_problems
from grpo.data.tiny import is_tiny_tokenizer
from grpo.rewards.calls import Place
from grpo.rollout import Engine, SamplingParams, Stops
from grpo.system import UserError
from grpo.turns.format import Call, TurnFormat
from grpo.turns.function import sample_by_function
from grpo.turns.sessions import Info, Message, as_content
from grpo.turns.tools import ENVIRONMENT, Tools
from grpo.workers import Answer, Request

NO_ENVIRONMENT = Info(name=None, tools={}, source_files={})


@dataclass
class Conversation:
    """One completion of a problem: its environment, and its turns so far.

    A thread of the row's worker runs it.
    """

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

    def __post_init__(self) -> None:
        columns = self.problem.columns
        infos = self.tools.infos_of(columns)
        self.schemas = self.tools.schemas_of(columns)
        self.key_of_tool = {tool: key for key, info in infos.items() for tool in info.tools}
        self.key = self.tools.environment_of(columns)
        self.environment = infos.get(self.key, NO_ENVIRONMENT)

        self.ids: list[int] = []
        """The tokens of all turns and answers so far."""
        self.messages: list[Message] = []
        """The turns and answers as chat messages."""
        self.texts: list[str] = []
        """The texts of the model's turns."""
        self.rewards: list[float | None] = []
        self.calls: list[ToolCall] = []
        self.num_requests = 0
        self.stop_reason = ""
        self.failure = ""
        """The reason why the environment has failed, for the user."""

    def reset(self) -> str | list[Message] | None:
        """Reset the environment. Returns what it adds to the prompt."""
        row = {"prompt": self.problem.prompt} | self.problem.columns
        row.pop(ENVIRONMENT, None)
        return self._ask(self.key, "reset", row, self.group_seed).value

    def reply(self, ids: Sequence[int]) -> list[int] | None:
        """The tokens that follow a turn (:data:`grpo.rollout.interface.Replies`)."""
        calls = self._read_turn(ids)
        if self.failure:  # of the reset
            return None

        rollout = self.tools.config.rollout
        answers = []
        if self.environment.steps:
            # The action is the whole turn, in which no calls are read.
            answers = self._step(self.texts[-1])
        elif not calls:
            self.stop_reason = "stop"
        if len(self.texts) == rollout.max_turns:
            # Nobody would read the results of the calls, so they are not made.
            self.stop_reason = self.stop_reason or "max_turns"
        if not self.stop_reason:
            answers += [self._call(*call) for call in calls]
        if self.stop_reason or self.failure:
            return None

        if rollout.max_tool_tokens is not None:
            for answer in answers:
                answer["content"] = self.form.cut(answer["content"], rollout.max_tool_tokens)
        room = self.max_length - len(self.ids)
        answer_ids = self.form.answer(answers, ids[-1], room)
        if answer_ids is not None:  # else it does not fit, and the completion ends here
            self.messages += answers
            self.ids += answer_ids
        return answer_ids

    def _read_turn(self, ids: Sequence[int]) -> list[Call]:
        """Add a turn of the model. Returns its calls."""
        text = self.stops.text(ids)
        prefix = [*self.problem.prompt_ids, *self.ids]
        message, calls = self.form.read(text, ids, prefix, self.schemas)
        self.ids += ids
        self.messages.append(message)
        self.texts.append(message["content"])
        return calls

    def _call(self, name: str, arguments: dict[str, Any] | str) -> Message:
        """Call a tool. Returns the message of its result."""
        key = self.key_of_tool.get(name)
        if isinstance(arguments, str):  # what is wrong with the call
            answer = Answer("error", message=arguments)
        elif key is None:
            answer = Answer("error", message=f"Tool {name} not found.")
        else:
            answer = self._ask(key, "call", name, arguments, self._next_seed())
        error = as_content(answer.message)
        self.calls.append(ToolCall(name, answer.seconds, error))
        content = {"error": error} if error else answer.value  # the words of TRL
        return {"role": "tool", "name": name, "content": str(content)}

    def _step(self, action: str) -> list[Message]:
        """Give an action to the environment. Returns the messages that it answers."""
        answer = self._ask(self.key, "step", action, self._next_seed())
        if self.failure:
            return []
        messages, reward, is_done = answer.value
        self.rewards.append(reward)
        if is_done:
            self.stop_reason = "environment"
        return messages

    def _next_seed(self) -> int:
        self.num_requests += 1
        return derive_seed(self.seed, "tool", self.num_requests)

    def _ask(self, key: Any, method: str, *arguments: Any) -> Answer:
        """Call a method of a tool or environment (:mod:`grpo.turns.sessions`) in the row's worker.

        Returns its answer: a value, or a message that says what has failed as the model reads it.
        """
        request = Request(key, method, (self.row, *arguments))
        worker = self.tools.worker_of(Place(key, self.row))
        limit_s = self.tools.config.reward.timeout_s
        (answer,) = worker.ask([request], limit_s)
        if answer.kind == "ok":
            return answer

        # What the worker says about itself is for the user. The model knows of tools alone.
        texts = {"timeout": f"no result within {limit_s:g} seconds", "died": "the tool has died"}
        error = texts.get(answer.kind) or answer.message or answer.error.partition(":")[0]
        if key == self.key:
            is_lost = answer.is_worker_lost or isinstance(answer.value, UserError)
            if method != "call":
                self.failure = f"{method}: {answer.error or error}"
            elif is_lost:
                self.failure = f"{arguments[0]}: {error}"
        return Answer("error", message=error, seconds=answer.seconds)

    def end(self, completion: Completion) -> Turns:
        """The record of a complete completion, with the environment's own reward."""
        rest = completion.ids[len(self.ids) :]
        if rest:  # a turn without an end has had no reply
            self._read_turn(rest)

        reward = None
        if self.environment.has_reward and not self.failure:
            if not self.environment.steps:
                reward = self._ask(self.key, "get_reward").value
            elif None not in self.rewards:
                reward = float(sum(self.rewards))

        stop_reason = "failed" if self.failure else self.stop_reason or "length"
        return Turns(
            completion.ids,
            self.texts[-1],
            stop_reason != "length",
            completion.sampling_logprobs,
            completion.allowed,
            loss_mask=completion.loss_mask,
            messages=tuple(self.messages),
            stop_reason=stop_reason,
            rewards=tuple(self.rewards),
            calls=tuple(self.calls),
            environment=Place(self.key, self.row) if self.key else None,
            environment_name=self.environment.name,
            environment_reward=reward,
            num_turns=len(self.texts),
        )


class TurnsEngine:
    """An engine (:class:`grpo.rollout.interface.Engine`) of conversations with tools.

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
        self.form = TurnFormat(
            self.policy.tokenizer,
            self.policy.eos_ids,
            config.tools_format,
            config.data.chat_template_kwargs,
        )
        if tools.environments:
            # An evaluation needs no more environments, and so no more sessions of a server,
            # than a step.
            rollout = config.rollout
            num_problems = rollout.prompts_per_step // num_ranks
            self.rows_per_call = num_problems * rollout.num_generations
        self._data = config.data
        self._reported: set[str] = set()
        """The tools that a warning has been printed about."""

    def __getattr__(self, name: str) -> Any:
        """Other attributes are those of the wrapped engine: its policy, its weights."""
        return getattr(self.engine, name)

    def __str__(self) -> str:
        return str(self.engine)

    def check(self) -> None:
        """ValueError unless the chat template and the environments are fit for the run."""
        if self.tools.function:
            return
        infos = self.tools.infos.values()
        notes = self.form.check(
            uses_tools=not any(info.steps for info in infos),
            schemas=[schema for info in infos for schema in info.tools.values()],
        )
        if not is_tiny_tokenizer(self.policy.tokenizer):
            for note in notes:
                self.warn(note)

    def close(self) -> None:
        self.tools.close()
        self.engine.close()

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
        tools = self.tools
        if tools.function:
            return sample_by_function(
                self.engine,
                tools,
                problems,
                sampling,
                seed_key,
                on_tokens,
            )

        tools.pool.begin_step()
        stops = Stops(self.policy, sampling.stop)
        G = sampling.num_generations
        conversations = []
        for problem in problems:
            group_seed = derive_seed(*seed_key, problem.index, -1)
            if tools.owns_prompts:  # without a dataset, a row is its seed
                group_seed = problem.columns["seed"]
            for g in range(G):
                conversation = Conversation(
                    tools,
                    self.form,
                    stops,
                    problem,
                    row=len(conversations),
                    max_length=sampling.max_completion_length,
                    group_seed=group_seed,
                    seed=derive_seed(*seed_key, problem.index, g),
                )
                conversations.append(conversation)
        if tools.environments:
            self._reset(conversations, G)

        def reply(row: int, ids: Sequence[int]) -> Future:
            return tools.submit(row, conversations[row].reply, ids)

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
            futures.append(tools.submit(conversation.row, conversation.end, completion))
        completions = [future.result() for future in futures]

        self._warn_of_failures(conversations)
        return [
            Group(problem, tuple(completions[p * G : (p + 1) * G]))
            for p, problem in enumerate(begun)
        ]

    def _reset(self, conversations: Sequence[Conversation], G: int) -> None:
        """Reset the environments, and append what they say to the prompts."""
        futures = [self.tools.submit(c.row, c.reset) for c in conversations]
        texts = [future.result() for future in futures]
        for start in range(0, len(conversations), G):
            group = conversations[start : start + G]
            said = [texts[c.row] for c in group if not c.failure]
            if any(text != said[0] for text in said):
                raise UserError(
                    f"reset() of {group[0].environment.name} gave the completions of one problem "
                    "different prompts: draw from `seed`, an argument that they share, "
                    "or from the module random"
                )
            if not said or said[0] is None:
                continue
            problem = group[0].problem
            failure = ""
            try:
                problem = self._with_prompt(problem, said[0])
            except ValueError as error:  # the user's environment makes a prompt that is too long
                failure = str(error)
            for conversation in group:
                conversation.problem = problem
                conversation.failure = failure or conversation.failure

    def _with_prompt(self, problem: Problem, text: str | list[Message]) -> Problem:
        """The problem with ``text`` behind its last message, or with messages in its place.

        ValueError if the prompt is too long, or empty.
        """
        prompt = problem.prompt
        if isinstance(text, list):
            prompt = text
        elif isinstance(prompt, list):
            last = prompt[-1] | {"content": prompt[-1]["content"] + text}
            prompt = [*prompt[:-1], last]
        else:
            prompt += text
        rows = Rows(f"the reset with {prompt!r:.80}", [prompt], [problem.columns])
        (found,) = make_problems(
            rows,
            self._data,
            self.policy.tokenizer,
            schemas_of=self.tools.schemas_of,
        ).problems
        return replace(found, index=problem.index)

    def _warn_of_failures(self, conversations: Sequence[Conversation]) -> None:
        failures = [c.failure for c in conversations if c.failure]
        if failures:
            self.warn(
                f"warning: the environments of {len(failures)} completions have failed, "
                f"first with {failures[0]}"
            )
        calls = [call for conversation in conversations for call in conversation.calls]
        for name in self.tools.names:
            errors = [call.error for call in calls if call.name == name]
            if errors and all(errors) and name not in self._reported:
                # Once per run, since a tool that cannot work fails in each step.
                self._reported.add(name)
                self.warn(
                    f"warning: all {len(errors)} calls of {name} failed, "
                    f"first with {errors[0][:200]}"
                )
